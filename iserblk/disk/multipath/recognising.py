"""Recognises a LUN behind several target names: URLs of it become one address. Runs in trio.

A storage controller may have a target name for each of its portals. Who takes the LUN behind each
for a disk of its own has two journals, and one may write again what the other has overwritten. So
LUNs of different targets are compared before any is opened, by what they say of themselves (VPD
page 83h). Only identifiers that are unique world-wide prove that LUNs are one: all else is the same
for the LUNs of two hosts that have the same program, with its defaults.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import trio

from iserblk.disk.lun.identify import Names, names
from iserblk.disk.lun.identity import have_common, identity_words, is_same
from iserblk.disk.multipath.addresses import Address, with_paths
from iserblk.errors import BadArgument, ConnectionLost, IserblkError
from iserblk.initiator.connecting.reach import connect
from iserblk.initiator.drivers.tasks import TrioDriver

log = logging.getLogger(__name__)


async def join_same_luns(addresses: Sequence[Address]) -> list[Address]:
    """The addresses, but those of different targets that turn out to be one LUN are joined, in the
    order given. Targets are asked only where there are several. A LUN that cannot be asked, or has
    no world-wide identifier, stays alone. Raises BadArgument where one LUN has different numbers,
    or different serial numbers."""
    named = [each for each in addresses if each.url.lun is not None]
    if len({each.url.iqn.lower() for each in named}) < 2:
        return list(addresses)
    known: dict[int, Names] = {}

    async def ask(index: int, address: Address) -> None:
        found = await _names(address)
        if found is not None and found.identifiers:
            known[index] = found

    async with trio.open_nursery() as nursery:
        for index, address in enumerate(addresses):
            if address.url.lun is not None:
                nursery.start_soon(ask, index, address)
    groups: list[list[int]] = []
    for index, address in enumerate(addresses):
        for group in groups:
            if _is_same(addresses[group[0]], known.get(group[0]), address, known.get(index)):
                group.append(index)
                break
        else:
            groups.append([index])
    return [_joined([addresses[index] for index in group]) for group in groups]


def _is_same(one: Address, known: Names | None, other: Address, found: Names | None) -> bool:
    if known is None or found is None or not have_common(known.identifiers, found.identifiers):
        return False
    both = f"{one.url.redacted()} and {other.url.redacted()} are the same LUN"
    if one.url.lun != other.url.lun:
        raise BadArgument(f"{both}, but have different numbers: give only one of them")
    if not is_same(known, found):
        raise BadArgument(
            f"{both}, but tell of it differently ({identity_words(known)}; "
            f"{identity_words(found)}): give only one of them"
        )
    return True


def _joined(group: Sequence[Address]) -> Address:
    if len(group) == 1:
        return group[0]
    ways: list[Address] = []
    for each in group:
        if each.paths is None:
            ways.append(each)
        else:
            ways += [Address(*way.address) for way in each.paths.ways.all]
    log.info("the same LUN: %s", ", ".join(each.url.redacted() for each in ways))
    return with_paths(ways)


async def _names(address: Address) -> Names | None:
    """What the LUN says of itself through the first way that tells; None: none does."""
    ways = [(address.url, address.options)]
    if address.paths is not None:
        ways = [way.address for way in address.paths.ways.all]
    for url, options in ways:
        try:
            session = await connect(url, options)
        except IserblkError as error:
            log.info("%s: %s", url.redacted(), error)
            continue
        problem: Exception | None = None
        found: Names | None = None
        try:
            driver = TrioDriver(session)
            assert url.lun is not None
            async with trio.open_nursery() as nursery:
                await nursery.start(driver.run)
                try:
                    text = url.redacted()
                    found = await driver.run_operation(names(session, url.lun, text, text))
                    await driver.log_out()
                except Exception as error:
                    problem = error  # raised below, not inside the nursery's exception group
                nursery.cancel_scope.cancel()
        finally:
            session.fail(ConnectionLost(f"{session.portal}: no longer needed"))
        if problem is not None and not isinstance(problem, IserblkError):
            raise problem
        if found is not None:
            return found
        log.info("%s: %s", url.redacted(), problem)
    return None
