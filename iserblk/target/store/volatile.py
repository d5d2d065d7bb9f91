"""A volatile write cache in front of a store, to test what happens when a disk loses its power.

Data that was written, punched or zeroed stays in memory until a flush, until a durable write of
the same bytes, or until the cache is full. If the process is killed, that data is lost, as it is
in a disk whose power fails.

The cache is a set of extents that never overlap. A new extent cuts what it covers out of the older
extents, so the order in which they are written back does not matter.
"""

from __future__ import annotations

import threading
from bisect import bisect_right, insort
from typing import Final

from iserblk.target.store.store import Extent, OnLoss, Store, no_loss

_DATA: Final = 0
_ZERO: Final = 1
_PUNCH: Final = 2
_OVERHEAD: Final = 512  # bytes of memory of an extent besides its data: small ones count, too


class _Cached:
    """One extent, bytes ``start`` to ``stop``. ``kind``: _DATA, _ZERO or _PUNCH. ``data``: the
    bytes for _DATA, else empty. ``age``: larger for newer extents."""

    __slots__ = ("age", "data", "kind", "start", "stop")

    def __init__(self, start: int, stop: int, kind: int, data: bytearray, age: int) -> None:
        self.start = start
        self.stop = stop
        self.kind = kind
        self.data = data
        self.age = age

    def part(self, start: int, stop: int) -> _Cached:
        data = self.data[start - self.start : stop - self.start] if self.data else self.data
        return _Cached(start, stop, self.kind, data, self.age)

    @property
    def cost(self) -> int:
        return _OVERHEAD + len(self.data)


