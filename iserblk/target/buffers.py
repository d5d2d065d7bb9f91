"""Data buffers of a target connection: reused, and bounded together."""

from __future__ import annotations

_SMALLEST = 12  # 4 KiB: what a block layer asks for most
_KEPT_BYTES = 16 << 20  # of free buffers


class BufferPool:
    """Hands out memoryviews of exact length over reused memory. Not thread-safe.

    ``used``: bytes handed out and not given back. The contents are what the last user left: who
    sends a buffer must have filled it.
    """

    def __init__(self) -> None:
        self._free: list[list[memoryview]] = [[] for _ in range(40)]
        self._kept = 0
        self.used = 0

    def take(self, length: int) -> memoryview:
        """A writable memoryview of ``length`` bytes (at least 1)."""
        order = max(_SMALLEST, (length - 1).bit_length())
        size = 1 << order
        self.used += size
        free = self._free[order]
        if free:
            self._kept -= size
            whole = free.pop()
        else:
            whole = memoryview(bytearray(size))
        return whole if length == size else whole[:length]

    def give(self, buffer: memoryview) -> None:
        """Take back what ``take`` gave; nobody uses it any more."""
        whole = memoryview(buffer.obj)
        size = len(whole)
        self.used -= size
        if self._kept + size <= _KEPT_BYTES:
            self._kept += size
            self._free[size.bit_length() - 1].append(whole)

    def grow(self, buffer: memoryview | None, filled: int, length: int) -> memoryview:
        """A buffer of ``length`` bytes in place of ``buffer``, whose first ``filled`` are kept."""
        larger = self.take(length)
        if buffer is not None:
            larger[:filled] = buffer[:filled]
            self.give(buffer)
        return larger
