"""The journal of one LUN: what was acknowledged and is not on stable storage yet, to be sent again
when the target has lost its cache.

A change (WRITE, UNMAP, WRITE SAME) is in it from before it is submitted until a flush covers it, or
until it has failed. While its command runs it is a view of the caller's buffer; a copy of that is
made before the caller gets the buffer back. So at no moment an acknowledged change is nowhere.

While it runs, ``Journal.changes`` says what it is, at the index of its slot, beside ``first`` and
``last`` of the slot.

Order: changes are numbered when they are submitted, and sent again by these numbers. One that was
acknowledged before another was submitted has the lower one. Of two at the same time either may win,
there as here.

Flushes: what has ended since the last flush began is a **batch**. A flush closes the present batch;
when it succeeds, it drops that one and all before it; when not, they stay, for the next. Batches
that the same flushes cover are one, with chunks that are more than half full: so what is kept costs
no more than twice its size and a chunk for each flush under way, however many flushes fail.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from typing import NamedTuple

from iserblk.disk.durability.copies import CHUNK, Change, Chunk
from iserblk.initiator.session.slots import NO_BYTES, QUEUED, TaskSlot, Waiter
from iserblk.scsi import opcodes

try:
    from iserblk.disk.durability._copies import Copies
except ImportError:
    from iserblk.disk.durability.copies import Copies

_UNMAP = bytes([opcodes.UNMAP])
SMALL = 128  # bytes that an entry without data counts as


class Entry(NamedTuple):
    """One change as it is to be sent again. ``command_block`` b"": a WRITE of ``data``."""

    sequence: int
    first: int  # block
    last: int
    data: memoryview | None
    command_block: bytes = b""


class _Batch:
    """Changes that have ended: copies, in ``chunks``, and ``others``, those without: commands, and
    pieces of an operation that still has its buffer.
    ``size``: bytes that all of it counts as, once it is closed. ``flushes``: how many that cover it
    are under way; those of a younger batch cover all older ones as well."""

    __slots__ = ("chunks", "flushes", "others", "size")

    def __init__(self) -> None:
        self.others: dict[int, Entry] = {}
        self.chunks: list[Chunk] = []
        self.size = 0
        self.flushes = 0


Batches = list[_Batch]


def _good(change: Change) -> bool:
    """A command that has ended succeeded. tgtd reports a residual for each UNMAP."""
    slot = change.slot
    if slot.error or slot.status or slot.response:
        return False
    return not slot.residual or change.command_block[:1] == _UNMAP


def _size(entry: Entry) -> int:
    """What it counts as."""
    return SMALL if entry.command_block or entry.data is None else len(entry.data)


class Journal:
    """Of one LUN, for the changes that the slots ``tasks`` make. Thread-safe; waits for nothing but
    its own short lock. ``limit``: bytes of copies, with what is in flight, from which on a write
    must flush first. Of what is in flight no more than half of it counts: else with a small
    limit each write would have to flush.

    ``at_once``: as many writes as there can be; while there is room for those in ``copies.size``
    nobody need ask ``full``. ``changes``: by the index of their slot. ``numbers``: for
    ``Change.sequence``.
    ``keep``: ``Copies.keep``, for a WRITE that was added and has succeeded.
    """

    def __init__(self, limit: int, block: int, tasks: list[TaskSlot]) -> None:
        self.limit = limit
        self._half = limit // 2
        self.at_once = len(tasks) + 1  # those in flight and the next
        self.numbers = count(1)
        self._block = block
        self.changes = [Change(slot) for slot in tasks]
        self.copies = Copies(block, self._next_chunk)  # and the lock of the journal
        self.keep = self.copies.keep
        self._batch = _Batch()
        self._closed: list[_Batch] = []  # a flush of them is under way, or has failed
        self._spare: list[Chunk] = []
        self._replays = 0  # under way: they look at chunks
        self._flushing = False  # by one who found the journal full
        self._waiters: list[Waiter] = []

    def _running(self) -> list[Change]:
        """Submitted, or about to be; not given back to their callers."""
        return [change for change in self.changes if change.sequence]

    def has(self, slot: TaskSlot) -> bool:
        """What the command of ``slot`` changes is here."""
        return self.changes[slot.index].sequence != 0

    @property
    def size(self) -> int:
        """Bytes that are kept."""
        return self.copies.size

    @property
    def active(self) -> bool:
        """Something is kept, or in flight."""
        return self.size > 0 or bool(self._running())

    # -- changes ----------------------------------------------------------------------------------

    def add(self, slot: TaskSlot, data: memoryview | None, command_block: bytes = b"") -> None:
        """``slot`` is about to be submitted, with ``first`` and ``last``: a WRITE of ``data``, or
        that command; then ``data`` must not change any more."""
        change = self.changes[slot.index]
        change.data = NO_BYTES if data is None else data
        change.command_block = command_block
        change.sequence = next(self.numbers)  # last: from now on it is looked at

    def ended(self, slot: TaskSlot, *, copy: bool = True) -> int:
        """The command of ``slot`` has ended, well or not; to be called before its slot is given
        back. ``copy`` False: the caller goes on owning the buffer, until ``settle`` of the number
        that is returned, which is 0 where nothing is kept."""
        change = self.changes[slot.index]
        if not change.sequence:
            return 0
        good = _good(change)
        if good and copy and not change.command_block:
            self.keep(change)
            return 0
        with self.copies:
            entry = _entry(change)
            change.sequence = 0
            change.data = NO_BYTES
            change.command_block = b""
            if not good:
                return 0
            self._batch.others[entry.sequence] = entry
            self.copies.size += _size(entry)
        return entry.sequence

    def settle(self, sequences: Iterable[int]) -> None:
        """The caller is about to get back the buffer of these: what is left of them is copied."""
        with self.copies:
            for sequence in sequences:
                for batch in (*self._closed, self._batch):
                    entry = batch.others.get(sequence)
                    if entry is None or entry.data is None or entry.command_block:
                        continue
                    if batch is self._batch:
                        del batch.others[sequence]
                        self.copies.copy(sequence, entry.first, entry.data)
                    else:  # its chunks are closed
                        batch.others[sequence] = _owned(entry)

    def forget(self, sequences: Iterable[int]) -> None:
        """In place of ``settle``: the operation has failed, and nothing of these is kept."""
        with self.copies:
            for sequence in sequences:
                for batch in (*self._closed, self._batch):
                    entry = batch.others.pop(sequence, None)
                    if entry is not None:
                        size = _size(entry)
                        self.copies.size -= size
                        if batch is not self._batch:
                            batch.size -= size

    def _next_chunk(self) -> Chunk:
        """Under the lock."""
        chunk = self._spare.pop() if self._spare else Chunk(self._block)
        chunk.used = chunk.at = 0
        self._batch.chunks.append(chunk)
        return chunk

    # -- flushes ----------------------------------------------------------------------------------

    def begin_flush(self) -> Batches:
        """What has ended so far is about to be flushed; for ``flushed``, should that succeed, or
        for ``not_flushed``."""
        with self.copies:
            size = self.size - sum(batch.size for batch in self._closed)
            if size:
                self.copies.close()
                self._batch.size = size
                self._closed.append(self._batch)
                self._batch = _Batch()
            for batch in self._closed:
                batch.flushes += 1
            self._merge()
            return list(self._closed)

    def flushed(self, batches: Batches) -> None:
        """All of this is on stable storage: drop it."""
        with self.copies:
            for batch in batches:
                if batch in self._closed:
                    self._closed.remove(batch)
                    self.copies.size -= batch.size
                    self._spare_chunks(batch.chunks)

    def not_flushed(self, batches: Batches) -> None:
        """The flush has failed: all of this stays."""
        with self.copies:
            for batch in batches:
                if batch in self._closed:  # else it was flushed, or merged with one that is here
                    batch.flushes -= 1
            self._merge()

    def _merge(self) -> None:
        """Makes one of closed batches that the same flushes cover. There are such only where a
        flush has failed."""
        closed = self._closed
        at = 1
        while at < len(closed):
            older, younger = closed[at - 1], closed[at]
            if older.flushes != younger.flushes:
                at += 1
                continue
            del closed[at]
            older.others.update(younger.others)
            older.size += younger.size
            for chunk in younger.chunks:
                if older.chunks and older.chunks[-1].take_in(chunk):
                    self._spare_chunks([chunk])
                else:
                    older.chunks.append(chunk)

    def _spare_chunks(self, chunks: list[Chunk]) -> None:
        """To be used again, unless a replay looks at them; no more than the journal needs."""
        if not self._replays:
            self._spare += chunks
            del self._spare[self.limit // CHUNK + 2 :]

    def full(self, length: int) -> bool:
        """A write of so many bytes has to flush first (``claim_flush``). What is in flight is taken
        for writes like it. Never so before there are half as many bytes."""
        after = self.size + length
        if after <= self.limit - min(len(self.changes) * length, self._half):
            return False  # whatever is in flight
        room = self.limit - min(len(self._running()) * length, self._half)
        return after > room and self.size > 0 and length <= self.limit

    def claim_flush(self, waiter: Waiter) -> bool:
        """True: the caller is the one to flush; then ``end_flush``. False: another one is at it,
        and ``waiter``, whose ``pending`` was raised by one, hears of the end."""
        with self.copies:
            if self._flushing:
                waiter.pending += 1
                self._waiters.append(waiter)
                return False
            self._flushing = True
            return True

    def end_flush(self) -> None:
        with self.copies:
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
        with self.copies:
            self._replays += 1
            self.copies.close()
            # Those whose command has ended, but whose caller, who may go on at any time and change
            # the buffer, has not said so yet.
            found = [
                _owned(_entry(change))
                for change in self._running()
                if change.slot.state < QUEUED and _good(change)
            ]
            for batch in (*self._closed, self._batch):
                found += map(_owned, batch.others.values())
                for chunk in batch.chunks:
                    for sequence, first, data in chunk.entries():
                        last = first + len(data) // self._block - 1
                        found.append(Entry(sequence, first, last, data))
        found.sort(key=lambda entry: entry[:2])
        return found

    def end_replay(self) -> None:
        with self.copies:
            self._replays -= 1


def _entry(change: Change) -> Entry:
    slot = change.slot
    data = change.data if change.data is not NO_BYTES else None
    return Entry(change.sequence, slot.first, slot.last, data, change.command_block)


def _owned(entry: Entry) -> Entry:
    """With data of its own, whatever the caller does to its buffer."""
    if entry.data is None or entry.command_block:
        return entry
    return entry._replace(data=memoryview(bytes(entry.data)))
