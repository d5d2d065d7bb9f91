"""Sets of blocks, as what is sent again or compared needs them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable


class Blocks:
    """A set of blocks, as ranges (first, last) that are in order and do not touch."""

    def __init__(self, ranges: Iterable[tuple[int, int]]) -> None:
        self._firsts: list[int] = []
        self._lasts: list[int] = []
        for first, last in ranges:
            self.add(first, last)

    @property
    def ranges(self) -> list[tuple[int, int]]:
        return list(zip(self._firsts, self._lasts, strict=True))

    def add(self, first: int, last: int) -> list[tuple[int, int]]:
        """Add a range; returns those parts of it that were not in the set."""
        fresh = self.missing(first, last)
        low, high = self._meeting(first, last)
        if low < high:
            first = min(first, self._firsts[low])
            last = max(last, self._lasts[high - 1])
        self._firsts[low:high] = [first]
        self._lasts[low:high] = [last]
        return fresh

    def missing(self, first: int, last: int) -> list[tuple[int, int]]:
        """The parts of a range that are not in the set, in order."""
        low, high = self._meeting(first, last)
        fresh: list[tuple[int, int]] = []
        at = first
        for there, until in zip(self._firsts[low:high], self._lasts[low:high], strict=True):
            if at < there:
                fresh.append((at, there - 1))
            at = max(at, until + 1)
        if at <= last:
            fresh.append((at, last))
        return fresh

    def _meeting(self, first: int, last: int) -> tuple[int, int]:
        """Which ranges have blocks of this one: from, and up to but not with."""
        return bisect_left(self._lasts, first), bisect_right(self._firsts, last)
