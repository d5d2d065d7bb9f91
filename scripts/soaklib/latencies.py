"""Latencies in buckets of 9 %, which can be added up and sent as JSON."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

_PER_OCTAVE = 8


class Latencies:
    def __init__(self, counts: Mapping[str, int] | None = None) -> None:
        self.counts = Counter(counts or {})

    def add(self, seconds: float) -> None:
        microseconds = max(1.0, seconds * 1e6)
        self.counts[str(math.ceil(math.log2(microseconds) * _PER_OCTAVE))] += 1

    def merge(self, other: Latencies) -> None:
        self.counts += other.counts

    @property
    def count(self) -> int:
        return self.counts.total()

    def percentile(self, percent: float) -> float:
        """Milliseconds that so many of all do not exceed (or by 9 % at most); 0 if there are
        none."""
        wanted, seen = self.count * percent / 100, 0
        for bucket, count in sorted((int(key), count) for key, count in self.counts.items()):
            seen += count
            if seen >= wanted:
                return float(2 ** (bucket / _PER_OCTAVE)) / 1000
        return 0.0
