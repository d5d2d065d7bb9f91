"""The clocks, and how a test makes time up."""

from __future__ import annotations

import time

import pytest

from iserblk.loop import clock
from tests.support import clocks


def test_each_is_the_one_that_it_says() -> None:
    for read, machine in (
        (clock.monotonic, time.monotonic),
        (clock.since_epoch, time.time),
        (clock.since_boot, lambda: time.clock_gettime(time.CLOCK_BOOTTIME)),
        (clock.processor_seconds, time.process_time),
    ):
        before = machine()
        between = read()
        assert before <= between <= machine()
    for read_ns, machine_ns in (
        (clock.nanoseconds, time.monotonic_ns),
        (clock.since_epoch_ns, time.time_ns),
    ):
        before_ns = machine_ns()
        between_ns = read_ns()
        assert before_ns <= between_ns <= machine_ns()


def test_time_that_is_made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    made = clocks.Clock()
    clocks.give(monkeypatch, made)
    assert clock.monotonic() == clocks.START
    made.now += 3600.0
    assert clock.monotonic() == clocks.START + 3600.0
    monkeypatch.setattr(clock.sources, "nanoseconds", lambda: 7)
    assert clock.nanoseconds() == 7
