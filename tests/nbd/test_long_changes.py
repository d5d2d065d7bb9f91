"""Which changes wait for a long one."""

from __future__ import annotations

import threading

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from iserblk.loop.strands import open_strands
from iserblk.nbd.long_changes import LongChanges, LongChangesOfThreads


@pytest.mark.parametrize(
    ("offset", "length", "concerned"),
    [(0, 10, False), (9, 1, False), (9, 2, True), (15, 1, True), (0, 100, True), (20, 5, False)],
)
def test_ranges(offset: int, length: int, concerned: bool) -> None:
    long = LongChanges()
    with long.one(10, 10):
        assert long.under_way
        assert long.concern(offset, length) is concerned
    assert not long.under_way and not long.concern(offset, length)


async def test_one_that_waits_for_two() -> None:
    long, ended = LongChanges(), []

    async def change() -> None:
        await long.let_end(5, 10)
        ended.append(True)

    async with open_strands() as group:
        with long.one(0, 10):
            with long.one(10, 10):
                group.start_soon(change)
                await wait_all_tasks_blocked()
            await wait_all_tasks_blocked()
            assert ended == [] and long.under_way
        await wait_all_tasks_blocked()
        assert ended == [True]


async def test_one_that_is_closed_while_it_waits() -> None:
    long = LongChanges()
    with long.one(0, 10):
        with trio.CancelScope() as scope:
            async with open_strands() as group:
                group.start_soon(long.let_end, 0, 1)
                await wait_all_tasks_blocked()
                scope.cancel()
                await trio.sleep_forever()
        assert scope.cancelled_caught


def test_threads_wait_for_each_other() -> None:
    long, ended = LongChangesOfThreads(), []
    begun = threading.Event()

    def change() -> None:
        begun.set()
        with long.one(15, 10):
            ended.append("long")

    def write(offset: int) -> None:
        long.let_end(offset, 1)
        ended.append("short")

    with long.one(10, 10):
        assert long.under_way
        threads = [threading.Thread(target=change), threading.Thread(target=write, args=[10])]
        for each in threads:
            each.start()
        begun.wait()
        write(9)  # at once
        assert ended == ["short"]
    for each in threads:
        each.join()
    assert sorted(ended) == ["long", "short", "short"] and not long.under_way
