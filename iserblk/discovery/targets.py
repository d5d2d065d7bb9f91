"""Finds targets and their portals, and ranks them, for ``iserblk discover``. Runs in trio."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from urllib.parse import quote

import trio

from iserblk.discovery.isns_client import ask_isns
from iserblk.discovery.ranking import Candidate, as_iser, judge, local_networks, rank
from iserblk.discovery.slp_client import ask_slp
from iserblk.errors import IserblkError
from iserblk.initiator.connecting.iwarp import connect_tcp, resolve
from iserblk.initiator.connecting.reach import choose
from iserblk.initiator.connecting.send_targets import send_targets
from iserblk.initiator.connecting.styles import STREAM
from iserblk.iscsi.send_targets import Portal, Told, needs_interface
from iserblk.loop.patience import fail_after
from iserblk.options import Options
from iserblk.url import Url, name_portal

PROBE_TIMEOUT_S = 5.0
PROBES_AT_A_TIME = 16
PROBES = 1024  # of one answer: its sender chooses how many portals there are
_MOST_WORDS = 8


@dataclass(slots=True, frozen=True)
class FoundTarget:
    """One target. ``ways``: its portals, the best first."""

    name: str
    ways: list[Candidate]


@dataclass(slots=True, frozen=True)
class Found:
    """The result of a discovery. ``source``: URL of the portal, server or agent that answered.
    ``scheme``: iser or iscsi; the scheme for portals of which it is not known whether they take
    iSER. ``left_out``: what of the answer could not be read."""

    source: str
    scheme: str
    targets: list[FoundTarget]
    left_out: list[str] = field(default_factory=list)

    def scheme_of(self, way: Candidate) -> str:
        return self.scheme if way.iser is None else "iser" if way.iser else "iscsi"

    def url(self, target: FoundTarget, way: Candidate) -> str:
        """The URL of ``target`` at one of its portals."""
        place = name_portal(way.portal.host, way.portal.port)
        # In a URL some characters of names would begin something else, options for example.
        return f"{self.scheme_of(way)}://{place}/{quote(target.name, safe=':')}"


def shortened(left_out: Sequence[str]) -> list[str]:
    """The first lines of ``left_out``, and how many more there are: a target can send thousands."""
    shown = [*left_out[:_MOST_WORDS]]
    if len(left_out) > _MOST_WORDS:
        shown.append(f"{len(left_out) - _MOST_WORDS} more")
    return shown


async def find_targets(url: Url, options: Options, probe: bool) -> Found:
    """Ask the portal, the iSNS server or the SLP agents of ``url`` for targets. ``probe``: try
    whether each portal found takes iSER. Raises the errors of connecting and login, and of
    ``ask_isns`` and ``ask_slp``."""
    if url.scheme == "slp":  # it does not tell of iSER either
        source = f"slp://{name_portal(url.host, url.port) if url.host else ''}"
        return await _found(source, "iscsi", await ask_slp(url), {}, options, probe)
    if url.scheme == "isns":
        # iSNS does not tell which portals take iSER; `--probe` finds out.
        source = f"isns://{name_portal(url.host, url.port)}"
        return await _found(source, "iscsi", await ask_isns(url, options), {}, options, probe)
    answer = await send_targets(url, options)
    # On a byte stream SendTargets is no iSER, whatever the scheme: only a login to a target tells.
    iser = answer.scheme == "iser" and options.style != STREAM
    known = {(answer.portal.host, answer.portal.port): True} if iser else {}
    source = f"{answer.scheme}://{name_portal(answer.portal.host, answer.portal.port)}"
    told = Told(answer.targets, answer.left_out)
    return await _found(source, answer.scheme, told, known, options, probe)


async def _found(
    source: str,
    scheme: str,
    told: Told,
    known: dict[tuple[str, int], bool],
    options: Options,
    probe: bool,
) -> Found:
    """Probe and rank the portals of ``told``. ``known``: whether a portal takes iSER, for those
    where that is known already."""
    if probe:
        portals = {
            (each.host, each.port)
            for record in told.targets
            for each in record.portals
            if not needs_interface(each.host)
        }
        asked = sorted(portals - known.keys())
        if len(asked) > PROBES:
            told.left_out.append(f"{len(asked)} portals to be probed: {PROBES} of them are")
        known = {**known, **await _probe(asked[:PROBES], options)}
    networks = local_networks()
    targets = []
    for record in told.targets:
        ways = [judge(each, networks) for each in record.portals]
        ways = [
            as_iser(way, known[key])
            if (key := (way.portal.host, way.portal.port)) in known
            else way
            for way in ways
        ]
        targets.append(FoundTarget(record.name, rank(ways)))
    return Found(source, scheme, targets, told.left_out)


async def _probe(portals: list[tuple[str, int]], options: Options) -> dict[tuple[str, int], bool]:
    found: dict[tuple[str, int], bool] = {}
    limit = trio.CapacityLimiter(PROBES_AT_A_TIME)

    async def ask(host: str, port: int) -> None:
        async with limit:
            found[host, port] = await takes_iser(Portal(host, port), options)

    async with trio.open_nursery() as nursery:
        for host, port in portals:
            nursery.start_soon(ask, host, port)
    return found


async def takes_iser(portal: Portal, options: Options) -> bool:
    """Whether ``portal`` accepts a connection for iSER, with the provider that ``options`` select.
    The connection is closed at once. False also if the portal cannot be reached. With
    ``style=stream`` only a login tells: then any portal that takes connections is assumed to."""
    # With fallback, the wait for an MPA Reply is short: a Traditional iSCSI target never sends it.
    options = replace(options, fallback="iscsi")
    try:
        with fail_after(PROBE_TIMEOUT_S):
            addresses = await resolve(portal.host, portal.port)
            name = name_portal(portal.host, portal.port)
            if options.style == STREAM:
                (await connect_tcp(addresses, name, PROBE_TIMEOUT_S)).close()
                return True
            qp, _ = await choose(addresses, options, name)
    except (IserblkError, trio.TooSlowError):
        return False
    qp.close()
    return True
