"""Requests of one task, which are begun by plain calls: their results, their errors, and what
becomes of them when the queue is closed."""

from __future__ import annotations

import gc
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from iserblk import aio
from iserblk.disk.request_queue import RequestQueue
from iserblk.disk.seam import AsyncLun, Rest
from iserblk.errors import (
    CommandTimeout,
    IserblkError,
    LocalProtocolError,
    OutOfRange,
    WriteProtected,
)
from iserblk.initiator.session.slots import TaskSlot
from tests.integration.conftest import StartTarget
from tests.support import logs
from tests.support.faces import read

MIB = 1 << 20
BLOCK = 4096


class _Left(Exception):
    pass


@asynccontextmanager
async def _open(url: str, options: dict[str, str] | None = None) -> AsyncIterator[AsyncLun]:
    async with aio.open_disks([url], options) as disks:
        yield disks.disks[disks.default]


async def _all_of(queue: RequestQueue) -> list[tuple[object, IserblkError | None]]:
    """Tag and error of every request, in the order of their ends."""
    ended = []
    while queue.open:
        ended += [(request.tag, request.error) for request in await queue.ended()]
    return ended


@pytest.mark.parametrize("scheme", ["iser", "iscsi"])
@pytest.mark.parametrize("metered", [False, True])
@pytest.mark.parametrize("depth", ["1", "128"])
async def test_what_was_written_is_read(
    start_target: StartTarget, tmp_path: Path, scheme: str, metered: bool, depth: str
) -> None:
    """Whole blocks, and what takes several commands; more requests than the session has room
    for."""
    running = start_target("lun:size=16M")
    options = {"queue-depth": depth, "metrics": str(tmp_path / "metrics") if metered else "off"}
    url = f"{running.url}/0".replace("iser://", f"{scheme}://")
    lengths = [random.Random(5).choice((512, BLOCK, 5000, 70_001)) for _ in range(100)]
    data = [random.Random(number).randbytes(length) for number, length in enumerate(lengths)]
    places = [sum(lengths[:number]) for number in range(100)]
    async with _open(url, options) as disk, aio.open_queue(disk) as queue:
        for number, (each, place) in enumerate(zip(data, places, strict=True)):
            request = queue.write(memoryview(each), place, number, fua=number % 3 == 0)
            assert (request.writes, request.offset, bytes(request.buffer)) == (True, place, each)
        assert queue.open == 100
        ended = await _all_of(queue)
        assert sorted(ended) == [(number, None) for number in range(100)]
        await disk.flush()
        buffers = [bytearray(length) for length in lengths]
        for number, (buffer, place) in enumerate(zip(buffers, places, strict=True)):
            queue.read(memoryview(buffer), place, number)
        assert sorted(await _all_of(queue)) == [(number, None) for number in range(100)]
        assert buffers == data
        assert await queue.ended() == []


async def test_it_returns_those_that_have_ended(start_target: StartTarget) -> None:
    """A request is begun at once, also by one that waits for another request."""
    running = start_target("lun:size=16M")
    async with _open(f"{running.url}/0") as disk, aio.open_queue(disk) as queue:
        count = 0
        for number in range(8):
            queue.read(memoryview(bytearray(BLOCK)), number * BLOCK)
        while queue.open:
            requests = await queue.ended()
            assert requests
            for request in requests:
                assert request.error is None
                count += 1
                if count <= 92:
                    queue.read(request.buffer, count * BLOCK)
            assert queue.open <= 8
        assert count == 100


async def test_errors_are_those_of_their_requests(
    start_target: StartTarget, tmp_path: Path
) -> None:
    (tmp_path / "lun").write_bytes(bytes(MIB))
    running = start_target("lun:ro")
    async with _open(f"{running.url}/0") as disk, aio.open_queue(disk) as queue:
        block = memoryview(bytearray(BLOCK))
        queue.read(block, 0, "good")
        queue.read(block, MIB, "behind the end")
        queue.write(block, 0, "read-only")
        queue.read(memoryview(bytes(BLOCK)), 0, "a buffer that takes nothing")
        errors = dict(await _all_of(queue))
        assert errors.pop("good") is None
        assert {tag: type(error) for tag, error in errors.items()} == {
            "behind the end": OutOfRange,
            "read-only": WriteProtected,
            "a buffer that takes nothing": LocalProtocolError,
        }


