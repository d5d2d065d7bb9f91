from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from iserblk.cli.histogram import Histogram

VALUES = st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=50)


def filled(values: list[int]) -> Histogram:
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    return histogram


@given(VALUES, st.floats(0.1, 100))
def test_percentiles_are_right_to_3_percent(values: list[int], percent: float) -> None:
    exact = sorted(values)[max(math.ceil(len(values) * percent / 100), 1) - 1]
    found = filled(values).percentile(percent)
    assert exact <= found <= exact * (1 + 1 / 32)


@given(VALUES, VALUES)
def test_merging_is_adding(one: list[int], other: list[int]) -> None:
    merged, together = filled(one), filled(one + other)
    merged.merge(filled(other))
    merged.merge(Histogram())
    for name in ("count", "total", "minimum", "maximum", "mean"):
        assert getattr(merged, name) == getattr(together, name)
    assert [merged.percentile(p) for p in range(1, 101)] == [
        together.percentile(p) for p in range(1, 101)
    ]


def test_empty() -> None:
    assert (Histogram().percentile(50), Histogram().mean) == (0, 0)


@given(VALUES)
def test_buckets_have_every_value(values: list[int]) -> None:
    found = list(filled(values).buckets())
    assert [(low, high) for low, high, _ in found] == sorted({each[:2] for each in found})
    for low, high, count in found:
        assert count == sum(low <= value <= high for value in values) > 0
    assert sum(count for _, _, count in found) == len(values)
