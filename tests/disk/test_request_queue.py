"""A queue of requests on a disk that is made up: interrupts, and commands that have to be sent
again."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from iserblk.disk.request_queue import Request, RequestQueue, open_queue
from iserblk.disk.seam import Rest
from iserblk.errors import IserblkError

BLOCK = memoryview(bytearray(512))


class _Disk:
    """A DirectDisk on which SIGINT comes while the first command is begun, or ended. What is
    abandoned ends in the next turn."""

    def __init__(self, begin: bool) -> None:
        self._begin = begin
        self.begun: list[Request] = []
        self.ended = 0

    def begin_read(self, _buffer: memoryview, _offset: int, request: Request) -> object:
        if self._begin and not self.begun:
            signal.raise_signal(signal.SIGINT)
        request.pending = 1
        self.begun.append(request)
        return SimpleNamespace(request=request)

    def end_read(self, _slot: object) -> Rest | None:
        if not self._begin and not self.ended:
            signal.raise_signal(signal.SIGINT)
        self.ended += 1
        return None

    def check_here(self) -> None:
        pass

    def abandon(self, mine: Any) -> int:
        found = [request for request in self.begun if request.pending and mine(request)]
        for request in found:
            trio.lowlevel.current_trio_token().run_sync_soon(request.task_done)
        return len(found)


@pytest.mark.parametrize("begin", [True, False])
def test_it_is_raised_where_the_queue_waits(begin: bool) -> None:
    disk: Any = _Disk(begin)

    async def main() -> None:
        with pytest.raises(KeyboardInterrupt):
            async with open_queue(disk) as queue:
                for _ in range(3):
                    queue.read(BLOCK, 0)
                for request in disk.begun[: 0 if begin else 2]:
                    request.task_done()
                await queue.ended()
                await queue.ended()

    trio.run(main)
    assert len(disk.begun) == disk.ended == 3


async def test_an_answer_in_the_turn_in_which_the_wait_is_cancelled_is_settled() -> None:
    """Until then the request has its place in the session, and the lock of its blocks."""
    disk: Any = _Disk(begin=False)
    disk.ended = 1  # no SIGINT
    async with open_queue(disk) as queue:
        request = queue.read(BLOCK, 0)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(queue.ended)
            await wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
            request.task_done()
        await wait_all_tasks_blocked()
        assert disk.ended == 2
        assert await queue.ended() == [request]


async def test_an_answer_before_the_queue_waits_is_not_overlooked() -> None:
    """A command may end where it is begun: the session has failed, or its LUN is in doubt. Here
    that is in the turn in which ``ended`` had found nothing open."""
    disk: Any = _Disk(begin=False)
    disk.ended = 1  # no SIGINT
    for _ in range(30):  # in which order tasks have their turns is trio's choice
        async with open_queue(disk) as queue:
            with trio.fail_after(5):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(queue.ended)
                    nursery.start_soon(_begin_ended, queue)


async def _begin_ended(queue: Any) -> None:
    await trio.lowlevel.checkpoint()
    queue.read(BLOCK, 0).task_done()


class _Again(_Disk):
    """Each command has to be sent again."""

    def end_read(self, _slot: object) -> Rest:
        return Rest(0, 1.0)


async def test_what_would_have_to_be_sent_again_has_failed_when_the_queue_is_closed() -> None:
    disk: Any = _Again(begin=False)
    found: list[IserblkError | None] = []

    async def fetch(queue: RequestQueue) -> None:
        while queue.open:
            found.extend(request.error for request in await queue.ended())

    async with trio.open_nursery() as nursery:
        with trio.CancelScope() as scope:
            async with open_queue(disk) as queue:
                queue.read(BLOCK, 0)
                nursery.start_soon(fetch, queue)
                await wait_all_tasks_blocked()
                scope.cancel()
                await trio.sleep_forever()
    assert [str(error) for error in found] == [
        "the queue was closed before the request had been carried out"
    ]


async def test_a_write_with_fua_is_not_begun_as_any_other() -> None:
    """``begin_write`` knows no FUA."""
    written: list[tuple[int, bool]] = []

    class Disk(_Disk):
        def begin_write(self, _buffer: memoryview, offset: int, _request: Request) -> None:
            written.append((offset, False))

        async def write(
            self, _buffer: memoryview, offset: int, fua: bool = False, rest: Rest | None = None
        ) -> None:
            await trio.lowlevel.checkpoint()
            written.append((offset, fua))

    disk: Any = Disk(begin=False)
    async with open_queue(disk) as queue:
        request = queue.write(BLOCK, 512, fua=True)
        assert await queue.ended() == [request]
    assert request.error is None and written == [(512, True)]


async def test_what_takes_more_than_one_command_goes_on_with_the_rest() -> None:
    """With its deadline: it has no other one."""
    rests: list[Rest | None] = []

    class Disk(_Again):
        async def read_into(
            self, _buffer: memoryview, _offset: int, rest: Rest | None = None
        ) -> None:
            await trio.lowlevel.checkpoint()
            rests.append(rest)

    disk: Any = Disk(begin=False)
    async with open_queue(disk) as queue:
        request = queue.read(BLOCK, 0)
        request.task_done()
        assert await queue.ended() == [request]
    assert request.error is None and rests == [Rest(0, 1.0)]
