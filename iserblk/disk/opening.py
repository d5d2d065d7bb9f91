"""Opens URLs as disks: what ``blocking`` and ``aio`` share. Runs in trio."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from iserblk.commands.command import Operation
from iserblk.commands.session import CommandDriver, CommandSession
from iserblk.disk.lun.geometry import Geometry
from iserblk.disk.lun.identify import NotADisk, identify, names
from iserblk.disk.lun.identity import lasting_name
from iserblk.disk.lun.inventory import REREADS, Inventory
from iserblk.disk.lun.operations import DiskCore
from iserblk.disk.lun.reservation import Reservation, host_key
from iserblk.disk.multipath.addresses import Address
from iserblk.disk.multipath.failback import FailBack, PathsReconnector
from iserblk.disk.multipath.first_session import open_path
from iserblk.disk.multipath.paths import Paths
from iserblk.disk.multipath.proving import prove_ways
from iserblk.disk.resume import check_identity, listen, resume_all
from iserblk.disk.seam import LunInfo
from iserblk.disk.settling import settle
from iserblk.errors import (
    BadArgument,
    CommandError,
    ConnectionLost,
    IserblkError,
    NoSuchLun,
    NotSupported,
    RemoteProtocolError,
)
from iserblk.initiator.connecting.reach import complete, connect
from iserblk.initiator.drivers.tasks import TrioDriver
from iserblk.initiator.reconnecting import Driver, Reconnector, respite
from iserblk.initiator.session.session import Session
from iserblk.loop.clock import monotonic
from iserblk.loop.interrupts import uninterrupted
from iserblk.loop.patience import move_on_after
from iserblk.names import initiator_name
from iserblk.options import Options
from iserblk.scsi import luns

log = logging.getLogger(__name__)

GIVE_BACK_S = 10.0  # for giving back what was reserved, before the logout


async def open_session(address: Address) -> TrioDriver:
    """Connect and log in. The caller starts the driver's ``run``."""
    if address.paths is not None:
        driver = await open_path(address.paths, address.url.lun)
        await complete(driver.session, address.options)
        return driver
    session = await connect(address.url, address.options, address.options.isid)
    await complete(session, address.options)
    return TrioDriver(session)


def reconnector(
    driver: Driver, address: Address, cores: Sequence[DiskCore]
) -> Reconnector | PathsReconnector:
    """What connects the driver's session again when its connection is lost. The caller starts its
    ``run``, and calls its ``stop`` before the logout."""
    session = driver.session
    paths = address.paths
    run = driver.run_operation

    async def settled(seconds: float, leave: Callable[[], None]) -> None:
        await run(settle(cores, monotonic() + seconds, leave))

    if paths is not None:
        for core in cores:
            paths.watch(session, core.lun)
        return PathsReconnector(
            Reconnector(
                driver,
                partial(paths.connect, session.isid, partial(respite, session)),
                partial(_resume_by, paths, session, cores),
                lambda: len(paths.ways.all) > 1,
                settled,
            ),
            FailBack(driver, paths, cores, run),
        )
    return Reconnector(
        driver,
        partial(_reinstate, session, address),
        partial(resume_all, cores),
        settle=settled,
    )


async def _reinstate(session: Session, address: Address) -> Session:
    await respite(session)
    return await connect(address.url, address.options, session.isid)


def _resume_by(
    paths: Paths, session: Session, cores: Sequence[DiskCore], fresh: Session
) -> Operation[None]:
    if session.respite.left_nothing:
        session.respite.left_nothing = False  # this attempt may leave something for the next
        paths.left_nothing()
    listen(cores, fresh)
    for core in cores:
        if core.identity.is_another:
            continue
        core.elsewhere = paths.elsewhere
        try:
            yield from paths.look(core.info.lun, fresh)
            yield from check_identity(core, fresh)
        except NoSuchLun:
            if not core.identity.gone:
                raise
            continue
        yield from paths.reset(core.info.lun, fresh)
    yield from resume_all(cores, fresh)
    paths.settled(fresh)


async def find_disks(
    driver: CommandDriver, address: Address, left_out: list[str] | None = None
) -> list[DiskCore]:
    """The disks that the URL names: its LUN, or every disk in REPORT LUNS. The driver must be
    running. ``left_out`` gets disks of the report that cannot be used, in words."""
    cores = await _find(driver, address, [] if left_out is None else left_out)
    if address.paths is not None:
        await prove_ways(address.paths, cores)
    for core in cores:
        if address.paths is not None and len(address.paths.ways.all) > 1:
            core.info = replace(core.info, paths=tuple(address.paths.ways.describe()))
        core.metrics.served_at = address.options.metrics
    return cores


