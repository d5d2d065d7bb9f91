"""Copies of what was written, one behind another, and an index of them: what a journal does once
for each write, and therefore compiled.

setup.py makes ``iserblk.disk.durability._copies`` of this file, with the C types of
``_copies.pxd``. Both have one behaviour; ``journal`` takes the compiled one where it is there. It
saves more than what a loop shows: between two writes a thread does so much else that the
interpreter finds nothing of this in the processor's caches.

Chunks are used again: fresh memory costs a page fault every 4 KiB. What the copies are is packed in
an index beside them: an object for each would be memory that is in no processor's cache, and work
for the garbage collector.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

from iserblk.initiator.session.slots import NO_BYTES, TaskSlot

CHUNK = 1 << 20  # bytes; a multiple of every block size
_RECORD = 4  # numbers: sequence, first block, where the copy begins in the chunk, and where it ends


class Change:
    """What the command of ``slot`` changes, for the journal. ``sequence``: its number; 0: nothing
    that is kept. ``data``: a view of the caller's buffer, if any. ``command_block`` b"": a WRITE of
    that data."""

    __slots__ = ("command_block", "data", "sequence", "slot")

    def __init__(self, slot: TaskSlot) -> None:
        self.slot = slot
        self.sequence = 0
        self.data = NO_BYTES
        self.command_block = b""


class Chunk:
    """``data``: CHUNK bytes, of which the first ``at`` are copies. ``index``: records, of 64-bit
    numbers, of which the first ``used`` numbers count. ``block``: bytes."""

    __slots__ = ("at", "data", "index", "used")

    def __init__(self, block: int) -> None:
        self.data = memoryview(bytearray(CHUNK))
        # No copy is shorter than a block.
        self.index = memoryview(bytearray(CHUNK // block * _RECORD * 8)).cast("Q")
        self.used = 0
        self.at = 0

    def take_in(self, other: Chunk) -> bool:
        """Copies all that ``other`` has behind what is here. False, and nothing is done: there is
        no room. Neither is being filled."""
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
        """(sequence, first block, its part of ``data``), in the order in which they came."""
        numbers = self.index[: self.used].tolist()
        for at in range(0, self.used, _RECORD):
            yield numbers[at], numbers[at + 1], self.data[numbers[at + 2] : numbers[at + 3]]


class Copies:
    """Fills one chunk after another, of blocks of ``block`` bytes. ``next_chunk`` is called for a
    chunk to fill.

    It is a lock, too: everything but ``keep``, which takes it itself, wants ``with copies:`` around
    it, and ``next_chunk`` is called under it.

    ``size``: bytes that are kept; a caller that drops copies, or keeps something elsewhere,
    counts too.
    """

    def __init__(self, block: int, next_chunk: Callable[[], Chunk]) -> None:
        self.size = 0
        self._block = block
        self._lock = threading.Lock()
        self._next_chunk = next_chunk
        self._chunk: Chunk | None = None
        # Of that chunk; the end of one when there is none.
        self._data = memoryview(bytearray())
        self._index = self._data.cast("Q")
        self._used = 0
        self._at = CHUNK

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def keep(self, change: Change) -> None:
        """The WRITE of ``change.slot`` has succeeded: copies its data, and notes ``sequence`` and
        the slot's ``first`` with it. Then there is no change any more. To be called before the
        slot, or the buffer, is given back."""
        with self._lock:
            data = change.data
            length = len(data)
            if length <= CHUNK - self._at:  # nearly always
                self._append(change.sequence, change.slot.first, data, length)
            else:
                self.copy(change.sequence, change.slot.first, data)
            self.size += length
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
            chunk.at = self._at
            self._chunk = None
            self._at = CHUNK
