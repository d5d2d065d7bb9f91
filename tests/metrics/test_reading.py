"""Means, percentiles, differences."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iserblk.metrics.counting import (
    BYTES,
    ERRORS,
    HISTOGRAM,
    NANOSECONDS,
    LunMetrics,
    index_of,
)
from iserblk.metrics.reading import BOUNDS_US, OperationReading, of_row, together


def reading_of(*microseconds: float) -> OperationReading:
    row = LunMetrics().total()[0]
    for each in microseconds:
        nanoseconds = round(each * 1000)
        row[index_of(nanoseconds)] += 1
        row[NANOSECONDS] += nanoseconds
    return of_row(row)


def test_nothing_yet() -> None:
    nothing = OperationReading()
    assert nothing.requests == 0
    assert nothing.mean_us is None
    assert nothing.percentile_us(99) is None
    assert reading_of() == nothing


def test_sums_of_a_row() -> None:
    row = LunMetrics().total()[0]
    row[5], row[BYTES], row[ERRORS], row[NANOSECONDS] = 3, 12288, 1, 90_000
    reading = of_row(row)
    assert (reading.requests, reading.bytes, reading.errors) == (3, 12288, 1)
    assert reading.mean_us == pytest.approx(30)


def test_every_index_is_told() -> None:
    row = LunMetrics().total()[0]
    for index in range(HISTOGRAM):
        row[index] = 1
    reading = of_row(row)
    assert reading.requests == HISTOGRAM
    assert reading.buckets[0] == 4  # up to 1, 2, 4, 8 µs
    assert set(reading.buckets[1:-1]) == {1}
    assert len(reading.histogram()) == len(BOUNDS_US) + 1
    assert reading.histogram()[1] == (16, 1)
    assert reading.histogram()[-1][0] is None


@given(st.lists(st.floats(1, 60e6), min_size=1), st.floats(0.1, 100))
def test_a_percentile_is_in_its_bucket(times: list[float], percent: float) -> None:
    times.sort()
    exact = times[max(0, -int(-len(times) * percent // 100) - 1)]
    found = reading_of(*times).percentile_us(percent)
    assert found is not None
    bound = next(bound for bound in BOUNDS_US if exact <= bound + 0.001)
    assert (bound // 2 if bound > BOUNDS_US[0] else 0) <= found + 0.01 <= bound + 0.02


def test_what_took_longer_than_the_last_bound() -> None:
    assert reading_of(1e9).percentile_us(99) == BOUNDS_US[-1]


def test_since() -> None:
    before, added = reading_of(10, 100), reading_of(20, 1000)
    now = together([before, added])
    assert now.since(before).buckets == added.buckets
    assert now.since(before).seconds == pytest.approx(added.seconds)
    assert now.since(now).requests == 0


def test_since_a_time_before_it_began_anew() -> None:
    assert reading_of(10).since(reading_of(10, 10)) == reading_of(10)
