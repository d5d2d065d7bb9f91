"""When a driver stays awake for the next message, what it does meanwhile, and that it sleeps
otherwise."""

from __future__ import annotations

import gc
import os
import socket
import weakref
from collections.abc import Callable

import pytest
import trio
import trio.testing

from iserblk.waiting import busy_polling
from iserblk.waiting.busy_polling import CROWDED_S, ENOUGH, HITS, SOBER_S, Pace, Turns, Watch
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
        self.limit = limit_us * 1e-6
        self.pace = Pace(limit_us)

    def commands(self, count: int, gap_us: float, at_once: int = 1) -> None:
        for _ in range(count):
            if self.pace.rest(self.answered):
                assert self.pace.until == self.clock.now + self.limit
                self.asked += 1
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


class Line:
    """A watched socket. ``ready``: what happens with a byte that has been received."""

    def __init__(self, ready: Callable[[Line], None] = lambda _line: None) -> None:
        self.here, self.there = socket.socketpair()
        self.here.setblocking(False)
        self.received = 0
        self.calls = 0
        self._then = ready
        self.watch = Watch()

    def _ready(self) -> None:
        self.calls += 1
        self.received += len(self.here.recv(1))
        self._then(self)

    def stay_awake(self, until_s: float) -> None:
        self.watch.stay_awake(self.here.fileno(), until_s, self._ready)

    def close(self) -> None:
        self.watch.close()
        self.here.close()
        self.there.close()


async def test_the_loop_turns_until_the_limit_and_then_sleeps(clock: Clock) -> None:
    line = Line()
    for _ in range(2):  # it parks, and can be asked again
        sleeps = Sleeps()
        line.stay_awake(clock.now + 0.05)
        trio.lowlevel.add_instrument(sleeps)
        with trio.fail_after(30):
            await until(lambda: sleeps.looked >= 10)  # noqa: B023 (called here only)
            assert sleeps.slept == 0
            clock.now += 0.051
            await until(lambda: sleeps.slept > 0)  # noqa: B023 (called here only)
        trio.lowlevel.remove_instrument(sleeps)
    line.close()


async def test_nothing_is_kept_of_an_owner_that_has_closed(clock: Clock) -> None:
    line = Line()
    gone = weakref.ref(line)
    line.stay_awake(clock.now + 0.05)
    line.close()
    gc.disable()
    try:
        del line
        assert gone() is None
    finally:
        gc.enable()


async def test_it_sleeps_where_others_need_the_processor(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = Line()

    def others_run() -> None:
        clock.now += 1.1 * CROWDED_S

    monkeypatch.setattr(os, "sched_yield", others_run)
    line.stay_awake(clock.now + 3600)
    await trio.testing.wait_all_tasks_blocked()  # else a task would be ready to run for ever
    line.stay_awake(clock.now + 3600)
    await trio.testing.wait_all_tasks_blocked()
    clock.now += 2 * SOBER_S
    line.there.send(b"x")
    line.stay_awake(clock.now + 3600)
    with trio.fail_after(30):
        await until(lambda: line.received == 1)
    line.close()


async def test_what_comes_is_taken_at_once_and_other_tasks_go_on(clock: Clock) -> None:
    """Messages back and forth, none of which a task of trio has waited for."""

    def send_another(line: Line) -> None:
        line.there.send(b"x")

    lines = [Line(send_another), Line()]
    with trio.fail_after(30):
        for line in lines:
            line.there.send(b"x")
            line.stay_awake(clock.now + 3600)
        await until(lambda: lines[0].received > 100)
        await until(lambda: lines[1].received == 1)
        assert lines[1].calls == 1
    for line in lines:
        line.close()


async def test_what_comes_when_it_sleeps_is_left_to_trio(clock: Clock) -> None:
    line = Line()
    line.stay_awake(clock.now + 0.05)
    clock.now += 0.051
    await trio.testing.wait_all_tasks_blocked()
    line.there.send(b"x")
    await trio.lowlevel.wait_readable(line.here)
    other = Line()
    other.there.send(b"x")
    other.stay_awake(clock.now + 3600)  # the first one asks for nothing
    with trio.fail_after(30):
        await until(lambda: other.received == 1)
    assert line.calls == 0
    line.close()
    other.close()


async def test_a_descriptor_that_another_one_has_closed_is_not_touched(clock: Clock) -> None:
    lines: list[Line] = []

    def close_the_other(line: Line) -> None:
        for each in lines:
            if each is not line:
                each.close()

    lines += [Line(close_the_other), Line(close_the_other)]
    for line in lines:
        line.there.send(b"x")
        line.stay_awake(clock.now + 3600)
    with trio.fail_after(30):
        await until(lambda: any(line.received for line in lines))
        for _ in range(10):
            await trio.lowlevel.checkpoint()
    assert sum(line.calls for line in lines) == 1
    for line in lines:
        line.close()


async def test_another_descriptor_of_the_same_connection(clock: Clock) -> None:
    """After a reconnect."""
    line = Line()
    line.stay_awake(clock.now + 3600)
    before = line.here
    line.here, there = socket.socketpair()
    line.here.setblocking(False)
    line.stay_awake(clock.now + 3600)
    before.close()
    there.send(b"x")
    with trio.fail_after(30):
        await until(lambda: line.received == 1)
    line.close()
    there.close()
