"""Metrics of disks (``metrics=``): wrappers that count requests, and the ports that serve the
numbers.

Without the option no wrapper is used. A request is one call of the front-end, however many commands
it took; its latency is what the front-end saw.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from functools import partial
from time import perf_counter_ns as clock

import trio

from iserblk import __version__
from iserblk.disk.lun.operations import DiskCore
from iserblk.disk.multipath.addresses import Address
from iserblk.disk.seam import BlockingDisk, DirectDisk, Extent
from iserblk.initiator.session.deadlines import Ladder
from iserblk.initiator.session.slots import QUEUED, TaskSlot, Waiter
from iserblk.metrics.address import parse_address
from iserblk.metrics.counting import (
    BYTES,
    ERRORS,
    FLUSH,
    NANOSECONDS,
    OPERATIONS,
    READ,
    TRIM,
    WRITE,
    ZERO,
    LunMetrics,
    index_of,
)
from iserblk.metrics.reading import LunReading, ProcessReading, of_row
from iserblk.metrics.serving import Listener, Look, serve


class _Timed:
    """Counts and times one request, as a context manager: for the kinds of request for which a
    saved call does not matter."""

    __slots__ = ("_length", "_metrics", "_operation", "_start")

    def __init__(self, metrics: LunMetrics, operation: int, length: int = 0) -> None:
        self._metrics = metrics
        self._operation = operation
        self._length = length

    def __enter__(self) -> None:
        self._start = clock()

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        count(self._metrics, self._operation, self._start, self._length, error is not None)


def count(metrics: LunMetrics, operation: int, start: int, length: int, failed: bool) -> None:
    """Count a request that began at ``start`` (ns of ``clock``) and has ended."""
    took = clock() - start
    row = metrics.of_this_thread.rows[operation]
    row[index_of(took)] += 1
    row[NANOSECONDS] += took
    if failed:
        row[ERRORS] += 1
    else:
        row[BYTES] += length


class MeteredBlocking:
    """Implements BlockingDisk: passes each call on to another disk, and counts it."""

    def __init__(self, disk: BlockingDisk, metrics: LunMetrics) -> None:
        self.disk = disk
        self._read = disk.read_into
        self._write = disk.write
        self._metrics = metrics
        self._here = metrics.of_this_thread
        self.info = disk.info

    @property
    def size(self) -> int:
        return self.disk.size

    @property
    def dirty(self) -> bool:
        return self.disk.dirty

    def refresh(self) -> int:
        return self.disk.refresh()

    def read_into(self, buffer: memoryview, offset: int) -> None:
        start = clock()
        try:
            self._read(buffer, offset)
        except BaseException:
            count(self._metrics, READ, start, 0, True)
            raise
        took = clock() - start
        row = self._here.rows[READ]
        row[((took - 1) // 1000).bit_length()] += 1
        row[BYTES] += len(buffer)
        row[NANOSECONDS] += took

    def write(self, buffer: memoryview, offset: int, fua: bool = False) -> None:
        start = clock()
        try:
            self._write(buffer, offset, fua)
        except BaseException:
            count(self._metrics, WRITE, start, 0, True)
            raise
        took = clock() - start
        row = self._here.rows[WRITE]
        row[((took - 1) // 1000).bit_length()] += 1
        row[BYTES] += len(buffer)
        row[NANOSECONDS] += took

    def flush(self) -> None:
        with _Timed(self._metrics, FLUSH):
            self.disk.flush()

    def trim(self, offset: int, length: int, fua: bool = False, *, patient: bool = False) -> None:
        with _Timed(self._metrics, TRIM, length):
            self.disk.trim(offset, length, fua, patient=patient)

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
        with _Timed(self._metrics, ZERO, length):
            self.disk.zero(offset, length, may_trim=may_trim, fast=fast, fua=fua, patient=patient)

    def extents(self, offset: int, length: int) -> list[Extent]:
        return self.disk.extents(offset, length)

    def cache(self, offset: int, length: int) -> None:
        self.disk.cache(offset, length)


class MeteredAsync:
    """Implements DirectDisk: passes each call on to another disk, and counts it. ``slots``: task
    slots of the other disk's session."""

    def __init__(self, disk: DirectDisk, metrics: LunMetrics, slots: int) -> None:
        self.disk = disk
        self.hold = disk.hold
        self.release = disk.release
        self.abandon = disk.abandon
        self._begin_read = disk.begin_read
        self._begin_write = disk.begin_write
        self._end_read = disk.end_read
        self._end_write = disk.end_write
        self._starts = [0] * slots  # of commands that are begun, by the index of their slot
        self._read = disk.read_into
        self._write = disk.write
        self._metrics = metrics
        self._rows = metrics.of_this_thread.rows  # of the loop's thread, the only one here
        self.info = disk.info

    @property
    def size(self) -> int:
        return self.disk.size

    @property
    def dirty(self) -> bool:
        return self.disk.dirty

    async def refresh(self) -> int:
        return await self.disk.refresh()

    async def read_into(self, buffer: memoryview, offset: int, deadline: float = 0.0) -> None:
        start = clock()
        try:
            await self._read(buffer, offset, deadline)
        except BaseException:
            count(self._metrics, READ, start, 0, True)
            raise
        took = clock() - start
        row = self._rows[READ]
        row[((took - 1) // 1000).bit_length()] += 1
        row[BYTES] += len(buffer)
        row[NANOSECONDS] += took

    async def write(
        self, buffer: memoryview, offset: int, fua: bool = False, deadline: float = 0.0
    ) -> None:
        start = clock()
        try:
            await self._write(buffer, offset, fua, deadline)
        except BaseException:
            count(self._metrics, WRITE, start, 0, True)
            raise
        took = clock() - start
        row = self._rows[WRITE]
        row[((took - 1) // 1000).bit_length()] += 1
        row[BYTES] += len(buffer)
        row[NANOSECONDS] += took

    async def flush(self) -> None:
        with _Timed(self._metrics, FLUSH):
            await self.disk.flush()

    async def trim(
        self, offset: int, length: int, fua: bool = False, *, patient: bool = False
    ) -> None:
        with _Timed(self._metrics, TRIM, length):
            await self.disk.trim(offset, length, fua, patient=patient)

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
        with _Timed(self._metrics, ZERO, length):
            await self.disk.zero(
                offset, length, may_trim=may_trim, fast=fast, fua=fua, patient=patient
            )

    async def extents(self, offset: int, length: int) -> list[Extent]:
        return await self.disk.extents(offset, length)

    async def cache(self, offset: int, length: int) -> None:
        await self.disk.cache(offset, length)

    def begin_read(self, buffer: memoryview, offset: int, waiter: Waiter) -> TaskSlot | None:
        start = clock()
        slot = self._begin_read(buffer, offset, waiter)
        if slot is not None:
            self._starts[slot.index] = start
        return slot

    def begin_write(self, buffer: memoryview, offset: int, waiter: Waiter) -> TaskSlot | None:
        start = clock()
        slot = self._begin_write(buffer, offset, waiter)
        if slot is not None:
            self._starts[slot.index] = start
        return slot

    def end_read(self, slot: TaskSlot) -> float:
        """One that goes on counts as a request of its own, from there."""
        index, length = slot.index, slot.length
        try:
            deadline = self._end_read(slot)
        except BaseException:
            count(self._metrics, READ, self._starts[index], 0, True)
            raise
        if not deadline:
            took = clock() - self._starts[index]
            row = self._rows[READ]
            row[((took - 1) // 1000).bit_length()] += 1
            row[BYTES] += length
            row[NANOSECONDS] += took
        return deadline

    def end_write(self, slot: TaskSlot) -> float:
        index, length = slot.index, slot.length
        try:
            deadline = self._end_write(slot)
        except BaseException:
            count(self._metrics, WRITE, self._starts[index], 0, True)
            raise
        if not deadline:
            took = clock() - self._starts[index]
            row = self._rows[WRITE]
            row[((took - 1) // 1000).bit_length()] += 1
            row[BYTES] += length
            row[NANOSECONDS] += took
        return deadline


def metered_blocking(disk: BlockingDisk, core: DiskCore) -> BlockingDisk:
    """``disk``; where its metrics are served, a wrapper of it that counts."""
    return MeteredBlocking(disk, core.metrics) if core.metrics.served_at else disk


def metered_async(disk: DirectDisk, core: DiskCore) -> DirectDisk:
    if not core.metrics.served_at:
        return disk
    return MeteredAsync(disk, core.metrics, len(core.session.queue.tasks))


# --- serving them --------------------------------------------------------------------------------


class MetricsPorts:
    """The listeners that serve the metrics of some URLs. Several URLs may name the same place."""

    def __init__(self, addresses: Sequence[Address]) -> None:
        """Raises as ``open``."""
        self._idle: dict[str, Listener] = {}
        self._scopes: list[trio.CancelScope] = []
        self.open(addresses)

    def open(self, addresses: Sequence[Address]) -> None:
        """Open the listeners that are not open yet; they answer no client before ``start``. Raises
        Busy, PermissionDenied or BadArgument, with nothing left open."""
        try:
            for address in addresses:
                place = address.options.metrics
                if place and place not in self._idle:
                    self._idle[place] = Listener(parse_address(place, "metrics"))
        except BaseException:
            self.close()
            raise

    def start(self, nursery: trio.Nursery, disks: Iterable[tuple[DiskCore, Ladder]]) -> None:
        """Answer clients until ``close``, in tasks of ``nursery``. Call ``close`` before it
        ends."""
        disks = list(disks)
        while self._idle:
            place, listener = self._idle.popitem()
            here = [(core, ladder) for core, ladder in disks if core.metrics.served_at == place]
            self._scopes.append(trio.CancelScope())
            nursery.start_soon(_serve, self._scopes[-1], listener, partial(look, here))

    def close(self) -> None:
        """Stop answering, and close the listeners. Idempotent."""
        while self._idle:
            self._idle.popitem()[1].close()
        for scope in self._scopes:
            scope.cancel()


async def _serve(scope: trio.CancelScope, listener: Listener, seen: Look) -> None:
    with scope:
        await serve(listener, seen)


def look(disks: Sequence[tuple[DiskCore, Ladder]]) -> ProcessReading:
    """Read the numbers of these disks, from any thread. A change meanwhile may show in one number
    and not yet in another."""
    luns = tuple(_reading(core, ladder) for core, ladder in disks)
    return ProcessReading(os.getpid(), __version__, luns)


def _reading(core: DiskCore, ladder: Ladder) -> LunReading:
    session = core.session
    info = core.info
    rows = core.metrics.total()
    journal = core.durability.journal
    return LunReading(
        target=info.target,
        lun=info.lun,
        name=info.name,
        url=info.url,
        size=core.size,
        portal=session.portal,
        provider=str(session.describe().get("provider", "")),
        connected=session.error is None and session.suspended is None,
        in_flight=sum(
            task.state >= QUEUED and task.lun == core.lun for task in session.queue.tasks
        ),
        retries=core.metrics.retries,
        reconnects=session.reconnects,
        replayed=session.replayed,
        aborted=ladder.aborted,
        resets=ladder.resets,
        unflushed=journal.size if journal is not None else 0,
        operations={name: of_row(row) for name, row in zip(OPERATIONS, rows, strict=True)},
    )
