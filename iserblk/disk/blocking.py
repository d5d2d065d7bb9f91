"""Disks for threads: ``with open_disks(urls, options) as disks``.

The caller's threads submit requests and wait for them by themselves. One more thread runs trio: it
connects, logs in, connects again when a connection is lost, and looks after sessions while no
thread waits for them. It is not in the path of any request.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import BinaryIO, Self, TypeVar

import trio

from iserblk.disk.ending import EndOfUse
from iserblk.disk.file import open_file
from iserblk.disk.lun.operations import DiskCore
from iserblk.disk.lun.passthrough import send
from iserblk.disk.metered import metered_blocking
from iserblk.disk.metrics_ports import Measured, MetricsPorts
from iserblk.disk.multipath.addresses import Address, settle
from iserblk.disk.multipath.discovering import discover_ways
from iserblk.disk.multipath.recognising import join_same_luns
from iserblk.disk.opening import find_disks, give_up, name_disks, open_session, part, reconnector
from iserblk.disk.seam import BlockingLun, CommandResult, Extent, FlushClient, LossCount, LunInfo
from iserblk.initiator.drivers.threads import BlockingDriver
from iserblk.initiator.session.driving import TICK_S
from iserblk.initiator.session.slots import Operation

T = TypeVar("T")


class ThreadDisk:
    """Implements BlockingLun: one LUN for threads."""

    def __init__(self, core: DiskCore, driver: BlockingDriver) -> None:
        self.core = core
        self.driver = driver

    @property
    def info(self) -> LunInfo:
        return self.core.info

    @property
    def size(self) -> int:
        return self.core.size

    @property
    def dirty(self) -> bool:
        return self.core.durability.wants_flush()

    @property
    def unflushed(self) -> int | None:
        return self.core.durability.kept

    @property
    def client(self) -> FlushClient:
        return self.core.client

    def new_client(self) -> FlushClient:
        return self.core.durability.losses.new_client()

    def only_client(self, before: LossCount, changed: Callable[[], None]) -> FlushClient:
        return self.core.durability.losses.only_client(before, changed)

    def refresh(self) -> int:
        return self._run(self.core.refresh())

    def read_into(self, buffer: memoryview, offset: int) -> None:
        core = self.core
        driver = self.driver
        slot = None
        deadline = 0.0
        try:
            waiter = driver.new_waiter()
            slot = core.begin_read(buffer, offset, waiter)
            if slot is not None:
                driver.wait(waiter)
                deadline = core.ended(slot)
        except BaseException:
            self._take_back()
            raise
        if slot is None or deadline:
            self._run(core.read(buffer, offset, deadline))

    def write(self, buffer: memoryview, offset: int, fua: bool = False) -> None:
        core = self.core
        driver = self.driver
        slot = None
        deadline = 0.0
        try:
            if not fua:
                waiter = driver.new_waiter()
                slot = core.begin_write(buffer, offset, waiter)
                if slot is not None:
                    driver.wait(waiter)
                    deadline = core.ended_write(slot)
        except BaseException:
            self._take_back()
            raise
        if slot is None or deadline:
            self._run(core.write(buffer, offset, fua, deadline))

    def _take_back(self) -> None:
        """After an exception: give back what an interrupt, at whatever moment, has left of this
        thread's commands."""
        for slot in self.driver.abandon():
            self.core.dropped(slot)

    def _run(self, operation: Operation[T]) -> T:
        return self.driver.run(operation, self.core.dropped)

    def flush(self, client: FlushClient | None = None) -> None:
        self._run(self.core.flush(client=client))

    def trim(self, offset: int, length: int, fua: bool = False, *, patient: bool = False) -> None:
        self._run(self.core.trim(offset, length, fua, patient))

    def zero(
        self,
        offset: int,
        length: int,
        *,
        may_trim: bool = False,
        fast: bool = False,
        fua: bool = False,
        patient: bool = False,
    ) -> None:
        self._run(self.core.zero(offset, length, may_trim, fast, fua, patient))

    def extents(self, offset: int, length: int) -> list[Extent]:
        return self._run(self.core.extents(offset, length))

    def cache(self, offset: int, length: int) -> None:
        self._run(self.core.cache(offset, length))

    def open(
        self, mode: str = "rb", buffering: int = -1, *, offset: int = 0, length: int | None = None
    ) -> BinaryIO:
        return open_file(self, mode, buffering, offset=offset, length=length)

    def command(
        self,
        cdb: bytes,
        data_in: bytearray | memoryview | None = None,
        data_out: bytes | bytearray | memoryview | None = None,
        *,
        timeout_s: float | None = None,
    ) -> CommandResult:
        return self._run(send(self.core, cdb, data_in, data_out, timeout_s))