async def test_at_the_end_it_waits_and_an_error_is_not_lost(start_target: StartTarget) -> None:
    running = start_target("lun:size=1M")
    async with _open(f"{running.url}/0") as disk:
        async with aio.open_queue(disk) as queue:
            queue.write(memoryview(b"\x05" * BLOCK), 0)
        assert queue.open == 0
        assert await read(disk, 0, BLOCK) == b"\x05" * BLOCK
        with pytest.raises(OutOfRange):
            async with aio.open_queue(disk) as queue:
                queue.read(memoryview(bytearray(BLOCK)), 0)
                queue.read(memoryview(bytearray(BLOCK)), MIB)
        with pytest.raises(LocalProtocolError, match="is closed"):
            queue.read(memoryview(bytearray(BLOCK)), 0)


async def test_the_end_waits_for_all_in_spite_of_an_error(start_target: StartTarget) -> None:
    running = start_target("lun:size=1M")
    async with _open(f"{running.url}/0") as disk:
        with pytest.raises(OutOfRange):
            async with aio.open_queue(disk) as queue:
                queue.read(memoryview(bytearray(BLOCK)), MIB)
                for number in range(16):
                    queue.write(memoryview(bytes([number]) * BLOCK), number * BLOCK)
        for number in range(16):
            assert await read(disk, number * BLOCK, BLOCK) == bytes([number]) * BLOCK


async def test_another_task_may_wait_for_them(start_target: StartTarget) -> None:
    """It goes on until there are none, also at the end of the context."""
    running = start_target("lun:size=1M")
    fetched: list[object] = []

    async def fetch(queue: RequestQueue) -> None:
        while queue.open:
            fetched.extend(request.tag for request in await queue.ended())

    async with (
        _open(f"{running.url}/0") as disk,
        trio.open_nursery() as nursery,
        aio.open_queue(disk) as queue,
    ):
        running.pause()
        for number in range(16):
            queue.read(memoryview(bytearray(BLOCK)), number * BLOCK, number)
        nursery.start_soon(fetch, queue)
        await wait_all_tasks_blocked()
        running.resume()
    assert set(fetched) == set(range(16))


async def test_what_has_ended_keeps_nobody_waiting(start_target: StartTarget) -> None:
    """Requests whose ends nobody has asked for yet have no place in the session, nor a lock."""
    running = start_target("lun:size=1M")
    async with (
        _open(f"{running.url}/0", {"queue-depth": "4"}) as disk,
        aio.open_queue(disk) as queue,
    ):
        for number in range(8):
            queue.write(memoryview(b"\x07" * BLOCK), number * BLOCK)
        await disk.write(memoryview(b"\x08" * 10), 100)
        await disk.flush()
        result = await disk.command(bytes.fromhex("35 00 00 00 00 00 00 00 00 00"))
        assert result.status == 0
        assert await read(disk, 99, 12) == b"\x07" + b"\x08" * 10 + b"\x07"
        assert len(await _all_of(queue)) == 8


async def test_a_disk_of_another_loop_is_refused(start_target: StartTarget) -> None:
    running = start_target("lun:size=1M")

    async def use(disk: AsyncLun) -> None:
        async with aio.open_queue(disk):
            pass

    async with _open(f"{running.url}/0") as disk:
        with pytest.raises(LocalProtocolError, match="the trio loop that opened it"):
            await trio.to_thread.run_sync(trio.run, use, disk)


async def test_misuse_is_told(start_target: StartTarget) -> None:
    running = start_target("lun:size=1M")
    async with _open(f"{running.url}/0") as disk, aio.open_queue(disk) as queue:
        block = memoryview(bytearray(BLOCK))
        with pytest.raises(LocalProtocolError, match="another thread: call it there"):
            await trio.to_thread.run_sync(partial(queue.read, block, 0))
        anything: Any = bytearray(BLOCK)
        with pytest.raises(LocalProtocolError, match="takes a memoryview of its buffer, not a byt"):
            queue.read(anything, 0)
        with pytest.raises(LocalProtocolError, match="takes a memoryview"):
            queue.write(anything, 0)
        assert queue.open == 0
        running.pause()
        try:
            queue.read(block, 0)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(queue.ended)
                await wait_all_tasks_blocked()
                with pytest.raises(LocalProtocolError, match="another task waits"):
                    await queue.ended()
                nursery.cancel_scope.cancel()
        finally:
            running.resume()
        assert [request.error for request in await queue.ended()] == [None]  # it went on


# -- left early -----------------------------------------------------------------------------------


