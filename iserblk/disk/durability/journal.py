"""The journal of one LUN in memory: acknowledged changes that are not on stable storage yet, which
are sent again when the target has lost its cache.

While the command of a change runs, the journal has a view of the caller's buffer. It copies the
data before the caller gets the buffer back, or keeps the buffer, and the caller has another one
(``take_over``). ``MemoryJournal.changes`` says what a command changes, at the index of its slot.

Order: changes are numbered when they are submitted, and sent again in the order of these numbers. A
change that was acknowledged before another was submitted has the lower number. Of two changes in
flight at the same time either may win, at first and when they are sent again.

Flushes: the changes that have ended since the last flush began are a **batch**. A flush closes the
present batch. When it succeeds, it drops that batch and all before it; when it fails, they stay for
the next flush. Closed batches that the same flushes cover are merged into one, with chunks that are
more than half full. So the memory is at most twice the size of the data, plus a chunk for each
flush under way, however many flushes fail. Memory that has become free is kept for data to come:
chunks, and buffers by their size. Where one kind is lacking, the other becomes it, or is given up
for it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import count
from typing import Final

from iserblk.commands.command import NO_BYTES, QUEUED, Command
from iserblk.disk.durability.block_sets import Blocks
from iserblk.disk.durability.copies import CHUNK, Change, Chunk
from iserblk.disk.durability.seam import Entry
from iserblk.scsi import opcodes

try:
    from iserblk.disk.durability._copies import Copies
except ImportError:
    from iserblk.disk.durability.copies import Copies

_UNMAP: Final = bytes([opcodes.UNMAP])
SMALL: Final = 128  # bytes that an entry without data counts as


class _Batch:
    """Changes that have ended. ``chunks``: copies. ``others``: the changes without a copy:
    commands, and pieces of an operation that still has its buffer. ``buffers``: those that were
    taken over, each with the change whose data is in it. ``size``: bytes that all of it counts as,
    once the batch is closed. ``flushes``: how many flushes that cover it are under way; a flush of
    a younger batch covers all older ones as well. ``lost``: blocks (first, last) that were given
    up, by the sequence of the change, which is in this batch or in an older one."""

    __slots__ = ("buffers", "chunks", "flushes", "lost", "others", "size")

    def __init__(self) -> None:
        self.lost: dict[int, list[tuple[int, int]]] = {}
        self.others: dict[int, Entry] = {}
        self.buffers: list[tuple[Entry, bytearray]] = []
        self.chunks: list[Chunk] = []
        self.size = 0
        self.flushes = 0


Batches = list[_Batch]


def _good(change: Change) -> bool:
    """Whether a command that has ended succeeded. (tgtd reports a residual for each UNMAP.)"""
    slot = change.slot
    if slot.error or slot.status or slot.response:
        return False
    return not slot.residual or change.command_block[:1] == _UNMAP


def _size(entry: Entry) -> int:
    """Bytes that the entry counts as."""
    return SMALL if entry.command_block or entry.data is None else len(entry.data)


class MemoryJournal:
    """Implements Journal for the changes that the slots ``tasks`` make.

    What is in flight counts for at most half of ``limit``: else with a small limit each write would
    have to flush. ``changes``: by the index of their slot."""

    def __init__(self, limit: int, block: int, tasks: Sequence[Command]) -> None:
        self.limit = limit
        self._half = limit // 2
        self._at_once = len(tasks) + 1  # writes: those in flight and the next
        self._numbers = count(1)
        self._block = block
        self.changes = [Change(slot) for slot in tasks]
        self.copies = Copies(block, self._next_chunk)
        self._keep = self.copies.keep
        self._batch = _Batch()
        self._closed: list[_Batch] = []  # a flush of these is under way, or has failed
        self._spare: list[Chunk] = []
        self._spare_buffers: dict[int, list[bytearray]] = {}  # by size
        self._spared = 0  # bytes of these
        self._replays = 0  # under way: they read chunks

    def _running(self) -> list[Change]:
        """Changes that are submitted, or about to be, and not yet given back to their callers."""
        return [change for change in self.changes if change.sequence]

    def has(self, slot: Command) -> bool:
        return self.changes[slot.index].sequence != 0

    @property
    def size(self) -> int:
        return self.copies.size

    @property
    def active(self) -> bool:
        return self.size > 0 or bool(self._running())

    def newest(self, block: int) -> memoryview | None:
        """See the seam."""
        sequence = 0
        data: memoryview | None = None
        for batch in (*self._closed, self._batch):
            number, copy = self.copies.newest(batch.chunks, block)
            if number > sequence:
                sequence, data = number, copy
            for entry in (*batch.others.values(), *(each for each, _ in batch.buffers)):
                if entry.sequence > sequence and entry.first <= block <= entry.last:
                    sequence, data = entry.sequence, self._content(entry, block)
        lost = self._lost().get(sequence, ())
        return None if any(first <= block <= last for first, last in lost) else data

    def _content(self, entry: Entry, block: int) -> memoryview | None:
        if entry.command_block:
            unmapped = entry.command_block[:1] == _UNMAP
            return None if unmapped else memoryview(bytes(self._block))
        assert entry.data is not None
        at = (block - entry.first) * self._block
        return entry.data[at : at + self._block]

    # -- changes ----------------------------------------------------------------------------------

    def add(self, slot: Command, data: memoryview | None, command_block: bytes = b"") -> None:
        change = self.changes[slot.index]
        change.data = NO_BYTES if data is None else data
        change.command_block = command_block
        change.sequence = next(self._numbers)  # last: from now on it is looked at

    def keep(self, slot: Command) -> None:
        change = self.changes[slot.index]
        if change.sequence:
            self._keep(change)

    def ended(self, slot: Command, *, copy: bool = True) -> int:
        change = self.changes[slot.index]
        if not change.sequence:
            return 0
        good = _good(change)
        if good and copy and not change.command_block:
            self._keep(change)
            return 0
        entry = _entry(change)
        change.sequence = 0
        change.data = NO_BYTES
        change.command_block = b""
        if not good:
            return 0
        self._batch.others[entry.sequence] = entry
        self.copies.size += _size(entry)
        return entry.sequence

    def take_over(self, slot: Command, buffer: bytearray) -> bytearray | None:
        change = self.changes[slot.index]
        size = len(buffer)
        if not change.sequence or change.command_block or not _good(change):
            return None
        free = self._spare_buffers.get(size)
        if free:
            other = free.pop()
            self._spared -= size
        else:
            del self._spare[: -(-size // CHUNK)]
            try:
                other = bytearray(size)
            except MemoryError:
                return None
        self.copies.size += len(change.data)
        self._batch.buffers.append((_entry(change), buffer))
        change.sequence = 0
        change.data = NO_BYTES
        return other

    def settle(self, sequences: Iterable[int]) -> None:
        for sequence in sequences:
            for batch in (*self._closed, self._batch):
                entry = batch.others.get(sequence)
                if entry is None or entry.data is None or entry.command_block:
                    continue
                if batch is self._batch:
                    self.copies.copy(sequence, entry.first, entry.data)
                    del batch.others[sequence]
                else:  # its chunks are closed
                    batch.others[sequence] = _owned(entry)

    def forget(self, sequences: Iterable[int]) -> None:
        for sequence in sequences:
            for batch in (*self._closed, self._batch):
                entry = batch.others.pop(sequence, None)
                if entry is not None:
                    size = _size(entry)
                    self.copies.size -= size
                    if batch is not self._batch:
                        batch.size -= size

    def _next_chunk(self) -> Chunk:
        """A chunk to fill, of the present batch."""
        if self._spare:
            chunk = self._spare.pop()
        else:
            chunk = Chunk(self._block, self._spare_memory())
        chunk.used = chunk.at = 0
        self._batch.chunks.append(chunk)
        return chunk

    def _spare_memory(self) -> bytearray | None:
        """A spare buffer that is large enough for a chunk, and hardly larger. None: there is none,
        and no buffer is spare any more. The heap may keep what is freed: a chunk beside it would be
        memory for the same data once more."""
        for size, free in self._spare_buffers.items():
            if free and CHUNK <= size <= CHUNK + CHUNK // 4:
                self._spared -= size
                return free.pop()
        self._spare_buffers.clear()
        self._spared = 0
        return None

    # -- flushes ----------------------------------------------------------------------------------

    def begin_flush(self) -> Batches:
        """See the seam. Closes the present batch."""
        size = self.size - sum(batch.size for batch in self._closed)
        if size:
            self.copies.close()
            closed = self._batch
            closed.size = size
            self._closed.append(closed)
            self._batch = _Batch()
            if closed.lost:  # what has yet to be kept is not covered, whenever it will be
                running = {change.sequence for change in self._running()}
                left = {each: closed.lost[each] for each in running & closed.lost.keys()}
                _add_lost(self._batch.lost, left)
        for batch in self._closed:
            batch.flushes += 1
        self._merge()
        return list(self._closed)

    def flushed(self, covered: object) -> None:
        assert isinstance(covered, list)
        for batch in covered:
            if batch in self._closed:
                self._closed.remove(batch)
                self.copies.size -= batch.size
                self._spare_chunks(batch.chunks)
                for _, buffer in batch.buffers:
                    self._keep_buffer(buffer)

    def not_flushed(self, covered: object) -> None:
        assert isinstance(covered, list)
        for batch in covered:
            if batch in self._closed:  # else it was flushed, or merged into another batch
                batch.flushes -= 1
        self._merge()

    def _merge(self) -> None:
        """Merge closed batches that the same flushes cover. Such batches exist only where a flush
        has failed."""
        closed = self._closed
        at = 1
        while at < len(closed):
            older, younger = closed[at - 1], closed[at]
            if older.flushes != younger.flushes:
                at += 1
                continue
            del closed[at]
            older.others.update(younger.others)
            older.buffers += younger.buffers
            older.size += younger.size
            _add_lost(older.lost, younger.lost)
            for chunk in younger.chunks:
                if older.chunks and older.chunks[-1].take_in(chunk):
                    self._spare_chunks([chunk])
                else:
                    older.chunks.append(chunk)

    def _spare_chunks(self, chunks: list[Chunk]) -> None:
        """Keep chunks for later use, no more than the journal needs; none while a replay looks at
        them."""
        if not self._replays:
            self._spare += chunks
            del self._spare[self.limit // CHUNK + 2 :]

    def _keep_buffer(self, buffer: bytearray) -> None:
        """As ``_spare_chunks``, for a buffer that was taken over."""
        if self._replays:
            return
        size = len(buffer)
        most = self.limit + self.limit // 4  # buffers are larger than what is in them
        spare = self._spare_buffers
        if self._spared + size > most:  # perhaps of sizes that are not used any more
            same = spare.pop(size, [])
            spare.clear()
            spare[size] = same
            self._spared = size * len(same)
        if self._spared + size <= most:
            spare.setdefault(size, []).append(buffer)
            self._spared += size

    def has_room(self, length: int) -> bool:
        if self.copies.size + self._at_once * length <= self.limit:
            return True  # whatever is in flight
        return length <= self.limit and not self.full(length)

    def full(self, length: int) -> bool:
        """See the seam. Changes in flight are taken to be as large as it. Never true while the
        journal, with this write, holds no more than half of its limit."""
        after = self.size + length
        if after <= self.limit - min(len(self.changes) * length, self._half):
            return False  # whatever is in flight
        room = self.limit - min(len(self._running()) * length, self._half)
        return after > room and self.size > 0 and length <= self.limit

    # -- replay -----------------------------------------------------------------------------------

    def mark(self) -> int:
        return next(self._numbers)

    def begin_replay(self) -> list[Entry]:
        self._replays += 1
        self.copies.close()
        # Changes whose command has ended, but whose caller has not called ``ended`` yet. The
        # caller may do so at any time and then change the buffer: hence the copy.
        found = [
            _owned(_entry(change))
            for change in self._running()
            if change.slot.state < QUEUED and _good(change)
        ]
        for batch in (*self._closed, self._batch):
            found += map(_owned, batch.others.values())
            found += [entry for entry, _ in batch.buffers]
            for chunk in batch.chunks:
                for sequence, first, data in chunk.entries():
                    last = first + len(data) // self._block - 1
                    found.append(Entry(sequence, first, last, data))
        lost = self._lost()
        if lost:
            found = [part for entry in found for part in self._left(entry, lost)]
        found.sort(key=lambda entry: entry[:2])
        return found

    def end_replay(self) -> None:
        self._replays -= 1

    def give_up(self, entries: Iterable[Entry], blocks: Sequence[tuple[int, int]]) -> None:
        lasts = [last for _, last in blocks]
        for entry in entries:
            at = bisect_left(lasts, entry.first)
            while at < len(blocks) and blocks[at][0] <= entry.last:
                self._batch.lost.setdefault(entry.sequence, []).append(blocks[at])
                at += 1

    def _lost(self) -> dict[int, list[tuple[int, int]]]:
        """What was given up, by sequence."""
        found: dict[int, list[tuple[int, int]]] = {}
        for batch in (*self._closed, self._batch):
            _add_lost(found, batch.lost)
        return found

    def _left(self, entry: Entry, lost: dict[int, list[tuple[int, int]]]) -> list[Entry]:
        """What was not given up of a change."""
        blocks = lost.get(entry.sequence)
        if blocks is None:
            return [entry]
        parts: list[Entry] = []
        for first, last in Blocks(blocks).missing(entry.first, entry.last):
            data = entry.data
            if data is not None and not entry.command_block:
                data = data[
                    (first - entry.first) * self._block : (last + 1 - entry.first) * self._block
                ]
            parts.append(entry._replace(first=first, last=last, data=data))
        return parts


def _add_lost(to: dict[int, list[tuple[int, int]]], more: dict[int, list[tuple[int, int]]]) -> None:
    for sequence, blocks in more.items():
        to.setdefault(sequence, []).extend(blocks)


def _entry(change: Change) -> Entry:
    slot = change.slot
    data = change.data if change.data is not NO_BYTES else None
    return Entry(change.sequence, slot.first, slot.last, data, change.command_block)


def _owned(entry: Entry) -> Entry:
    """The entry with data of its own, which does not change with the caller's buffer."""
    if entry.data is None or entry.command_block:
        return entry
    return entry._replace(data=memoryview(bytes(entry.data)))
