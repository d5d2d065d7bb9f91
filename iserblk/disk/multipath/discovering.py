"""The option ``portals``: finds more ways to a LUN, which its target, an iSNS server or SLP agents
report. Runs in trio."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import trio

from iserblk.discovery.ranking import Candidate
from iserblk.discovery.targets import find_targets, shortened, takes_iser
from iserblk.disk.multipath.addresses import Address, directory, in_session_of, with_paths
from iserblk.disk.multipath.paths import place_of
from iserblk.errors import IserblkError
from iserblk.initiator.connecting.iwarp import connect_tcp, resolve
from iserblk.iscsi.send_targets import Portal
from iserblk.loop.clock import monotonic
from iserblk.options import PORTAL, Options
from iserblk.url import Url, fitting, name_portal

log = logging.getLogger(__name__)
_ANSWER_S = 3.0
FIND_S = 30.0  # for all portals that are found when a URL is opened: looked up, and tried
MOST_FOUND = 64  # portals of one target that are looked at: each costs a look-up and a connection
AGAIN_S = 5.0  # a session that reconnects asks no longer than this, and then not for as long


async def discover_ways(addresses: Sequence[Address]) -> list[Address]:
    """The same addresses; each whose option ``portals`` asks for it also gets the portals that
    SendTargets, an iSNS server or SLP agents report, behind those given: portals that take iSER
    first, then those in a subnet of this machine. A portal that does not answer now is left out:
    targets report addresses in networks that we cannot reach, and each would cost its time when a
    connection is lost.

    The given portals are asked one after the other until one answers. Where none does, only they
    are used. Once a connection is lost, and no way leads to the target, it is asked again: a target
    that has moved is found. Raises no IserblkError: what is wrong with a portal is reported by its
    login.
    """
    return [await _with_more(each) if each.options.discover else each for each in addresses]


async def _with_more(address: Address) -> Address:
    finder = _Finder(address)
    found: list[Address] = []
    with trio.move_on_after(FIND_S) as limit:
        found = await finder.find(log.warning)
    if limit.cancelled_caught:
        log.warning(
            "%s: other portals are not used: they were not found out within %g s",
            _asked(address),
            FIND_S,
        )
    joined = with_paths([*finder.given, *found])
    assert joined.paths is not None
    joined.paths.find_more = finder.find_again
    joined.paths.groups = finder.groups
    joined.paths.given = len(finder.given)
    return joined


class _Finder:
    """Finds ways to the target of an address that are not known yet."""

    def __init__(self, address: Address) -> None:
        self.given = [address]
        if address.paths is not None:
            self.given = [Address(*way.address) for way in address.paths.ways.all]
        self.groups: dict[str, int] = {}  # tags of portal groups, by the name of the portal
        self._known: set[str] = set()
        self._again_at = 0.0

    async def find_again(self) -> list[tuple[Url, Options]]:
        """Ways that are new. It takes AGAIN_S at most, and asks only so often."""
        if monotonic() < self._again_at:
            return []
        found: list[Address] = []
        with trio.move_on_after(AGAIN_S):
            found = await self.find(log.info)
        self._again_at = monotonic() + AGAIN_S
        return in_session_of(self.given[0], found)

    async def find(self, complain: Callable[..., None]) -> list[Address]:
        for each in self.given:
            self._known |= await places_of(each.url)
        fresh: list[tuple[Address, set[str]]] = []
        askers = self.given
        if self.given[0].options.discover != PORTAL:
            askers = self.given[:1]
        for each in askers:
            try:
                for url, group in await _portals(each, complain):
                    if group is not None:
                        self.groups[place_of(url)] = group
                    places = await places_of(url)
                    if not places & self._known.union(*(known for _, known in fresh)):
                        fresh.append((Address(url, fitting(url, each.options)), places))
                break
            except IserblkError as error:
                complain("%s does not tell of other portals: %s", _asked(each), error)
        found = await _answering([address for address, _ in fresh], complain)
        for address, places in fresh:
            if address in found:
                self._known |= places
                log.info("%s: found, a way to the same LUN", address.url.redacted())
        return found


def _asked(address: Address) -> str:
    if address.options.discover == PORTAL:
        return address.url.redacted()
    url = directory(address.options)
    return f"{url.scheme}://{name_portal(url.host, url.port) if url.host else ''}"


async def _portals(address: Address, complain: Callable[..., None]) -> list[tuple[Url, int | None]]:
    """What the target, or the server or agent in its place, tells: portals, and the tags of their
    groups. Where that does not tell whether a portal takes iSER, the scheme is that of
    ``address``."""
    url, place = address.url, address.url
    if address.options.discover != PORTAL:
        place = replace(directory(address.options), iqn=url.iqn)
    found = await find_targets(place, address.options, probe=False)

    def scheme_of(way: Candidate) -> str:
        unknown = place is not url and way.iser is None
        return url.scheme if unknown else found.scheme_of(way)

    for words in shortened(found.left_out):
        complain("%s: left out: %s", found.source, words)
    ways = [
        way
        for target in found.targets
        if target.name.lower() == url.iqn.lower()
        for way in target.ways
    ]
    if len(ways) > MOST_FOUND:
        complain("%s: only %d of %d portals are looked at", found.source, MOST_FOUND, len(ways))
        del ways[MOST_FOUND:]
    for way in ways:
        if way.unusable:
            complain(
                "%s: found, and left out: a link-local address; give its URL with %%INTERFACE, too",
                name_portal(way.portal.host, way.portal.port),
            )
    return [
        (
            replace(url, scheme=scheme_of(way), host=way.portal.host, port=way.portal.port),
            way.portal.tag,
        )
        for way in ways
        if not way.unusable
    ]


async def _answering(found: Sequence[Address], complain: Callable[..., None]) -> list[Address]:
    silent: list[Address] = []

    async def ask(address: Address) -> None:
        if not await _answers(address.url, address.options):
            silent.append(address)
            complain(
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


async def places_of(url: Url) -> set[str]:
    """The portal's addresses with port, so that it is recognised under any name."""
    try:
        return {
            name_portal(str(each.sockaddr[0]), int(each.sockaddr[1]))
            for each in await resolve(url.host, url.port)
        }
    except IserblkError:
        return {name_portal(url.host, url.port)}