async def _find(driver: CommandDriver, address: Address, left_out: list[str]) -> list[DiskCore]:
    url = address.url
    session = driver.session
    if url.lun is not None:
        return [await _identify(driver, address, url.lun)]
    inventory = Inventory()
    found: dict[int, DiskCore | None] = {}  # None: it cannot be used
    problem: IserblkError | None = None
    for _ in range(REREADS):
        session.listeners.add(bytes(8), inventory)
        present = await driver.run_operation(inventory.read(session))
        for lun in present:
            if lun in found:
                continue
            session.listeners.add(luns.encode(lun), inventory)
            try:
                disk = found[lun] = await _identify(driver, address, lun)
                disk.inventory = inventory
                continue
            except (NotADisk, NoSuchLun) as error:
                log.info("skipped: %s", error)
            except (CommandError, RemoteProtocolError, NotSupported) as error:
                if session.error is not None:
                    raise  # nothing of the session can be used
                log.warning("%s: LUN %d is left out: %s", url.redacted(), lun, error)
                left_out.append(f"{url.redacted()}: LUN {lun}: {error}")
                problem = problem or error
            found[lun] = None
        if not inventory.changed:
            break
    cores = [core for lun in present if (core := found[lun]) is not None]
    if not cores and problem is not None:
        raise problem
    if not cores:
        raise NoSuchLun(f"{url.redacted()}: the target has no disks for us; check its access rules")
    return cores


async def _identify(driver: CommandDriver, address: Address, lun: int) -> DiskCore:
    session, url, options = driver.session, address.url, address.options

    name, text = f"lun{lun}", replace(url, lun=lun).redacted()
    field = luns.encode(lun)
    reservation: Reservation | None = None
    if options.reserve:
        known = await driver.run_operation(names(session, lun, name, text))
        initiator = initiator_name(options.initiator_name)
        reservation = Reservation(
            name,
            lasting_name(known.identifiers) or known.serial or f"{url.iqn} {lun}",
            options.reserve_key or host_key(initiator),
            initiator,
        )
        session.listeners.add(field, reservation)
    try:
        if reservation is not None:
            await driver.run_operation(reservation.acquire(session, field))
        info, geometry = await driver.run_operation(identify(session, lun, name, text, url.iqn))
    except IserblkError:
        if reservation is not None and session.error is None:
            session.listeners.remove(field, reservation)
            await driver.run_operation(reservation.release(session, field))
        raise
    core = _core(session, field, info, geometry, options)
    if reservation is not None:
        core.reservation = reservation
        reservation.watch(session)
    return core


def _core(
    session: CommandSession, lun: bytes, info: LunInfo, geometry: Geometry, options: Options
) -> DiskCore:
    core = DiskCore(session, lun, info, geometry)
    core.limit_transfer(options.max_transfer)
    if options.journal:
        core.keep_journal(options.journal, options.shared)
    return core


def give_up(session: Session) -> None:
    """End a session that has no connection: no reconnector works on it any more."""
    if session.suspended is not None:
        session.fail(ConnectionLost(f"{session.portal}: closed while there was no connection"))


@uninterrupted
async def log_out(driver: TrioDriver) -> None:
    """Give back what was reserved, log out, and end the session."""
    give_up(driver.session)
    with move_on_after(GIVE_BACK_S):  # io-timeout may have no end
        await driver.run_operation(driver.session.listeners.before_logout())
    await driver.log_out()


def name_disks(cores: Sequence[DiskCore]) -> dict[str, DiskCore]:
    """Export names: ``lun<number>``, or ``<iqn>:lun<number>`` where two would clash."""
    plain = [core.info.lun for core in cores]
    named: dict[str, DiskCore] = {}
    for core in cores:
        name = f"lun{core.info.lun}"
        if plain.count(core.info.lun) > 1:
            name = f"{core.info.target}:{name}"
        if name in named:
            raise BadArgument(
                f"{core.info.url}: given twice; URLs of several portals must name the LUN alike"
            )
        core.rename(name)
        named[name] = core
    return named
