"""The journal of one LUN: what was acknowledged and is not on stable storage yet, to be sent again
when the target has lost its cache.

A change (WRITE, UNMAP, WRITE SAME) is in it from before it is submitted until a flush covers it, or
until it has failed. While its command runs it is a view of the caller's buffer; a copy of that is
made before the caller gets the buffer back. So at no moment an acknowledged change is nowhere.

Order: changes are numbered when they are submitted, and sent again by these numbers. One that was
acknowledged before another was submitted has the lower one. Of two at the same time either may win,
there as here.

Flushes: what has ended since the last flush began is a **batch**. A flush closes the present batch;
when it succeeds, it drops that one and all before it; when not, they stay, for the next.

Copies lie one behind another in chunks that are used again: fresh memory costs a page fault every
4 KiB.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from itertools import count
from typing import NamedTuple

from iserblk.initiator.task import QUEUED, TaskSlot, Waiter

CHUNK = 1 << 20  # bytes; a multiple of every block size
SMALL = 128  # bytes that an entry without data counts as


class Entry(NamedTuple):
    """One change as it is to be sent again. ``command_block`` b"": a WRITE of ``data``."""

    sequence: int
    first: int  # block
    last: int
    data: memoryview | None
    command_block: bytes = b""


_Raw = tuple[int, int, int, memoryview | None, bytes]  # the fields of an Entry


class _Batch:
    """Changes that have ended. ``writes``: (sequence, first block, chunk, start, stop);
    ``others``: those without a copy: commands, and pieces of an operation that still has its
    buffer. ``size``: bytes that all of it counts as."""

    __slots__ = ("at", "chunks", "others", "size", "writes")

    def __init__(self) -> None:
        self.writes: list[tuple[int, int, memoryview, int, int]] = []
        self.others: dict[int, Entry] = {}
        self.chunks: list[memoryview] = []
        self.at = CHUNK  # in the last chunk
        self.size = 0


Batches = list[_Batch]


def _good(slot: TaskSlot) -> bool:
    """A command that has ended succeeded."""
    return not (slot.error or slot.status or slot.residual or slot.response)


class Journal:
    """Thread-safe; waits for nothing but its own short lock. ``limit``: bytes of copies, with what
    is in flight, from which on a write must flush first. Of what is in flight no more than ``half``
    of it counts: else with a small limit each write would have to flush.

    ``size``: bytes that are kept. ``active``: something is kept, or in flight.
    """

    def __init__(self, limit: int, block: int) -> None:
        self.limit = limit
        self.half = limit // 2
        self.size = 0
        self._block = block
        self._lock = threading.Lock()
        self._numbers = count(1)
        self._open: dict[TaskSlot, _Raw] = {}  # submitted; not given back to its caller
        self._batch = _Batch()
        self._closed: list[_Batch] = []  # a flush of them is under way, or has failed
        self._spare: list[memoryview] = []  # chunks
        self._replays = 0  # under way: they look at chunks
        self._flushing = False  # by one who found the journal full
        self._waiters: list[Waiter] = []

    @property
    def active(self) -> bool:
        return self.size > 0 or bool(self._open)

    # -- changes ----------------------------------------------------------------------------------

    def add(self, slot: TaskSlot, first: int, last: int, data: memoryview) -> None:
        """``slot`` is about to be submitted: a WRITE of ``data``."""
        # No lock: one operation on a dict is atomic. No Entry: that costs 0.3 µs more.
        self._open[slot] = (next(self._numbers), first, last, data, b"")

    def add_command(
        self, slot: TaskSlot, first: int, last: int, command_block: bytes, data: memoryview | None
    ) -> None:
        """As ``add``, for another change. ``data`` must not change any more."""
        self._open[slot] = (next(self._numbers), first, last, data, command_block)

    def ended(self, slot: TaskSlot, *, copy: bool = True) -> int:
        """The command of ``slot`` has ended, well or not; to be called before its slot is given
        back. ``copy`` False: the caller goes on owning the buffer, until ``settle`` of the number
        that is returned, which is 0 where nothing is kept."""
        if slot not in self._open:
            return 0
        with self._lock:
            sequence, first, _, data, command_block = raw = self._open.pop(slot)
            if slot.error or slot.status or slot.residual or slot.response:
                return 0
            batch = self._batch
            if copy and data is not None and not command_block:
                at = batch.at
                stop = at + len(data)
                if stop <= CHUNK:  # nearly always
                    chunk = batch.chunks[-1]
                    chunk[at:stop] = data
                    batch.writes.append((sequence, first, chunk, at, stop))
                    batch.at = stop
                    batch.size += stop - at
                    self.size += stop - at
                else:
                    self._copy(batch, sequence, first, data)
                return 0
            entry = Entry(*raw)
            self._batch.others[entry.sequence] = entry
            size = SMALL if entry.command_block or entry.data is None else len(entry.data)
            self._batch.size += size
            self.size += size
        return entry.sequence

    def settle(self, sequences: Iterable[int]) -> None:
        """The caller is about to get back the buffer of these: what is left of them is copied."""
        with self._lock:
            batches = (*self._closed, self._batch)
            for sequence in sequences:
                for batch in batches:
                    entry = batch.others.get(sequence)
                    if entry is not None and entry.data is not None and not entry.command_block:
                        del batch.others[sequence]
                        batch.size -= len(entry.data)
                        self.size -= len(entry.data)
                        self._copy(batch, sequence, entry.first, entry.data)

    def _copy(self, batch: _Batch, sequence: int, first: int, data: memoryview) -> None:
        """Under the lock. A copy that meets the end of a chunk becomes two entries."""
        length = len(data)
        batch.size += length
        self.size += length
        at = batch.at
        while True:
            if at == CHUNK:
                batch.chunks.append(
                    self._spare.pop() if self._spare else memoryview(bytearray(CHUNK))
                )
                at = 0
            chunk = batch.chunks[-1]
            stop = at + length
            if stop <= CHUNK:
                chunk[at:stop] = data
                batch.writes.append((sequence, first, chunk, at, stop))
                batch.at = stop
                return
            part = CHUNK - at
            chunk[at:] = data[:part]
            batch.writes.append((sequence, first, chunk, at, CHUNK))
            first += part // self._block
            data = data[part:]
            length -= part
            at = CHUNK

    # -- flushes ----------------------------------------------------------------------------------

    def begin_flush(self) -> Batches:
        """What has ended so far is about to be flushed; for ``flushed``, should that succeed."""
        with self._lock:
            if self._batch.size:
                self._closed.append(self._batch)
                self._batch = _Batch()
            return list(self._closed)

    def flushed(self, batches: Batches) -> None:
        """All of this is on stable storage: drop it."""
        with self._lock:
            for batch in batches:
                if batch in self._closed:
                    self._closed.remove(batch)
                    self.size -= batch.size
                    if not self._replays:
                        self._spare += batch.chunks

    def full(self, length: int) -> bool:
        """A write of so many bytes has to flush first (``claim_flush``). What is in flight is taken
        for writes like it. Never so before there are ``half`` as many bytes."""
        room = self.limit - min(len(self._open) * length, self.half)
        return self.size > 0 and self.size + length > room and length <= self.limit

    def claim_flush(self, waiter: Waiter) -> bool:
        """True: the caller is the one to flush; then ``end_flush``. False: somebody is at it, and
        ``waiter``, whose ``pending`` was raised by one, hears of the end."""
        with self._lock:
            if self._flushing:
                waiter.pending += 1
                self._waiters.append(waiter)
                return False
            self._flushing = True
            return True

    def end_flush(self) -> None:
        with self._lock:
            self._flushing = False
            waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter.task_done()

    # -- replay -----------------------------------------------------------------------------------

    def begin_replay(self) -> list[Entry]:
        """All that has to be sent again, in order. Its data stays as it is until ``end_replay``.

        Left out is what is queued or in flight, which will be sent anyway, and what has failed.
        The connection that it was sent on must have ended.
        """
        with self._lock:
            self._replays += 1
            # Those whose command has ended, but whose caller, who may go on at any time and change
            # the buffer, has not said so yet.
            found = [
                _owned(Entry(*raw))
                for slot, raw in self._open.copy().items()
                if slot.state < QUEUED and _good(slot)
            ]
            for batch in (*self._closed, self._batch):
                found += map(_owned, batch.others.values())
                found += [
                    Entry(sequence, first, first + (stop - at) // self._block - 1, chunk[at:stop])
                    for sequence, first, chunk, at, stop in batch.writes
                ]
        found.sort(key=lambda entry: entry[:2])
        return found

    def end_replay(self) -> None:
        with self._lock:
            self._replays -= 1


def _owned(entry: Entry) -> Entry:
    """With data of its own, whatever the caller does to its buffer."""
    if entry.data is None or entry.command_block:
        return entry
    return entry._replace(data=memoryview(bytes(entry.data)))
