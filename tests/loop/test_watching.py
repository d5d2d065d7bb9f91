"""Messages that are handled in place of trio's sleep; what trio waits for is not forgotten."""

from __future__ import annotations

import gc
import os
import socket
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from iserblk.loop import watching
from iserblk.loop.busy_polling import CROWDED_S
from iserblk.loop.watching import MOST, Attention, epoll_with
from tests.support import clocks
from tests.support.sleeps import Sleeps
from tests.support.until import until, until_blocking


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but what is tested ends the waiting in trio's place."""
    monkeypatch.setattr(watching, "NEAR_S", 3600.0)


@pytest.fixture
def yields(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that others take whenever they may; grows by an entry each time. No other time goes
    by: on a busy machine it would count as theirs."""
    found = [0.0]
    began = time.monotonic()
    away = 0.0

    def others_run() -> None:
        nonlocal away
        away += found[0]
        found.append(0.0)

    monkeypatch.setattr(os, "sched_yield", others_run)
    clocks.give(monkeypatch, lambda: began + away)
    return found


class Line:
    """A socket with a task that waits for it, and a watch. ``then``: what happens with a byte that
    has been received. ``by_call``: bytes that the task has not received itself."""

    def __init__(self, then: Callable[[Line], None] = lambda _line: None) -> None:
        self.here, self.there = socket.socketpair()
        self.here.setblocking(False)
        self.received = self.by_call = 0
        self.takes = True
        self.closed = False
        self.awake = 0.0
        self._then = then
        self.watch = Attention()

    async def run(self) -> None:
        while True:
            self.attend()
            try:
                await trio.lowlevel.wait_readable(self.here)
            except trio.ClosedResourceError:
                return
            self._receive()

    def attend(self) -> None:
        self.watch.attend(self.here.fileno(), self.awake, self._ready)

    def _ready(self) -> bool:
        if not self.takes:
            return False
        self.by_call += 1
        self._receive()
        if self.closed:
            return False
        self.attend()
        return True

    def _receive(self) -> None:
        try:
            self.received += len(self.here.recv(1))
        except BlockingIOError:
            return
        self._then(self)

    def close(self) -> None:
        self.watch.close()
        self.closed = True
        trio.lowlevel.notify_closing(self.here)
        self.here.close()
        self.there.close()


async def attended() -> Line:
    """A line whose loop has an attendant that knows trio's descriptor."""
    line = Line()
    while line.watch.fd < 0:
        line.attend()
        await trio.lowlevel.checkpoint()
    return line


@asynccontextmanager
async def served(*lines: Line) -> AsyncIterator[None]:
    """With a task for each, and an attendant that is at work."""
    first = await attended()
    first.close()
    async with trio.open_nursery() as nursery:
        for line in lines:
            nursery.start_soon(line.run)
        await trio.testing.wait_all_tasks_blocked()
        with trio.fail_after(30):
            yield
        nursery.cancel_scope.cancel()
    for line in lines:
        if not line.closed:
            line.close()


def send_another(line: Line) -> None:
    line.there.send(b"x")


def send_soon(line: Line) -> threading.Thread:
    """From another thread, when this one sleeps, or a little too early."""
    thread = threading.Thread(target=send_another, args=(line,))
    thread.start()
    return thread


async def test_messages_are_taken_without_trio() -> None:
    lasts = 500

    def another(line: Line) -> None:
        if line.received < lasts:
            send_another(line)
        else:
            done.set()

    done = trio.Event()
    line = Line(another)
    sleeps = Sleeps()
    async with served(line):
        trio.lowlevel.add_instrument(sleeps)
        send_another(line)
        await done.wait()
        trio.lowlevel.remove_instrument(sleeps)
    assert line.received == lasts
    assert line.by_call > lasts * 0.9  # trio may find a message first, in its own turns
    assert sleeps.slept + sleeps.looked < lasts / 10


async def test_what_trio_waits_for_ends_the_waiting() -> None:
    """A descriptor, a thread, and a deadline."""
    line, other = Line(), Line()
    async with served(line):
        thread = send_soon(other)
        await trio.lowlevel.wait_readable(other.here)
        thread.join()
        assert await trio.to_thread.run_sync(lambda: 5) == 5
        await trio.sleep(0.001)
        with trio.move_on_after(0.001):
            await trio.sleep_forever()
        assert line.watch.fd >= 0
    other.close()


async def test_a_deadline_that_a_message_has_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "MOST", 1)
    scope = trio.CancelScope()
    line = Line(lambda _line: setattr(scope, "deadline", trio.current_time() + 0.001))
    async with served(line):
        send_another(line)
        with scope:
            await trio.sleep_forever()
    assert (line.received, line.by_call) == (1, 1)