class ThreadDiskSet:
    """The opened disks: ``disks`` by export name, in URL order; ``default`` is the name of the
    first. ``ending``: of all their sessions."""

    def __init__(self, addresses: list[Address]) -> None:
        """Connect. Raises what connecting raises, and then leaves nothing behind."""
        self.disks: dict[str, BlockingLun] = {}
        self.ending = EndOfUse()
        self._named: dict[DiskCore, BlockingDriver] = {}
        self._drivers: list[BlockingDriver] = []
        self._opened = threading.Event()
        self._error: BaseException | None = None
        self._token: trio.lowlevel.TrioToken | None = None
        self._stop: trio.Event | None = None
        self._thread = threading.Thread(
            target=self._control, args=(addresses,), name="iserblk-control", daemon=True
        )
        self._thread.start()
        self._opened.wait()
        if self._error is not None:
            self._thread.join()
            raise self._error
        self.default = next(iter(self.disks))

    def _control(self, addresses: list[Address]) -> None:
        """Body of the thread: open, then look after the sessions until ``close``."""
        try:
            trio.run(self._run, addresses)
        except BaseException as error:
            self._error = error
        finally:
            self._opened.set()

    async def _run(self, addresses: list[Address]) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._stop = trio.Event()
        metrics = MetricsPorts(addresses)
        try:
            opened = await self._open(addresses)
            async with trio.open_nursery() as nursery:
                reconnectors = [reconnector(*each) for each in opened]
                for each in reconnectors:
                    nursery.start_soon(each.run)
                metrics.start(
                    nursery,
                    [
                        Measured(core, driver.ladder, address.paths)
                        for driver, address, cores in opened
                        for core in cores
                        if core in self._named
                    ],
                )
                self._opened.set()
                while not self._stop.is_set():
                    with trio.move_on_after(TICK_S):
                        await self._stop.wait()
                    for driver in self._drivers:
                        driver.idle()
                metrics.close()
                for each in reconnectors:
                    each.stop()
        finally:
            metrics.close()

    async def _open(
        self, addresses: list[Address]
    ) -> list[tuple[BlockingDriver, Address, list[DiskCore]]]:
        """Log in and find the disks under trio; then hand the sessions to their blocking
        drivers."""
        cores: dict[DiskCore, int] = {}
        error: BaseException | None = None
        addresses = await discover_ways(await join_same_luns(addresses))
        async with trio.open_nursery() as nursery:
            opening = []
            try:
                for index, address in enumerate(addresses):
                    driver = await open_session(address)
                    opening.append(driver)
                    await nursery.start(driver.run)
                    for core in await find_disks(driver, address):
                        cores[core] = index
                named = name_disks(list(cores))
            except Exception as problem:
                error = problem  # raised below, not inside the nursery's exception group
                for driver in opening:
                    await part(driver)
            nursery.cancel_scope.cancel()
        if error is not None:
            raise error
        self._drivers = [BlockingDriver(driver.session) for driver in opening]
        self.ending = EndOfUse([driver.session for driver in opening])
        for name, core in named.items():
            self._named[core] = driver_of = self._drivers[cores[core]]
            self.disks[name] = metered_blocking(ThreadDisk(core, driver_of), core)
        return [
            (driver, address, [core for core in cores if cores[core] == index])
            for index, (driver, address) in enumerate(zip(self._drivers, addresses, strict=True))
        ]

    def close(self) -> None:
        """Log out and end the control thread. Flushes nothing. Idempotent; no operation may be
        running in another thread."""
        if self._thread.is_alive():
            assert self._token is not None and self._stop is not None
            self._token.run_sync_soon(self._stop.set)
            self._thread.join()
            for driver in self._drivers:
                give_up(driver.session)
                driver.run(driver.session.listeners.farewell(), driver.session.queue.release)
                driver.log_out()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def open_disks(urls: Sequence[str], options: Mapping[str, str] | None = None) -> ThreadDiskSet:
    """Log in to every URL and find its disks. ``options`` hold for each URL that has no others
    (docs/options.md). Raises BadArgument, NotSupported, TransportError,
    LoginError, NoSuchLun…; then no thread, descriptor or session is left."""
    return ThreadDiskSet(settle(urls, options or {}))