async def _begin_everything(queue: RequestQueue, buffers: list[bytearray]) -> None:
    """Reads with one command, with several, and in parts of blocks; more than have room."""
    for buffer in buffers:
        queue.read(memoryview(buffer), 0)
    await wait_all_tasks_blocked()


def _buffers() -> list[bytearray]:
    return [bytearray(length) for length in (*[BLOCK] * 8, 3 * MIB + 1, 100, *[256 << 10] * 8)]


async def _all_is_given_back(disk: AsyncLun, buffers: list[bytearray]) -> None:
    """No answer that was under way finds its way into a buffer, and every place is free again."""
    for buffer in buffers:
        buffer[:] = bytes(len(buffer))
    async with aio.open_queue(disk) as queue:
        for _ in range(8):
            queue.read(memoryview(bytearray(BLOCK)), 0)
    assert not any(any(buffer) for buffer in buffers)
    gc.collect()  # tracebacks of what has left the queue
    for buffer in buffers:
        buffer.clear()  # BufferError while a view of it exists


@pytest.mark.parametrize("how", ["an error", "cancelled"])
async def test_what_is_under_way_is_aborted(start_target: StartTarget, how: str) -> None:
    running = start_target("lun:size=8M")
    buffers = _buffers()
    async with _open(f"{running.url}/0", {"queue-depth": "4"}) as disk:
        await disk.write(memoryview(b"\xff" * (4 * MIB)), 0)
        running.pause()
        left = trio.Event()

        async def use() -> None:
            with trio.CancelScope() as scope:
                async with aio.open_queue(disk) as queue:
                    await _begin_everything(queue, buffers)
                    if how == "an error":
                        raise _Left
                    scope.cancel()
                    await queue.ended()

        async def user() -> None:
            if how == "an error":
                with pytest.raises(_Left):
                    await use()
            else:
                await use()
            left.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(user)
            await wait_all_tasks_blocked(0.05)
            early = left.is_set()
            running.resume()
        assert not early  # the buffers were the target's still
        await _all_is_given_back(disk, buffers)


async def test_one_that_waits_for_them_nevertheless_is_not_left_waiting(
    start_target: StartTarget,
) -> None:
    """It asks for what has ended while the queue is being closed, shielded."""
    running = start_target("lun:size=8M")
    buffers = _buffers()
    async with _open(f"{running.url}/0", {"queue-depth": "4"}) as disk:
        await disk.write(memoryview(b"\xff" * (4 * MIB)), 0)
        running.pause()

        async def use() -> None:
            async with aio.open_queue(disk) as queue:
                await _begin_everything(queue, buffers)
                try:
                    await trio.sleep_forever()
                finally:
                    with trio.CancelScope(shield=True):
                        while queue.open:
                            await queue.ended()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(use)
            await wait_all_tasks_blocked(0.05)
            nursery.cancel_scope.cancel()
            with trio.CancelScope(shield=True):
                await wait_all_tasks_blocked(0.05)
                running.resume()
        await _all_is_given_back(disk, buffers)


@pytest.mark.logs(logs.DEADLINES, logs.RECONNECTED)
async def test_a_target_that_dies_fails_them(start_target: StartTarget) -> None:
    running = start_target("lun:size=8M")
    async with _open(f"{running.url}/0", {"io-timeout": "1"}) as disk:
        running.pause()
        async with aio.open_queue(disk) as queue:
            await _begin_everything(queue, _buffers())
            running.kill()
            errors = [error for _, error in await _all_of(queue)]
        assert [type(error) for error in errors] == [CommandTimeout] * len(_buffers())


class _Broken:
    """A disk of which the end of the first read has a bug."""

    def __init__(self, disk: AsyncLun) -> None:
        self._disk = disk
        self._ends = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._disk, name)

    def end_read(self, slot: TaskSlot) -> Rest | None:
        rest = self._disk.end_read(slot)
        self._ends += 1
        if self._ends == 1:
            raise _Left
        return rest


async def test_a_bug_is_no_result(start_target: StartTarget) -> None:
    """What is no IserblkError leaves the queue, and the others are ended."""
    running = start_target("lun:size=1M")
    async with _open(f"{running.url}/0", {"queue-depth": "2"}) as disk:
        broken: Any = _Broken(disk)
        buffers = [bytearray(BLOCK) for _ in range(2)]
        with pytest.raises(_Left):
            async with aio.open_queue(broken) as queue:
                for buffer in buffers:
                    queue.read(memoryview(buffer), 0)
                await queue.ended()
        await _all_is_given_back(disk, buffers)
