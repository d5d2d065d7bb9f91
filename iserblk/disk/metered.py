"""Disks that count (``metrics=``): wrappers that count and time the requests of another disk.

Without the option no wrapper is used. A request is one call of the front-end, however many commands
it took; its latency is what the front-end saw.
"""

from __future__ import annotations

from collections.abc import Callable

from iserblk.commands.command import Command
from iserblk.disk.lun.operations import DiskCore
from iserblk.disk.seam import (
    AsyncLun,
    CommandResult,
    Extent,
    FlushClient,
    LossCount,
    LunInfo,
    Rest,
)
from iserblk.loop.clock import monotonic, nanoseconds
from iserblk.metrics.counting import (
    BYTES,
    ERRORS,
    FLUSH,
    NANOSECONDS,
    READ,
    TRIM,
    WRITE,
    ZERO,
    LunMetrics,
    index_of,
)


class _Timed:
    """Counts and times one request, as a context manager: for the kinds of request for which a
    saved call does not matter."""

    __slots__ = ("_length", "_metrics", "_operation", "_start")

    def __init__(self, metrics: LunMetrics, operation: int, length: int = 0) -> None:
        self._metrics = metrics
        self._operation = operation
        self._length = length

    def __enter__(self) -> None:
        self._start = nanoseconds()

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        took = nanoseconds() - self._start
        count(self._metrics, self._operation, took, self._length, error is not None)


def count(metrics: LunMetrics, operation: int, took: int, length: int, failed: bool) -> None:
    """Count a request that took so many nanoseconds."""
    row = metrics.of_this_thread.rows[operation]
    row[index_of(took)] += 1
    row[NANOSECONDS] += took
    if failed:
        row[ERRORS] += 1
    else:
        row[BYTES] += length


def _succeeded(row: list[int], took: int, length: int) -> None:
    """Count a request that took so many nanoseconds. (Compiled code adds numbers so; by ``+=`` to
    an item of a list it would add objects.)"""
    index = ((took - 1) // 1000).bit_length()
    row[index] = row[index] + 1
    row[BYTES] = row[BYTES] + length
    row[NANOSECONDS] = row[NANOSECONDS] + took


class MeteredAsync:
    """Implements AsyncLun: passes each call on to another disk, and counts it. When a command was
    begun it says itself."""

    def __init__(self, disk: AsyncLun, metrics: LunMetrics) -> None:
        self.disk = disk
        self.begin_read = disk.begin_read
        self.begin_write = disk.begin_write
        self.begin_batch = disk.begin_batch
        self.end_batch = disk.end_batch
        self.abandon = disk.abandon
        self.check_here = disk.check_here
        self.take_over = disk.take_over
        self._end_read = disk.end_read
        self._end_write = disk.end_write
        self._read = disk.read_into
        self._write = disk.write
        self._metrics = metrics
        self._rows = metrics.of_this_thread.rows  # of the loop's thread, the only one here

    @property
    def info(self) -> LunInfo:
        return self.disk.info

    @property
    def size(self) -> int:
        return self.disk.size

    @property
    def dirty(self) -> bool:
        return self.disk.dirty

    @property
    def unflushed(self) -> int | None:
        return self.disk.unflushed

    @property
    def client(self) -> FlushClient:
        return self.disk.client

    def new_client(self) -> FlushClient:
        return self.disk.new_client()

    def only_client(self, before: LossCount, changed: Callable[[], None]) -> FlushClient:
        return self.disk.only_client(before, changed)

    async def refresh(self) -> int:
        return await self.disk.refresh()

    async def read_into(self, buffer: memoryview, offset: int, rest: Rest | None = None) -> None:
        start = nanoseconds() if rest is None else rest.begun
        try:
            await self._read(buffer, offset, rest)
        except BaseException:
            count(self._metrics, READ, nanoseconds() - start, 0, True)
            raise
        took = nanoseconds() - start
        _succeeded(self._rows[READ], took, len(buffer))

    async def write(
        self, buffer: memoryview, offset: int, fua: bool = False, rest: Rest | None = None
    ) -> None:
        start = nanoseconds() if rest is None else rest.begun
        try:
            await self._write(buffer, offset, fua, rest)
        except BaseException:
            count(self._metrics, WRITE, nanoseconds() - start, 0, True)
            raise
        took = nanoseconds() - start
        _succeeded(self._rows[WRITE], took, len(buffer))

    async def flush(self, client: FlushClient | None = None) -> None:
        with _Timed(self._metrics, FLUSH):
            await self.disk.flush(client)

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

    async def command(
        self,
        cdb: bytes,
        data_in: bytearray | memoryview | None = None,
        data_out: bytes | bytearray | memoryview | None = None,
        *,
        timeout_s: float | None = None,
    ) -> CommandResult:
        return await self.disk.command(cdb, data_in, data_out, timeout_s=timeout_s)

    def end_read(self, slot: Command) -> Rest | None:
        """One that goes on is counted when all of it has ended."""
        begun, length = slot.begun, slot.length
        try:
            rest = self._end_read(slot)
        except BaseException:
            count(self._metrics, READ, int(monotonic() * 1e9) - begun, 0, True)
            raise
        if rest is None:
            took = int(monotonic() * 1e9) - begun
            row = self._rows[READ]  # as ``_succeeded``, without its call
            index = ((took - 1) // 1000).bit_length()
            row[index] = row[index] + 1
            row[BYTES] = row[BYTES] + length
            row[NANOSECONDS] = row[NANOSECONDS] + took
        return rest

    def end_write(self, slot: Command) -> Rest | None:
        begun, length = slot.begun, slot.length
        try:
            rest = self._end_write(slot)
        except BaseException:
            count(self._metrics, WRITE, int(monotonic() * 1e9) - begun, 0, True)
            raise
        if rest is None:
            _succeeded(self._rows[WRITE], int(monotonic() * 1e9) - begun, length)
        return rest


def metered_async(disk: AsyncLun, core: DiskCore) -> AsyncLun:
    if not core.metrics.served_at:
        return disk
    return MeteredAsync(disk, core.metrics)
