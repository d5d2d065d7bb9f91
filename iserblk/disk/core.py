"""The operations of a LUN, for both faces: splitting, alignment, flushing, provisioning.

Concurrency: an operation may run in any thread. What several share is guarded by RangeLock, by
the session, or is a flag whose order is written down where it is used.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from iserblk.disk.commands import (
    command,
    failure,
    fill_read,
    fill_write,
    release_ended,
    retry_delay,
    take,
)
from iserblk.disk.durable import Durability
from iserblk.disk.geometry import Geometry
from iserblk.disk.ranges import RangeLock
from iserblk.disk.seam import EXTENT_DATA, Extent, LunInfo
from iserblk.errors import (
    IserblkError,
    LocalProtocolError,
    NotSupported,
    OutOfRange,
    ScsiError,
    WriteProtected,
)
from iserblk.initiator.session import Session
from iserblk.initiator.task import Operation, TaskSlot, Waiter
from iserblk.metrics.counting import LunMetrics
from iserblk.scsi import cdb
from iserblk.scsi import lba as lba_data
from iserblk.scsi.sense import Sense

log = logging.getLogger(__name__)

PARALLEL = 16  # commands that one operation keeps in flight at the most
_ZEROES = memoryview(bytes(1 << 20))

Piece = tuple[int, memoryview]  # first block, its bytes
Filler = Callable[[TaskSlot, int, memoryview, "Waiter | None"], bool]


def check_buffer(buffer: memoryview) -> None:
    """Raises LocalProtocolError unless it is contiguous bytes: what could not be advertised would
    leave a hole in the order of commands."""
    if buffer.format != "B" or buffer.ndim != 1 or not buffer.c_contiguous:
        raise LocalProtocolError("a buffer must be contiguous bytes; cast it")


class DiskCore:
    """One LUN of a session. ``info`` and ``geometry`` come from ``iserblk.disk.identify``."""

    def __init__(self, session: Session, lun: bytes, info: LunInfo, geometry: Geometry) -> None:
        self.session = session
        self.lun = lun
        self.info = info
        self.geometry = geometry
        self.size = info.size
        self.block = info.block_size
        self.max_transfer = info.max_transfer
        self.ranges = RangeLock(session.tasks, lun)
        self.pack_read = cdb.pack_read16 if geometry.long_cdbs else cdb.pack_read10
        self.pack_write = cdb.pack_write16 if geometry.long_cdbs else cdb.pack_write10
        self.metrics = LunMetrics()
        self.metrics_at = ""  # where they are served; "": nowhere
        self.durability = Durability(info.name, info.write_cache, self.ranges)
        session.on_sense[lun] = self.durability.hear

    def rename(self, name: str) -> None:
        self.info = replace(self.info, name=name)
        self.durability.name = name

    # -- checks -----------------------------------------------------------------------------------

    def check(self, offset: int, length: int) -> None:
        """Raises OutOfRange unless the range lies on the disk."""
        if offset < 0 or length < 0 or offset + length > self.size:
            raise OutOfRange(
                f"{self.info.name}: {length} bytes at offset {offset} leave the disk, "
                f"which has {self.size} bytes"
            )

    def check_write(self, offset: int, length: int) -> None:
        """Raises WriteProtected or OutOfRange."""
        if self.info.read_only:
            raise WriteProtected(f"{self.info.name}: the LUN is read-only")
        self.check(offset, length)

    # -- the common case: one command for whole blocks ------------------------------------------

    def begin_read(self, buffer: memoryview, offset: int, waiter: Waiter) -> TaskSlot | None:
        """Send the one READ that fills ``buffer``, if one does and a slot is free.

        Then wait, and call ``ended``. None: nothing was done, run ``read``.
        """
        length = len(buffer)
        block = self.block
        if (
            not 0 < length <= self.max_transfer
            or offset % block
            or length % block
            or not 0 <= offset <= self.size - length
            or buffer.readonly
            or buffer.format != "B"
            or buffer.ndim != 1
            or not buffer.c_contiguous
        ):
            return None
        slot = self.session.take_now()
        if slot is None:
            return None
        fill_read(slot, self.lun, buffer)
        self.pack_read(slot.cdb, offset // block, length // block, 0)
        slot.waiter = waiter
        waiter.pending = 1
        self.session.submit(slot)
        return slot

    def begin_write(self, buffer: memoryview, offset: int, waiter: Waiter) -> TaskSlot | None:
        """As ``begin_read``, for a write without FUA. Then ``ended_write``."""
        length = len(buffer)
        block = self.block
        if (
            not 0 < length <= self.max_transfer
            or offset % block
            or length % block
            or not 0 <= offset <= self.size - length
            or self.info.read_only
            or buffer.format != "B"
            or buffer.ndim != 1
            or not buffer.c_contiguous
        ):
            return None
        slot = self.session.take_now()
        if slot is None:
            return None
        lba = offset // block
        blocks = length // block
        if not self.ranges.claim(slot, lba, lba + blocks - 1, None):
            self.session.release(slot)
            return None
        fill_write(slot, self.lun, buffer, self.session.immediate_limit)
        self.pack_write(slot.cdb, lba, blocks, 0)
        slot.waiter = waiter
        waiter.pending = 1
        self.session.submit(slot)
        return slot

    def ended(self, slot: TaskSlot) -> bool:
        """Give the slot back. True: done. False: run ``read``, which tries again. Raises the
        command's error where that would be of no use."""
        if slot.error is None and not slot.status and not slot.residual and not slot.response:
            self.session.release(slot)
            return True
        problem = failure(slot, self.info.name)
        self.session.release(slot)
        if problem is not None and retry_delay(problem, 0) is None:
            raise problem
        if problem is not None:
            self.metrics.retried()
        return problem is None

    def ended_write(self, slot: TaskSlot) -> bool:
        """As ``ended``; a write that succeeded is not durable yet."""
        self.durability.wrote()
        try:
            return self.ended(slot)
        finally:
            self.ranges.changed()

    def dropped(self, slot: TaskSlot) -> None:
        """Give back the slot of a command whose outcome nobody waits for any more."""
        if slot.last >= slot.first:
            self.durability.wrote()
        self.session.release(slot)
        self.ranges.changed()

    # -- one batch of commands --------------------------------------------------------------------

    def _run(
        self,
        pieces: list[Piece],
        fill: Filler,
        dirties: bool = False,
    ) -> Operation[None]:
        """One command a piece, as many at once as slots allow, each retried where that is legal.
        ``dirties``: what they write is not durable yet when they have ended.

        ``fill`` prepares the slot; False: its blocks are locked, and the waiter it was given will
        hear of a change. It is given none while other pieces run: who holds claims must not wait
        for a lock whose holder waits for them. Raises the first error, when all have ended.
        """
        session = self.session
        waiter = session.new_waiter()
        todo = deque((lba, view, 0) for lba, view in pieces)
        error: IserblkError | None = None
        while todo and error is None:
            running: list[tuple[TaskSlot, tuple[int, memoryview, int]]] = []
            taken: TaskSlot | None = yield from take(session, waiter)
            pause = 0.0
            try:
                while taken is not None:
                    piece = todo[0]
                    taken.waiter = waiter
                    if not fill(taken, piece[0], piece[1], None if running else waiter):
                        session.release(taken)
                        break
                    running.append((taken, todo.popleft()))
                    if not todo or len(running) == PARALLEL:
                        break
                    taken = session.take_now()
                waiter.pending += len(running)
                for slot, _ in running:
                    session.submit(slot)
                # With nothing running, this waits for the lock instead.
                while waiter.pending:
                    yield waiter
                for slot, (lba, view, attempt) in running:
                    problem = failure(slot, self.info.name)
                    if problem is None:
                        continue
                    delay = retry_delay(problem, attempt)
                    if delay is None:
                        error = error or problem
                    else:
                        log.info("%s; sending it again", problem)
                        self.metrics.retried()
                        pause = max(pause, delay)
                        todo.append((lba, view, attempt + 1))
            finally:
                if dirties:
                    self.durability.wrote()
                release_ended(session, [slot for slot, _ in running])
                self.ranges.changed()
            if pause and error is None:
                yield pause
        if error is not None:
            raise error

    # -- reading ----------------------------------------------------------------------------------

    def _fill_read(
        self, slot: TaskSlot, lba: int, view: memoryview, _waiter: Waiter | None
    ) -> bool:
        fill_read(slot, self.lun, view)
        self.pack_read(slot.cdb, lba, len(view) // self.block, 0)
        return True

    def read(self, buffer: memoryview, offset: int) -> Operation[None]:
        """Fill ``buffer``; any alignment."""
        check_buffer(buffer)
        if buffer.readonly:
            raise LocalProtocolError("a buffer to read into must be writable")
        self.check(offset, len(buffer))
        pieces, edges = self._cut(buffer, offset)
        bounces = [memoryview(bytearray(self.block)) for _ in edges]
        pieces += [(edge[0], bounce) for edge, bounce in zip(edges, bounces, strict=True)]
        if pieces:
            yield from self._run(pieces, self._fill_read)
        for (_, start, part), bounce in zip(edges, bounces, strict=True):
            part[:] = bounce[start : start + len(part)]

    def _cut(
        self, buffer: memoryview, offset: int
    ) -> tuple[list[Piece], list[tuple[int, int, memoryview]]]:
        """Whole blocks, in pieces of at most ``max_transfer`` bytes, and the edges: (block,
        offset in it, part of the buffer)."""
        block = self.block
        end = offset + len(buffer)
        edges: list[tuple[int, int, memoryview]] = []
        position = offset
        if position % block and position < end:
            stop = min(end, position - position % block + block)
            edges.append((position // block, position % block, buffer[: stop - offset]))
            position = stop
        whole_end = end - end % block
        pieces: list[Piece] = []
        step = self.info.max_transfer
        while position < whole_end:
            stop = min(whole_end, position + step)
            pieces.append((position // block, buffer[position - offset : stop - offset]))
            position = stop
        if position < end:
            edges.append((position // block, 0, buffer[position - offset :]))
        return pieces, edges

    # -- writing ----------------------------------------------------------------------------------

    def write(self, buffer: memoryview, offset: int, fua: bool = False) -> Operation[None]:
        """Write ``buffer``; any alignment. Edges are read, changed and written back."""
        check_buffer(buffer)
        self.check_write(offset, len(buffer))
        pieces, edges = self._cut(buffer, offset)
        use_fua = fua and self.info.fua and self.info.write_cache
        if pieces:
            yield from self._run(pieces, self._write_filler(use_fua), dirties=not use_fua)
        for lba, start, part in edges:
            yield from self._modify(lba, start, part, use_fua)
        if fua and not use_fua:
            yield from self.flush()

    def _write_filler(self, fua: bool) -> Filler:
        control = cdb.FUA if fua else 0

        def fill(slot: TaskSlot, lba: int, view: memoryview, waiter: Waiter | None) -> bool:
            blocks = len(view) // self.block
            if not self.ranges.claim(slot, lba, lba + blocks - 1, waiter):
                return False
            fill_write(slot, self.lun, view, self.session.immediate_limit)
            self.pack_write(slot.cdb, lba, blocks, control)
            return True

        return fill

    def _modify(self, lba: int, start: int, part: memoryview, fua: bool) -> Operation[None]:
        """Change part of one block."""
        waiter = self.session.new_waiter()
        while not self.ranges.lock(lba, lba, waiter):
            while waiter.pending:
                yield waiter
        try:
            while not self.ranges.quiet(lba, lba, waiter):
                while waiter.pending:
                    yield waiter
            content = memoryview(bytearray(self.block))
            yield from self._run([(lba, content)], self._fill_read)
            content[start : start + len(part)] = part

            def fill(slot: TaskSlot, lba: int, view: memoryview, _waiter: Waiter | None) -> bool:
                slot.first = slot.last = lba  # no claim is needed under the lock
                fill_write(slot, self.lun, view, self.session.immediate_limit)
                self.pack_write(slot.cdb, lba, 1, cdb.FUA if fua else 0)
                return True

            yield from self._run([(lba, content)], fill, dirties=not fua)
        finally:
            self.ranges.unlock(lba, lba)

    def flush(self) -> Operation[None]:
        """SYNCHRONIZE CACHE of the whole LUN, where it has a write cache. Raises IserblkError also
        when the target reports that writes since the last flush were lost."""
        token = self.durability.begin_flush()
        done = False
        try:
            if self.durability.volatile and not self.info.read_only:
                long = self.geometry.long_cdbs
                pack = cdb.synchronize_cache16 if long else cdb.synchronize_cache10
                yield from self._command(pack(0, 0))
            done = True
        finally:
            lost = self.durability.end_flush(token, done)
        if lost:
            raise IserblkError(
                f"{self.info.name}: writes since the last flush were lost at the target; "
                "its log may say why"
            )

    def _command(self, command_block: bytes) -> Operation[int]:
        return command(
            self.session, self.lun, command_block, self.info.name, on_retry=self.metrics.retried
        )

    # -- provisioning -----------------------------------------------------------------------------

    def trim(self, offset: int, length: int, fua: bool = False) -> Operation[None]:
        """UNMAP whole granules inside the range."""
        self.check_write(offset, length)
        if not self.info.can_trim:
            raise NotSupported(f"{self.info.name}: the LUN cannot unmap; zero the range instead")
        for lba, blocks in self.geometry.unmap_ranges(offset, length):
            parameters = memoryview(lba_data.unmap_parameters([(lba, blocks)]))
            yield from self._exclusive(lba, blocks, cdb.unmap(len(parameters)), parameters)
        if fua:
            yield from self.flush()

    def zero(
        self, offset: int, length: int, may_trim: bool, fast: bool, fua: bool
    ) -> Operation[None]:
        """WRITE SAME of zeroes for whole blocks, written zeroes for the edges."""
        self.check_write(offset, length)
        if fast and not self.info.can_zero:
            raise NotSupported(f"{self.info.name}: the LUN has no WRITE SAME; write zeroes instead")
        first = -(-offset // self.block)
        last = (offset + length) // self.block
        if self.info.can_zero and first < last:
            start, stop = first * self.block, last * self.block
            if offset < start:
                yield from self.write(_ZEROES[: start - offset], offset)
            unmap = may_trim and self.info.zero_by_unmap
            for lba, blocks in self.geometry.write_same_ranges(first, last - first):
                yield from self._write_same(lba, blocks, unmap)
            if stop < offset + length:
                yield from self.write(_ZEROES[: offset + length - stop], stop)
        else:
            position = offset
            while position < offset + length:
                step = min(len(_ZEROES), offset + length - position)
                yield from self.write(_ZEROES[:step], position)
                position += step
        if fua:
            yield from self.flush()

    def _write_same(self, lba: int, blocks: int, unmap: bool) -> Operation[None]:
        """Zeroes by WRITE SAME(16): without data where the LUN takes NDOB, else one block."""
        if self.geometry.ndob:
            try:
                yield from self._exclusive(lba, blocks, cdb.write_same16(lba, blocks, unmap, True))
                return
            except ScsiError as error:
                if not isinstance(error.sense, Sense) or not error.sense.is_invalid_field:
                    raise
                self.geometry.ndob = False
        yield from self._exclusive(
            lba, blocks, cdb.write_same16(lba, blocks, unmap, False), _ZEROES[: self.block]
        )

    def _exclusive(
        self, lba: int, blocks: int, command_block: bytes, data_out: memoryview | None = None
    ) -> Operation[None]:
        """A command that changes a range without being a write: under the range lock whole."""
        waiter = self.session.new_waiter()
        last = lba + blocks - 1
        while not self.ranges.lock(lba, last, waiter):
            while waiter.pending:
                yield waiter
        try:
            yield from command(
                self.session,
                self.lun,
                command_block,
                self.info.name,
                data_out=data_out,
                changes=(lba, last),
                on_end=self.durability.wrote,
                on_retry=self.metrics.retried,
            )
        finally:
            self.ranges.unlock(lba, last)

    def extents(self, offset: int, length: int) -> Operation[list[Extent]]:
        """GET LBA STATUS, as far as one answer goes."""
        self.check(offset, length)
        whole: list[Extent] = [(offset, length, EXTENT_DATA)]
        if not self.info.can_extents or not length:
            return whole
        answer = memoryview(bytearray(self.geometry.lba_status_length))
        moved = yield from command(
            self.session,
            self.lun,
            cdb.get_lba_status16(offset // self.block, len(answer)),
            self.info.name,
            data_in=answer,
            short_ok=True,
            on_retry=self.metrics.retried,
        )
        return self.geometry.extents_untrusted(answer[:moved], offset, length) or whole

    def cache(self, offset: int, length: int) -> Operation[None]:
        """PRE-FETCH with IMMED; a target that cannot is no error."""
        self.check(offset, length)
        if not length or not self.geometry.prefetch:
            return
        first = offset // self.block
        blocks = -(-(offset + length) // self.block) - first
        try:
            yield from self._command(cdb.pre_fetch16(first, min(blocks, 0xFFFFFFFF)))
        except ScsiError as error:
            log.debug("%s: no read-ahead: %s", self.info.name, error)
            self.geometry.prefetch = False
