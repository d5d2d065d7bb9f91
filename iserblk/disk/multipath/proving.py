"""Whether two portals lead to one LUN, where the LUN itself does not prove it. Runs in trio.

URLs with the same target name are ways to one target. But two hosts may have that name, too: it was
copied along with the configuration. A LUN with an identifier that is unique world-wide is
recognised behind each portal. A LUN without one (``disk.lun.identity``) is not: the LUNs of two
hosts with the same program say the same. Then both portals have to list each other, by SendTargets,
under the name of the target, and the LUN must have the same serial number and size behind both.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import trio

from iserblk.commands.command import Operation
from iserblk.discovery.targets import find_targets
from iserblk.disk.lun.identify import identify
from iserblk.disk.lun.identity import check_lun, identity_words, is_identified
from iserblk.disk.lun.operations import DiskCore
from iserblk.disk.multipath.discovering import places_of
from iserblk.disk.multipath.paths import Paths
from iserblk.disk.seam import LunInfo
from iserblk.errors import BadArgument, ConnectionLost, IserblkError, LunChanged
from iserblk.initiator.connecting.reach import connect
from iserblk.initiator.drivers.tasks import TrioDriver
from iserblk.initiator.session.session import Session
from iserblk.options import Options
from iserblk.url import Url, name_portal

log = logging.getLogger(__name__)
_REMEDY = (
    "give the URL of one portal only, or have the target give the LUN an NAA, EUI-64 or UUID "
    "identifier"
)


class NotProven(BadArgument):
    """Nothing proves that the LUN behind a portal is the LUN in use."""


class Proof:
    """Proves that other portals are of the target whose portal ``first`` is in use. Implements
    ``Paths.proof``."""

    def __init__(self, first: Url, options: Options, what: str) -> None:
        """``what``: the LUN's identity in words."""
        self._first = first
        self._options = options
        self._what = what
        self._places: set[str] = set()  # addresses of the first portal
        self._listed: set[str] = set()  # of the portals that it lists
        self._proven: set[str] = set()

    async def begin(self) -> None:
        """Ask the portal in use. Raises as ``find_targets``."""
        self._places = await places_of(self._first)
        self._listed = await _listed_by(self._first, self._options)

    async def check(self, url: Url, options: Options) -> None:
        """Raises NotProven where the portal of ``url`` is not proven to be of the same target, and
        the errors of asking it."""
        places = await places_of(url)
        if places & (self._places | self._proven):
            return
        if not places & self._listed:
            raise self._not_proven(self._first, url)
        if not self._places & await _listed_by(url, options):
            raise self._not_proven(url, self._first)
        self._proven |= places

    def _not_proven(self, one: Url, other: Url) -> NotProven:
        return NotProven(
            f"{_name(other)}: nothing proves that the LUN there is the same ({self._what}): "
            f"{_name(one)} does not list that portal for {one.iqn}; {_REMEDY}"
        )


def _name(url: Url) -> str:
    return name_portal(url.host, url.port)


async def _listed_by(url: Url, options: Options) -> set[str]:
    """Addresses of the portals that the portal of ``url`` lists for its target."""
    found = await find_targets(url, options, probe=False)
    listed: set[str] = set()
    for target in found.targets:
        if target.name.lower() == url.iqn.lower():
            for way in target.ways:
                place = replace(url, host=way.portal.host, port=way.portal.port)
                listed |= await places_of(place)
    return listed


async def prove_ways(paths: Paths, cores: Sequence[DiskCore]) -> None:
    """Where a LUN of a session with several ways has no world-wide identifier: check the ways, as
    far as their portals answer, and each again when it comes into use (``Paths.proof``). Raises
    NotProven for a way that was given; those that were found are left out."""
    doubtful = [core.info for core in cores if not is_identified(core.info)]
    current = paths.ways.current
    if not doubtful or current is None or len(paths.ways.all) < 2:
        return
    url, options = current.address
    proof = Proof(url, options, identity_words(doubtful[0]))
    for info in doubtful:
        if not info.serial:
            raise NotProven(
                f"{info.url}: the LUN has no world-wide identifier, and no serial number: nothing "
                f"tells whether it is the same behind another portal; {_REMEDY}"
            )
    try:
        await proof.begin()
    except IserblkError as error:
        log.warning("%s does not tell its portals: %s", _name(url), error)
    for way in paths.ways.all:
        if way is current:
            continue
        try:
            await proof.check(*way.address)
            await _compare(*way.address, doubtful)
        except (NotProven, LunChanged) as error:
            if way.index < paths.given:
                raise NotProven(str(error)) from None
            log.warning("%s is not used: %s", way.name, error)
        except IserblkError as error:
            log.info("%s: %s", way.name, error)
    paths.proof = proof.check


async def _compare(url: Url, options: Options, known: Sequence[LunInfo]) -> None:
    """Raises LunChanged where a LUN is another one behind the portal of ``url``, and why the portal
    does not tell."""
    session = await connect(url, options)
    problem: Exception | None = None
    try:
        driver = TrioDriver(session)
        async with trio.open_nursery() as nursery:
            await nursery.start(driver.run)
            try:
                for info in known:
                    await driver.run_operation(_look(session, info))
                await driver.log_out()
            except Exception as error:
                problem = error  # raised below, not inside the nursery's exception group
            nursery.cancel_scope.cancel()
    finally:
        session.fail(ConnectionLost(f"{session.portal}: no longer needed"))
    if problem is not None:
        raise problem


def _look(session: Session, known: LunInfo) -> Operation[None]:
    found, _ = yield from identify(session, known.lun, known.name, known.url, known.target)
    check_lun(known, found, elsewhere=True)
