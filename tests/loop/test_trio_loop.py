"""The loop inside a user's: it has neither task nor descriptor while it has nothing to do. (What it
does else: tests/contract/test_loops.py.)"""

from __future__ import annotations

import socket

import pytest
import trio
from trio.testing import MockClock

from iserblk.loop.here import loop_here
from tests.support import clocks
from tests.support.descriptors import descriptors, descriptors_to_begin_with
from tests.support.until import until


def living() -> int:
    return trio.lowlevel.current_statistics().tasks_living


async def test_none_is_left() -> None:
    """Neither task nor descriptor, once the last descriptor is removed; then it begins anew."""
    here, there = socket.socketpair()
    here.setblocking(False)
    with here, there:
        before = (descriptors_to_begin_with(), living())
        called: list[bytes] = []
        for number in range(3):
            watch = loop_here().watch(here.fileno(), lambda: called.append(here.recv(9)))
            loop_here().call_soon(lambda: None)
            there.sendall(b"x")
            await until(lambda number=number: len(called) > number)  # type: ignore[misc]
            watch.close()
            assert descriptors() == before[0]
            if number == 1:
                await until(lambda: living() == before[1])


async def test_what_is_to_be_called_soon_is_called_though_nothing_is_watched() -> None:
    before = living()
    called = trio.Event()
    loop_here().call_soon(called.set)
    await called.wait()
    await until(lambda: living() == before)


async def test_a_watch_that_is_closed_leaves_what_is_to_be_called_soon() -> None:
    """The function that closes the last watch wants another turn."""
    here, there = socket.socketpair()
    with here, there:
        called = trio.Event()

        def ready() -> None:
            loop_here().call_soon(called.set)
            watch.close()

        watch = loop_here().watch(here.fileno(), ready)
        there.sendall(b"x")
        await called.wait()


async def test_its_timers_go_by_the_clock_that_iserblk_reads(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the one that is sooner is not kept waiting by the one that was there before it."""
    clocks.give(monkeypatch, autojump_clock.current_time)
    loop = loop_here()
    before = living()
    called: list[float] = []
    ended = trio.Event()
    began = loop.now()
    loop.call_at(began + 1000.0, ended.set)
    await trio.testing.wait_all_tasks_blocked()
    loop.call_at(began + 10.0, lambda: called.append(loop.now() - began))
    loop.call_at(began + 500.0, lambda: called.append(loop.now() - began)).cancel()
    await ended.wait()
    assert called == [pytest.approx(10.0)]
    assert loop.now() == pytest.approx(began + 1000.0)
    await until(lambda: living() == before)