class VolatileStore:
    """Implements Store over another store, which it owns. ``capacity``: bytes of memory for data
    and bookkeeping."""

    def __init__(self, store: Store, capacity: int) -> None:
        self.size = store.size
        self.used = 0
        self.on_loss: OnLoss = no_loss
        store.on_loss = self._lost
        self._store = store
        self._capacity = capacity
        self._mutex = threading.Lock()
        self._starts: list[int] = []
        self._cached: dict[int, _Cached] = {}  # by start
        self._clock = 0

    # -- the set of extents (all under the mutex) --------------------------------------------------

    def _overlapping(self, start: int, stop: int) -> list[_Cached]:
        """The cached extents that overlap the range, in ascending order."""
        starts = self._starts
        at = max(0, bisect_right(starts, start) - 1)
        found = []
        while at < len(starts) and starts[at] < stop:
            cached = self._cached[starts[at]]
            if cached.stop > start:
                found.append(cached)
            at += 1
        return found

    def _add(self, cached: _Cached) -> None:
        insort(self._starts, cached.start)
        self._cached[cached.start] = cached
        self.used += cached.cost

    def _remove(self, cached: _Cached) -> None:
        del self._starts[bisect_right(self._starts, cached.start) - 1]
        del self._cached[cached.start]
        self.used -= cached.cost

    def _cut(self, start: int, stop: int) -> None:
        """Remove the range from the cache."""
        for cached in self._overlapping(start, stop):
            self._remove(cached)
            if cached.start < start:
                self._add(cached.part(cached.start, start))
            if cached.stop > stop:
                self._add(cached.part(stop, cached.stop))

    def _put(self, start: int, stop: int, kind: int, data: bytearray) -> None:
        self._clock += 1
        cached = _Cached(start, stop, kind, data, self._clock)
        # Make room before cutting: if writing back fails, the older extents are still complete.
        if self.used + cached.cost > self._capacity:
            self._make_room(cached.cost)
        self._cut(start, stop)
        self._add(cached)

    def _make_room(self, cost: int) -> None:
        """Write back the oldest extents, until ``cost`` bytes and an eighth of the capacity are
        free. The extra room is there because each call sorts all extents."""
        goal = self._capacity - self._capacity // 8 - cost
        for cached in sorted(self._cached.values(), key=lambda each: each.age):
            if self.used <= goal:
                break
            self._write_back(cached)

    def _write_back(self, cached: _Cached) -> None:
        """Write an extent to the store, then remove it from the cache."""
        length = cached.stop - cached.start
        if cached.kind == _DATA:
            self._store.write(memoryview(cached.data), cached.start, False, False)
        elif cached.kind == _ZERO:
            self._store.zero(cached.start, length)
        else:
            self._store.punch(cached.start, length)
        self._remove(cached)

    def _lost(self, error: OSError) -> None:
        self.on_loss(error)

    # -- Store -------------------------------------------------------------------------------------

    def read_into(self, buffer: memoryview, offset: int, nowait: bool) -> bool:
        # One lock over both steps: between them an extent could move from the cache to the store.
        if not self._mutex.acquire(blocking=not nowait):
            return False
        try:
            if not self._store.read_into(buffer, offset, nowait):
                return False
            end = offset + len(buffer)
            for cached in self._overlapping(offset, end):
                start, stop = max(offset, cached.start), min(end, cached.stop)
                target = buffer[start - offset : stop - offset]
                if cached.kind == _DATA:
                    target[:] = cached.data[start - cached.start : stop - cached.start]
                else:
                    target[:] = bytes(stop - start)
            return True
        finally:
            self._mutex.release()

    def write(self, data: memoryview, offset: int, durable: bool, nowait: bool) -> bool:
        if not self._mutex.acquire(blocking=not nowait):
            return False
        try:
            if durable:
                # First the store, then the cache: if the store fails, the older bytes remain here.
                self._store.write(data, offset, True, False)
                self._cut(offset, offset + len(data))
            elif nowait and self.used + _OVERHEAD + len(data) > self._capacity:
                return False  # others have to be written back first
            else:
                self._write_cached(data, offset)
            return True
        finally:
            self._mutex.release()

    def _write_cached(self, data: memoryview, offset: int) -> None:
        end = offset + len(data)
        covering = self._overlapping(offset, end)
        if len(covering) == 1:
            (cached,) = covering
            if cached.kind == _DATA and cached.start <= offset and end <= cached.stop:
                cached.data[offset - cached.start : end - cached.start] = data
                return
        self._put(offset, end, _DATA, bytearray(data))

    def flush(self) -> None:
        with self._mutex:
            for start in list(self._starts):
                self._write_back(self._cached[start])
        self._store.flush()

    def unmap(self, offset: int, length: int) -> None:
        self.punch(offset, length)

    def punch(self, offset: int, length: int) -> None:
        with self._mutex:
            self._put(offset, offset + length, _PUNCH, bytearray())

    def zero(self, offset: int, length: int) -> None:
        with self._mutex:
            self._put(offset, offset + length, _ZERO, bytearray())

    def extents(self, offset: int, length: int, limit: int) -> list[Extent]:
        with self._mutex:
            base = self._store.extents(offset, length, limit)
            end = base[-1][0] + base[-1][1] if base else offset
            above = [
                (max(offset, each.start), min(end, each.stop), each.kind == _DATA)
                for each in self._overlapping(offset, end)
            ]
        return _overlay(base, above)[:limit]

    def prefetch(self, offset: int, length: int) -> None:
        self._store.prefetch(offset, length)

    def usage(self) -> tuple[int, int] | None:
        """Without what is only in the cache."""
        return self._store.usage()

    def measure(self) -> int:
        self.size = self._store.measure()
        return self.size

    def close(self) -> None:
        """Flush, so that nothing is lost, and close the store. Raises OSError; the store is closed
        then, too."""
        try:
            self.flush()
        finally:
            self._store.close()


def _overlay(base: list[Extent], above: list[tuple[int, int, bool]]) -> list[Extent]:
    """``base`` with the (start, stop, is data) spans of ``above`` on top. Neighbours of the same
    kind are merged."""
    pieces: list[tuple[int, int, bool]] = []
    spans = iter(above)
    span = next(spans, None)
    for offset, length, is_data in base:
        position, end = offset, offset + length
        while position < end:
            while span is not None and span[1] <= position:
                span = next(spans, None)
            if span is None or span[0] >= end:
                pieces.append((position, end, is_data))
                position = end
            elif span[0] > position:
                pieces.append((position, span[0], is_data))
                position = span[0]
            else:
                stop = min(span[1], end)
                pieces.append((position, stop, span[2]))
                position = stop
    merged: list[Extent] = []
    for start, stop, is_data in pieces:
        if merged and merged[-1][2] == is_data:
            merged[-1] = (merged[-1][0], merged[-1][1] + stop - start, is_data)
        else:
            merged.append((start, stop - start, is_data))
    return merged
