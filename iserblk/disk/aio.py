"""Disks for trio: ``async with open_disks(urls, options) as disks``."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

import trio

from iserblk.commands.session import CommandDriver
from iserblk.disk.ending import EndOfUse
from iserblk.disk.lun.operations import DiskCore
from iserblk.disk.lun.passthrough import send
from iserblk.disk.metered import metered_async
from iserblk.disk.metrics_ports import Measured, MetricsPorts
from iserblk.disk.multipath.addresses import settle
from iserblk.disk.multipath.discovering import discover_ways
from iserblk.disk.multipath.failback import PathsReconnector
from iserblk.disk.multipath.recognising import join_same_luns
from iserblk.disk.opening import find_disks, log_out, name_disks, open_session, reconnector
from iserblk.disk.seam import (
    AsyncLun,
    CommandResult,
    Extent,
    FlushClient,
    LossCount,
    LunInfo,
    Rest,
)
from iserblk.initiator.drivers.tasks import TrioDriver
from iserblk.initiator.reconnecting import Reconnector


class TrioDisk:
    """Implements AsyncLun: one LUN for trio."""

    def __init__(self, core: DiskCore, driver: CommandDriver) -> None:
        self.core = core
        self.driver = driver
        self.begin_read = core.begin_read
        self.begin_write = core.begin_write
        self.end_read = core.ended
        self.end_write = core.ended_write
        self.take_over = core.take_over
        self.begin_batch = driver.begin_batch
        self.end_batch = driver.end_batch
        self.abandon = driver.abandon
        self.check_here = driver.check_here

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

    async def refresh(self) -> int:
        return await self.driver.run_operation(self.core.refresh())

    @trio.lowlevel.enable_ki_protection
    async def read_into(self, buffer: memoryview, offset: int, rest: Rest | None = None) -> None:
        core = self.core
        waiter = self.driver.new_waiter()
        slot = core.begin_read(buffer, offset, waiter) if rest is None else None
        if slot is not None:
            try:
                await self.driver.wait(waiter)
            except BaseException:
                core.dropped(slot)
                raise
            rest = core.ended(slot)
            if rest is None:
                return
        deadline = 0.0 if rest is None else rest.deadline
        await self.driver.run_operation(core.read(buffer, offset, deadline))

    @trio.lowlevel.enable_ki_protection
    async def write(
        self, buffer: memoryview, offset: int, fua: bool = False, rest: Rest | None = None
    ) -> None:
        core = self.core
        if not fua and rest is None:
            waiter = self.driver.new_waiter()
            slot = core.begin_write(buffer, offset, waiter)
            if slot is not None:
                try:
                    await self.driver.wait(waiter)
                except BaseException:
                    core.dropped(slot)
                    raise
                rest = core.ended_write(slot)
                if rest is None:
                    return
        deadline = 0.0 if rest is None else rest.deadline
        await self.driver.run_operation(core.write(buffer, offset, fua, deadline))

    async def flush(self, client: FlushClient | None = None) -> None:
        await self.driver.run_operation(self.core.flush(client=client))

    async def trim(
        self, offset: int, length: int, fua: bool = False, *, patient: bool = False
    ) -> None:
        await self.driver.run_operation(self.core.trim(offset, length, fua, patient))

    async def zero(
        self,
        offset: int,
        length: int,
        *,
        may_trim: bool = False,
        fast: bool = False,
        fua: bool = False,
        patient: bool = False,
    ) -> None:
        await self.driver.run_operation(
            self.core.zero(offset, length, may_trim, fast, fua, patient)
        )

    async def extents(self, offset: int, length: int) -> list[Extent]:
        return await self.driver.run_operation(self.core.extents(offset, length))

    async def cache(self, offset: int, length: int) -> None:
        await self.driver.run_operation(self.core.cache(offset, length))

    async def command(
        self,
        cdb: bytes,
        data_in: bytearray | memoryview | None = None,
        data_out: bytes | bytearray | memoryview | None = None,
        *,
        timeout_s: float | None = None,
    ) -> CommandResult:
        return await self.driver.run_operation(send(self.core, cdb, data_in, data_out, timeout_s))


class TrioDiskSet:
    """The opened disks: ``disks`` by export name, in URL order; ``default`` is the name of the
    first. ``serve_metrics``: to be called once where they are to be served later. Raises as
    ``MetricsPorts.open``. ``left_out``: disks of URLs without a LUN that cannot be used, in words;
    they have been logged. ``ending``: of all their sessions. ``busy_poll_us``: how long one of
    them stays awake for an answer, at most."""

    def __init__(
        self,
        disks: dict[str, AsyncLun],
        serve_metrics: Callable[[], None],
        left_out: Sequence[str] = (),
        ending: EndOfUse | None = None,
        busy_poll_us: int = 0,
    ) -> None:
        self.ending = ending or EndOfUse()
        self.disks = disks
        self.left_out = left_out
        self.default = next(iter(disks))
        self.serve_metrics = serve_metrics
        self.busy_poll_us = busy_poll_us


async def _pump(
    driver: TrioDriver, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Run the driver until its session has ended. Shielded from the caller's cancelling: cancelled
    operations still wait for their commands to be aborted, and the logout needs the driver, too."""
    with trio.CancelScope(shield=True):
        await driver.run(task_status)


@asynccontextmanager
async def open_disks(
    urls: Sequence[str], options: Mapping[str, str] | None = None, *, metrics_later: bool = False
) -> AsyncIterator[TrioDiskSet]:
    """Log in to every URL, find its disks; log out at the end. ``options`` hold for each URL that
    has no others (docs/options.md). ``metrics_later``: another process still has the place where
    they are to be served. Raises what connecting raises."""
    addresses = await discover_ways(await join_same_luns(settle(urls, options or {})))
    metrics = MetricsPorts(() if metrics_later else addresses)
    drivers: list[TrioDriver] = []
    reconnectors: list[Reconnector | PathsReconnector] = []
    disks: dict[DiskCore, TrioDriver] = {}
    measured: dict[DiskCore, Measured] = {}
    left_out: list[str] = []
    error: BaseException | None = None
    async with trio.open_nursery() as nursery:
        try:
            for address in addresses:
                driver = await open_session(address)
                drivers.append(driver)
                await nursery.start(_pump, driver)
                cores = await find_disks(driver, address, left_out)
                disks.update(dict.fromkeys(cores, driver))
                for core in cores:
                    measured[core] = Measured(core, driver.ladder, address.paths)
                reconnectors.append(reconnector(driver, address, cores))
                nursery.start_soon(reconnectors[-1].run)
            named = name_disks(list(disks))

            def serve_metrics() -> None:
                metrics.open(addresses)
                metrics.start(nursery, [measured[core] for core in named.values()])

            if not metrics_later:
                serve_metrics()
            found = {name: TrioDisk(core, disks[core]) for name, core in named.items()}
            yield TrioDiskSet(
                {name: metered_async(found[name], named[name]) for name in named},
                serve_metrics,
                left_out,
                EndOfUse([driver.session for driver in drivers]),
                max(driver.session.busy_poll_us for driver in drivers),
            )
        except (Exception, KeyboardInterrupt) as problem:
            error = problem  # raised below, not inside the nursery's exception group
        finally:
            metrics.close()
            with trio.CancelScope(shield=True):
                for each in reconnectors:
                    each.stop()
                for driver in drivers:
                    await log_out(driver)
            nursery.cancel_scope.cancel()
    if error is not None:
        raise error
