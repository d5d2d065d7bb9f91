"""How tasks of trio wait. Time is trio's own here, and made up."""

from __future__ import annotations

import socket

import pytest
import trio
from trio.testing import MockClock

from iserblk.loop.tasks import sleep, sleep_until, task_time, until_readable, until_writable


async def test_sleeping(autojump_clock: MockClock) -> None:
    began = task_time()
    await sleep(100.0)
    assert task_time() == began + 100.0
    await sleep_until(began + 300.0)
    assert task_time() == began + 300.0
    with trio.move_on_after(50.0) as scope:
        assert scope.deadline == task_time() + 50.0
        await sleep(1000.0)
    assert scope.cancelled_caught


async def test_descriptors() -> None:
    here, there = socket.socketpair()
    with here, there:
        await until_writable(here)
        here.send(b"x")
        await until_readable(there)
        await until_readable(there.fileno())
        there.recv(1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.lowlevel.wait_readable, there)
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(trio.BusyResourceError):
                await until_readable(there)
            here.send(b"x")
