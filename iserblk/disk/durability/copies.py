"""The journal's copies of written data: one behind another in chunks, with an index.

The journal makes a copy for each write, so this module is compiled. setup.py makes
``iserblk.disk.durability._copies`` of this file, with the C types of ``_copies.pxd``. Both forms
behave the same; ``journal`` takes the compiled one where it exists. That saves more than a
benchmark loop shows: between two writes a thread does so much else that the interpreter finds
nothing of this module in the processor's caches.

Chunks are used again: fresh memory costs a page fault every 4 KiB. Each chunk has a packed index of
its copies. An object for each copy would be memory that is in no processor's cache, and work for
the garbage collector.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator

from iserblk.commands.command import NO_BYTES, Command

CHUNK = 1 << 20  # bytes; a multiple of every block size
_RECORD = 4  # numbers: sequence, first block, where the copy begins in the chunk, where it ends


class Change:
    """What the command of ``slot`` changes, for the journal. ``sequence``: its number; 0: the slot
    has no change that is kept. ``data``: a view of the caller's buffer, if any. ``command_block``:
    its CDB; b"": a WRITE of ``data``."""

    __slots__ = ("command_block", "data", "sequence", "slot")

    def __init__(self, slot: Command) -> None:
        self.slot = slot
        self.sequence = 0
        self.data = NO_BYTES
        self.command_block = b""


class Chunk:
    """Memory for copies. ``data``: CHUNK bytes, of which the first ``at`` are copies. ``index``:
    records of 64-bit numbers, of which the first ``used`` numbers count. ``block``: bytes.
    ``memory``: at least CHUNK bytes, which belong to the chunk from now on; None: fresh ones."""

    __slots__ = ("at", "data", "index", "used")

    def __init__(self, block: int, memory: bytearray | None = None) -> None:
        # No copy is shorter than a block. Not from the heap, which would fill the index with zeros:
        # where the copies are large, most of its pages are never touched.
        self.index = _mapped(CHUNK // block * _RECORD * 8).cast("Q")
        self.data = _mapped(CHUNK) if memory is None else memoryview(memory)[:CHUNK]
        self.used = 0
        self.at = 0

    def take_in(self, other: Chunk) -> bool:
        """Append all copies of ``other``. False, with nothing done: there is no room. Neither chunk
        may be one that is being filled."""
        start, stop = self.at, self.at + other.at
        if stop > CHUNK:
            return False
        self.data[start:stop] = other.data[: other.at]
        used = self.used
        for at in range(0, other.used, _RECORD):
            self.index[used] = other.index[at]
            self.index[used + 1] = other.index[at + 1]
            self.index[used + 2] = other.index[at + 2] + start
            self.index[used + 3] = other.index[at + 3] + start
            used += _RECORD
        self.used = used
        self.at = stop
        return True

    def entries(self) -> Iterator[tuple[int, int, memoryview]]:
        """Yield (sequence, first block, its part of ``data``), in the order in which they were
        added."""
        numbers = self.index[: self.used].tolist()
        for at in range(0, self.used, _RECORD):
            yield numbers[at], numbers[at + 1], self.data[numbers[at + 2] : numbers[at + 3]]


def _mapped(size: int) -> memoryview:
    return memoryview(mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


class Copies:
    """Copies of written data, for blocks of ``block`` bytes. Fills one chunk after another, and
    calls ``next_chunk`` for each. A chunk that it gets stays empty when the next one cannot be had.

    ``size``: bytes that are kept. A caller that drops copies, or keeps something elsewhere,
    corrects it.
    """

    def __init__(self, block: int, next_chunk: Callable[[], Chunk]) -> None:
        self.size = 0
        self._block = block
        self._next_chunk = next_chunk
        self._chunk: Chunk | None = None
        # Those of that chunk; without a chunk, those of a full one.
        self._data = memoryview(bytearray())
        self._index = self._data.cast("Q")
        self._used = 0
        self._at = CHUNK

    def keep(self, change: Change) -> None:
        """Copy the data of ``change``, whose WRITE has succeeded, with its ``sequence`` and the
        slot's ``first``; then clear the change. Call it before the slot, or the buffer, is given
        back. Raises as ``copy``: the change is cleared, too, and not kept; so the write must not be
        acknowledged."""
        data = change.data
        length = len(data)
        # First: an interrupt may leave too much counted, but nothing that is not. What does not
        # count is not dropped by a flush, and would be sent again over what is durable.
        self.size += length
        try:
            if length <= CHUNK - self._at:  # nearly always
                self._append(change.sequence, change.slot.first, data, length)
            else:
                self.copy(change.sequence, change.slot.first, data)
        except (MemoryError, OSError):
            self.size -= length
            raise
        finally:
            change.sequence = 0
            change.data = NO_BYTES

    def _append(self, sequence: int, first: int, data: memoryview, length: int) -> None:
        at = self._at
        stop = at + length
        self._at = stop
        self._data[at:stop] = data
        used = self._used
        self._index[used] = sequence
        self._index[used + 1] = first
        self._index[used + 2] = at
        self._index[used + 3] = stop
        self._used = used + _RECORD  # last: an interrupt before it has kept nothing

    def copy(self, sequence: int, first: int, data: memoryview) -> None:
        """Copy ``data`` without counting it. A copy that meets the end of a chunk becomes two.
        Raises what ``next_chunk`` raises, before anything is copied: part of a write must not be
        sent again."""
        left = len(data)
        room = CHUNK - self._at
        fresh = []
        while room < left:
            fresh.append(self._next_chunk())
            room += CHUNK
        while left:
            if self._at == CHUNK:
                self.close()
                chunk = self._chunk = fresh.pop(0)
                self._data = chunk.data
                self._index = chunk.index
                self._used = 0
                self._at = 0
            part = min(left, CHUNK - self._at)
            self._append(sequence, first, data[:part], part)
            first += part // self._block
            data = data[part:]
            left -= part

    def newest(self, chunks: list[Chunk], block: int) -> tuple[int, memoryview]:
        """The newest copy of one block in ``chunks``: its sequence, and its data in the chunk.
        (0, b""): there is none."""
        newest = 0
        found = NO_BYTES
        for chunk in chunks:
            index = chunk.index
            used = self._used if chunk is self._chunk else chunk.used
            at = 0
            while at < used:  # in the compiled form much quicker than ``for``
                first = index[at + 1]
                if index[at] > newest and first <= block:
                    start = index[at + 2] + (block - first) * self._block
                    if start < index[at + 3]:
                        newest = index[at]
                        found = chunk.data[start : start + self._block]
                at += _RECORD
        return newest, found

    def close(self) -> None:
        """Close the chunk that is being filled: nothing is added to it any more."""
        chunk = self._chunk
        if chunk is not None:
            chunk.used = self._used
            chunk.at = self._at
            self._chunk = None
            self._at = CHUNK
