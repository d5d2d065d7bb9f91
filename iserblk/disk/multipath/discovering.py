"""``portals=discover``: finds more ways to a LUN, which its target reports. Runs in trio."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import trio

from iserblk.discovery.targets import find_targets, takes_iser
from iserblk.disk.multipath.addresses import Address, with_paths
from iserblk.errors import IserblkError
from iserblk.initiator.connecting.iwarp import connect_tcp, resolve
from iserblk.iscsi.send_targets import Portal
from iserblk.options import Options
from iserblk.url import Url, fitting, name_portal

log = logging.getLogger(__name__)
_ANSWER_S = 3.0


async def discover_ways(addresses: Sequence[Address]) -> list[Address]:
    """The same addresses; each that has ``portals=discover`` also gets the portals that SendTargets
    reports, behind those given: portals that take iSER first, then those in a subnet of this
    machine. A portal that does not answer now is left out: targets report addresses in networks
    that we cannot reach, and each would cost its time when a connection is lost.

    The given portals are asked one after the other until one answers. Where none does, only they
    are used. Raises no IserblkError: what is wrong with a portal is reported by its login.
    """
    return [await _more(each) if each.options.discover else each for each in addresses]


async def _more(address: Address) -> Address:
    given = [address]
    if address.paths is not None:
        given = [Address(*way.address) for way in address.paths.ways.all]
    known = set()
    for each in given:
        known |= await _places(each.url)
    found: list[Address] = []
    for each in given:
        try:
            for url in await _portals(each):
                places = await _places(url)
                if not places & known:
                    known |= places
                    found.append(Address(url, fitting(url, each.options)))
            break
        except IserblkError as error:
            log.warning("%s does not tell of other portals: %s", each.url.redacted(), error)
    found = await _answering(found)
    for each in found:
        log.info("%s: found, a way to the same LUN", each.url.redacted())
    return with_paths([*given, *found]) if found else address


async def _portals(address: Address) -> list[Url]:
    url = address.url
    found = await find_targets(url, address.options, probe=False)
    return [
        replace(url, scheme=found.scheme_of(way), host=way.portal.host, port=way.portal.port)
        for target in found.targets
        if target.name.lower() == url.iqn.lower()
        for way in target.ways
    ]


async def _answering(found: Sequence[Address]) -> list[Address]:
    silent: list[Address] = []

    async def ask(address: Address) -> None:
        if not await _answers(address.url, address.options):
            silent.append(address)
            log.warning(
                "%s: found, but does not answer: left out; give its URL, too, if it may come back",
                address.url.redacted(),
            )

    async with trio.open_nursery() as nursery:
        for each in found:
            nursery.start_soon(ask, each)
    return [each for each in found if each not in silent]


async def _answers(url: Url, options: Options) -> bool:
    name = name_portal(url.host, url.port)
    try:
        (await connect_tcp(await resolve(url.host, url.port), name, _ANSWER_S)).close()
    except IserblkError:  # perhaps it listens by rdma_cm alone
        return url.scheme == "iser" and await takes_iser(Portal(url.host, url.port), options)
    return True


async def _places(url: Url) -> set[str]:
    """The portal's addresses with port, so that it is recognised under any name."""
    try:
        return {
            name_portal(str(each.sockaddr[0]), int(each.sockaddr[1]))
            for each in await resolve(url.host, url.port)
        }
    except IserblkError:
        return {name_portal(url.host, url.port)}
