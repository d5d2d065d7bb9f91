"""A task that naps, and what wakes it."""

from __future__ import annotations

import trio
from trio.testing import wait_all_tasks_blocked

from iserblk.loop.nap import Nap


async def test_it_sleeps_until_it_is_woken() -> None:
    nap, woken = Nap(), []

    async def sleep() -> None:
        nap.wake()  # nobody sleeps: it is not kept
        await nap.sleep()
        woken.append(True)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(sleep)
        await wait_all_tasks_blocked()
        assert woken == []
        nap.wake()
    assert woken == [True]


async def test_a_wake_in_the_turn_in_which_it_is_cancelled_is_lost() -> None:
    """So what sleeps here looks again for what has happened, however its sleep has ended."""
    nap, ended = Nap(), []

    async def sleep() -> None:
        try:
            await nap.sleep()
        except trio.Cancelled:
            ended.append("cancelled")
            raise

    async with trio.open_nursery() as nursery:
        nursery.start_soon(sleep)
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
        nap.wake()
    assert ended == ["cancelled"]
