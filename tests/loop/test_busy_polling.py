"""When a driver stays awake for the next message, and when it sleeps."""

from __future__ import annotations

import os

import pytest

from iserblk.loop.busy_polling import CROWDED_S, ENOUGH, HITS, ROOM, SOBER_S, Turns, pace_of
from tests.support import clocks


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    clocks.give(monkeypatch, clock)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1})
    return clock


class Conversation:
    """A connection's life as Pace sees it."""

    def __init__(self, clock: Clock, limit_us: int = 300) -> None:
        self.clock = clock
        self.asked = 0
        self.answered = 0
        self.awake = 0.0
        self.limit = limit_us * 1e-6
        pace = pace_of(limit_us)
        assert pace is not None
        self.pace = pace

    def commands(self, count: int, gap_us: float, at_once: int = 1) -> None:
        for _ in range(count):
            if self.pace.rest(self.answered):
                self.awake = self.pace.until - self.clock.now
                assert 0 < self.awake <= 1.001 * self.limit
                self.asked += 1
            else:
                assert not self.pace.until
            self.clock.now += gap_us * 1e-6
            assert self.pace.work() == self.clock.now
            self.answered += at_once


def test_single_commands_in_a_row_keep_it_awake(clock: Clock) -> None:
    talk = Conversation(clock)
    talk.commands(HITS, gap_us=100)
    assert talk.asked == 0
    talk.commands(5, gap_us=100)
    assert talk.asked == 5


def test_one_long_gap_is_forgiven_two_are_not(clock: Clock) -> None:
    talk = Conversation(clock)
    talk.commands(ENOUGH + 5, gap_us=100)
    talk.commands(1, gap_us=5000)
    before = talk.asked
    talk.commands(2, gap_us=100)
    assert talk.asked == before + 2
    talk.commands(3, gap_us=5000)
    before = talk.asked
    talk.commands(2, gap_us=100)
    assert talk.asked == before


def test_many_commands_at_once_let_it_sleep(clock: Clock) -> None:
    talk = Conversation(clock)
    talk.commands(100, gap_us=20, at_once=8)
    assert talk.asked == 0


def test_slow_clients_let_it_sleep(clock: Clock) -> None:
    talk = Conversation(clock)
    talk.commands(100, gap_us=301)
    assert talk.asked == 0


def test_it_stays_awake_in_proportion_to_what_messages_usually_take(clock: Clock) -> None:
    talk = Conversation(clock, limit_us=1000)
    talk.commands(100, gap_us=50)
    assert talk.awake == pytest.approx(ROOM * 50e-6, rel=0.01)
    talk.commands(100, gap_us=150)
    assert talk.awake == pytest.approx(ROOM * 150e-6, rel=0.01)
    talk.commands(100, gap_us=900)
    assert talk.awake == pytest.approx(1000e-6)
    talk.commands(2, gap_us=5000)  # these are no messages of the conversation
    talk.commands(1, gap_us=900)
    assert talk.awake == pytest.approx(1000e-6)


@pytest.mark.usefixtures("clock")
def test_never_when_told_so() -> None:
    assert pace_of(0) is None
    assert pace_of(1) is not None


def test_never_on_one_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {3})
    assert pace_of(300) is None


def test_a_thread_that_waits_long_for_the_processor_sleeps_for_a_while(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = Turns()
    away = 0.9 * CROWDED_S

    def others_run() -> None:
        clock.now += away

    monkeypatch.setattr(os, "sched_yield", others_run)
    for _ in range(50):
        assert not turns.crowded(turns.give_way())
    away = 1.1 * CROWDED_S
    now = turns.give_way()
    assert now == clock.now
    assert turns.crowded(now)
    assert turns.crowded(now + 0.9 * SOBER_S)
    assert not turns.crowded(now + 1.1 * SOBER_S)
