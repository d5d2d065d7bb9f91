"""When a driver stays awake for the next message, and that it sleeps otherwise."""

from __future__ import annotations

import os

import pytest
import trio

from iserblk.waiting import busy_polling
from iserblk.waiting.busy_polling import ENOUGH, HITS, BusyPoll, Pace
from tests.support.sleeps import Sleeps
from tests.support.until import until


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(busy_polling, "monotonic", clock)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1})
    return clock


class Conversation:
    """A connection's life as Pace sees it."""

    def __init__(self, clock: Clock, limit_us: int = 300) -> None:
        self.clock = clock
        self.asked = 0
        self.answered = 0
        poll = BusyPoll(limit_us)
        poll.stay_awake = self._stay_awake  # type: ignore[method-assign]
        self.pace = Pace(poll)

    def _stay_awake(self, now: float) -> None:
        assert now == self.clock.now
        self.asked += 1

    def commands(self, count: int, gap_us: float, at_once: int = 1) -> None:
        for _ in range(count):
            self.pace.rest(self.answered)
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


def test_never_when_told_so(clock: Clock) -> None:
    talk = Conversation(clock, limit_us=0)
    talk.commands(100, gap_us=0)
    assert talk.asked == 0


def test_never_on_one_processor(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {3})
    talk = Conversation(clock)
    talk.commands(100, gap_us=100)
    assert talk.asked == 0


async def test_the_loop_turns_until_the_limit_and_then_sleeps(clock: Clock) -> None:
    sleeps = Sleeps()
    poll = BusyPoll(50_000)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(poll.run)
        await trio.testing.wait_all_tasks_blocked()
        for _ in range(2):  # it parks, and can be asked again
            before = sleeps.looked
            trio.lowlevel.add_instrument(sleeps)
            poll.stay_awake(clock.now)
            sleeps.slept = 0
            with trio.fail_after(30):
                await until(lambda: sleeps.looked >= before + 10)  # noqa: B023 (called here only)
                assert sleeps.slept == 0
                clock.now += 0.051
                await until(lambda: sleeps.slept > 0)
            trio.lowlevel.remove_instrument(sleeps)
        nursery.cancel_scope.cancel()