async def test_a_task_that_a_message_has_woken_runs() -> None:
    event = trio.Event()
    line = Line(lambda _line: event.set())
    async with served(line):
        send_another(line)
        await event.wait()
    assert line.by_call == 1


async def test_messages_without_end_let_other_tasks_go_on() -> None:
    line = Line(send_another)
    async with served(line):
        send_another(line)
        await until(lambda: line.received > 5 * MOST)
    assert line.by_call > 4 * MOST


async def test_what_is_not_taken_is_left_to_the_task() -> None:
    line = Line()
    line.takes = False
    async with served(line):
        send_another(line)
        await until(lambda: line.received == 1)
        assert line.by_call == 0
        line.takes = True
        send_another(line)
        await until(lambda: line.received == 2)


async def test_it_stays_awake_and_others_go_first(yields: list[float]) -> None:
    come = trio.Event()
    line = Line(lambda _line: come.set())
    line.awake = time.monotonic() + 2 * 3600
    async with served(line):

        def send_late() -> None:
            until_blocking(lambda: len(yields) > 100)
            send_another(line)

        thread = threading.Thread(target=send_late)
        thread.start()
        await come.wait()
        thread.join()
    assert line.by_call == 1


async def test_it_sleeps_where_others_need_the_processor(yields: list[float]) -> None:
    come = trio.Event()
    line = Line(lambda _line: come.set())
    line.awake = time.monotonic() + 2 * 3600
    yields[0] = 1.1 * CROWDED_S
    async with served(line):
        thread = send_soon(line)
        await come.wait()
        thread.join()
    assert len(yields) <= 2  # it has tried once, unless the message was there before
    assert line.by_call == 1


async def test_when_no_message_comes_trio_sleeps_again(monkeypatch: pytest.MonkeyPatch) -> None:
    line = Line()
    async with served(line):
        monkeypatch.setattr(watching, "NEAR_S", 0.001)
        line.attend()
        await until(lambda: line.watch.fd < 0)
        send_another(line)
        await until(lambda: line.received == 1)
        assert line.by_call == 0
        monkeypatch.setattr(watching, "NEAR_S", 3600.0)
        line.attend()
        await trio.testing.wait_all_tasks_blocked()
        send_another(line)
        await until(lambda: line.received == 2)


async def test_nothing_is_kept_of_an_owner_that_has_closed() -> None:
    line = await attended()
    gone = weakref.ref(line)
    line.close()
    gc.disable()
    try:
        del line
        assert gone() is None
    finally:
        gc.enable()


async def test_a_descriptor_that_another_one_has_closed_is_not_touched() -> None:
    lines: list[Line] = []

    def close_the_other(line: Line) -> None:
        for each in lines:
            if each is not line and not each.closed:
                each.close()

    lines += [Line(close_the_other), Line(close_the_other)]
    async with served(*lines):
        for line in lines:
            line.there.send(b"x")
        await until(lambda: any(line.received for line in lines))
    assert sum(line.received for line in lines) == 1
    assert sum(line.closed for line in lines) == 2


async def test_another_descriptor_of_the_same_connection() -> None:
    """After a reconnect."""
    line = await attended()
    before = line.here
    line.here, there = socket.socketpair()
    line.here.setblocking(False)
    line.attend()
    before.close()
    there.send(b"x")
    with trio.fail_after(30):
        await until(lambda: line.received == 1)
    assert line.by_call == 1
    line.close()
    there.close()


@pytest.mark.plain("replaces a function")
async def test_everything_is_left_to_trio_where_its_descriptor_is_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watching, "epoll_with", lambda _fd: -1)
    line = Line()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(line.run)
        await trio.testing.wait_all_tasks_blocked()
        line.attend()
        send_another(line)
        await until(lambda: line.received == 1)
        nursery.cancel_scope.cancel()
    assert (line.watch.fd, line.by_call) == (-1, 0)
    line.close()


async def test_everything_is_left_to_trio_where_no_descriptor_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none_left() -> None:
        raise OSError(24, "no descriptor is left")

    line = await attended()
    other = Line()
    line.close()
    monkeypatch.setattr("select.epoll", none_left)
    other.attend()
    assert other.watch.fd == -1
    other.close()


def test_no_epoll_has_a_descriptor_that_is_waited_for_nowhere() -> None:
    with socket.socket() as sock:
        assert epoll_with(sock.fileno()) == -1


async def test_messages_that_bring_a_lot_of_work_let_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before there have been MOST of them."""
    now = time.monotonic()

    def work(line: Line) -> None:
        nonlocal now
        now += watching.TURN_S / 4
        send_another(line)

    monkeypatch.setattr(watching, "MOST", 1 << 40)
    clocks.give(monkeypatch, lambda: now)
    line = Line(work)
    async with served(line):
        send_another(line)
        await until(lambda: line.by_call > 20)
