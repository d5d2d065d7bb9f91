"""A histogram of latencies: bounded memory, a few hundred nanoseconds for each value added."""

from __future__ import annotations

from collections.abc import Iterator

_BITS = 5  # values are kept to one part in 2 ** _BITS
_BUCKETS = (64 - _BITS) << _BITS


class Histogram:
    """Counts of nanoseconds (0 to 2 ** 63), in buckets of 3 % width."""

    __slots__ = ("_counts", "count", "maximum", "minimum", "total")

    def __init__(self) -> None:
        self._counts = [0] * _BUCKETS
        self.count = 0
        self.total = 0
        self.minimum = 0
        self.maximum = 0

    def add(self, value: int) -> None:
        shift = value.bit_length() - _BITS - 1
        shift = max(shift, 0)
        # value >> shift are the top bits of value. Where shift is not 0, their highest bit is
        # always set, and moves the index on by one group of buckets.
        self._counts[(shift << _BITS) + (value >> shift)] += 1
        self.total += value
        self.maximum = max(self.maximum, value)
        if value < self.minimum or not self.count:
            self.minimum = value
        self.count += 1

    def merge(self, other: Histogram) -> None:
        """Add all values of ``other``."""
        if not other.count:
            return
        self._counts = [a + b for a, b in zip(self._counts, other._counts, strict=True)]
        self.minimum = min(self.minimum, other.minimum) if self.count else other.minimum
        self.maximum = max(self.maximum, other.maximum)
        self.total += other.total
        self.count += other.count

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    def percentile(self, percent: float) -> int:
        """A value that ``percent`` % of all values do not exceed; 0 when there are no values."""
        wanted = self.count * percent / 100
        seen = 0
        for _, high, count in self.buckets():
            seen += count
            if seen >= wanted:
                return min(high, self.maximum)
        return 0

    def buckets(self) -> Iterator[tuple[int, int, int]]:
        """Lowest value, highest value and count of each bucket with values, ascending."""
        for index, count in enumerate(self._counts):
            if count:
                shift = max((index >> _BITS) - 1, 0)
                top = index - (shift << _BITS)
                yield top << shift, ((top + 1) << shift) - 1, count
