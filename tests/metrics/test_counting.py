"""Counters that threads share, and lose nothing of."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import pytest

from iserblk.metrics.counting import (
    BYTES,
    ERRORS,
    HISTOGRAM,
    NANOSECONDS,
    OPERATIONS,
    READ,
    WRITE,
    LunMetrics,
    index_of,
)


@pytest.fixture
def restless() -> Iterator[None]:
    """Python switches between threads as often as it can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def in_threads(number: int, work: threading.Barrier | None, metrics: LunMetrics) -> None:
    def count() -> None:
        if work is not None:
            work.wait()
        for _ in range(2000):
            row = metrics.of_this_thread.rows[READ]
            row[3] += 1
            row[BYTES] += 4096

    threads = [threading.Thread(target=count) for _ in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_no_count_is_lost(restless: None) -> None:
    metrics = LunMetrics()
    in_threads(16, threading.Barrier(16), metrics)
    total = metrics.total()
    assert total[READ][3] == 16 * 2000
    assert total[READ][BYTES] == 16 * 2000 * 4096
    assert not any(total[WRITE])


def test_counters_of_threads_that_ended_are_used_again() -> None:
    metrics = LunMetrics()
    for _ in range(50):
        in_threads(1, None, metrics)
    assert metrics.total()[READ][3] == 50 * 2000
    assert len(metrics._every) < 10  # who has been joined may have a moment to live


def test_every_thread_has_its_own() -> None:
    metrics = LunMetrics()
    in_threads(8, threading.Barrier(8), metrics)
    assert len(metrics._every) <= 8
    metrics.of_this_thread.rows[READ][3] += 1
    assert metrics.total()[READ][3] == 8 * 2000 + 1


def test_retries(restless: None) -> None:
    metrics = LunMetrics()

    def repeat() -> None:
        for _ in range(1000):
            metrics.retried()

    threads = [threading.Thread(target=repeat) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert metrics.retries == 8000


@pytest.mark.parametrize(
    ("nanoseconds", "index"),
    [
        (1, 0),
        (1000, 0),
        (1001, 1),
        (2000, 1),
        (2001, 2),
        (4000, 2),
        (4001, 3),
        (1_024_000, 10),
        (1_024_001, 11),
        (86_400 * 10**9, 37),
        (2**63, 54),
    ],
)
def test_a_bucket_ends_at_a_power_of_two(nanoseconds: int, index: int) -> None:
    assert index_of(nanoseconds) == index < HISTOGRAM


def test_a_clock_that_stood_still() -> None:
    assert 0 <= index_of(0) < HISTOGRAM


def test_a_row_holds_everything() -> None:
    total = LunMetrics().total()
    assert len(total) == len(OPERATIONS)
    assert {len(row) for row in total} == {max(BYTES, ERRORS, NANOSECONDS) + 1}
