"""Copies of what was written, one behind another, and an index of them: what a journal does once
for each write, and therefore compiled.

setup.py makes ``iserblk.disk._copies`` of this file, with the C types of ``_copies.pxd``. Both have
one behaviour; ``journal`` takes the compiled one where it is there. It saves more than what a loop
shows: between two writes a thread does so much else that the interpreter finds nothing of this in
the processor's caches.

Chunks are used again: fresh memory costs a page fault every 4 KiB. What the copies are is packed in
an index beside them: an object for each would be memory that is in no processor's cache, and work
for the garbage collector.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

from iserblk.initiator.task import NO_BYTES, TaskSlot

CHUNK = 1 << 20  # bytes; a multiple of every block size
_RECORD = 4  # numbers: sequence, first block, where the copy begins in the chunk, and where it ends


class Chunk:
    """``data``: CHUNK bytes, of copies. ``index``: records, of 64-bit numbers, of which the first
    ``used`` numbers count. ``block``: bytes."""

    __slots__ = ("data", "index", "used")

    def __init__(self, block: int) -> None:
        self.data = memoryview(bytearray(CHUNK))
        # No copy is shorter than a block.
        self.index = memoryview(bytearray(CHUNK // block * _RECORD * 8)).cast("Q")
        self.used = 0

    def entries(self) -> Iterator[tuple[int, int, memoryview]]:
        """(sequence, first block, its part of ``data``), in the order in which they came."""
        numbers = self.index[: self.used].tolist()
        for at in range(0, self.used, _RECORD):
            yield numbers[at], numbers[at + 1], self.data[numbers[at + 2] : numbers[at + 3]]


class Copies:
    """Fills one chunk after another, of blocks of ``block`` bytes. ``lock``: to be held around
    everything but ``keep``, which takes it. ``next_chunk`` is called under it: a chunk to fill.

    ``size``: bytes that are kept; whoever drops copies, or keeps something elsewhere, counts too.
    """

    def __init__(self, block: int, lock: threading.Lock, next_chunk: Callable[[], Chunk]) -> None:
        self.size = 0
        self._block = block
        self._take = lock.acquire
        self._give = lock.release
        self._next_chunk = next_chunk
        self._chunk: Chunk | None = None
        # Of that chunk; the end of one when there is none.
        self._data = memoryview(bytearray())
        self._index = self._data.cast("Q")
        self._used = 0
        self._at = CHUNK

    def keep(self, slot: TaskSlot) -> None:
        """The WRITE of ``slot`` has succeeded: copies ``change_data``, and notes ``change`` and
        ``first`` with it. Then the slot has no change any more. To be called before the slot, or
        the buffer, is given back."""
        data = slot.change_data
        length = len(data)
        self._take()
        try:
            if length <= CHUNK - self._at:  # nearly always
                self._append(slot.change, slot.first, data, length)
            else:
                self.copy(slot.change, slot.first, data)
            self.size += length
            slot.change = 0
            slot.change_data = NO_BYTES
        finally:
            self._give()

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
        self._used = used + _RECORD  # last: whoever is interrupted here has kept nothing

    def copy(self, sequence: int, first: int, data: memoryview) -> None:
        """Copies, and does not count. A copy that meets the end of a chunk becomes two."""
        left = len(data)
        while left:
            if self._at == CHUNK:
                self.close()
                chunk = self._chunk = self._next_chunk()
                self._data = chunk.data
                self._index = chunk.index
                self._used = 0
                self._at = 0
            part = min(left, CHUNK - self._at)
            self._append(sequence, first, data[:part], part)
            first += part // self._block
            data = data[part:]
            left -= part

    def close(self) -> None:
        """What was kept so far is in chunks that nothing is added to any more."""
        chunk = self._chunk
        if chunk is not None:
            chunk.used = self._used
            self._chunk = None
            self._at = CHUNK
