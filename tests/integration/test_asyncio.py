"""Disks for asyncio, against a real target."""

from __future__ import annotations

import asyncio
import errno
import random
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from iserblk.asyncio import open_disks
from iserblk.commands.command import ABORTING, SENT
from iserblk.disk import aio
from iserblk.disk.aio import TrioDiskSet
from iserblk.errors import (
    ConnectFailed,
    ConnectionLost,
    LocalProtocolError,
    NotSupported,
    OutOfRange,
    TransportError,
)
from tests.integration.conftest import StartTarget
from tests.support import logs
from tests.support.target import running_target
from tests.support.until import until_blocking

MIB = 1 << 20
SIZE = 8 * MIB
NAME = "iserblk-disks"  # of the thread


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    place = tmp_path_factory.mktemp("lun")
    with running_target([f"{place}/lun:size={SIZE}"], place / "target.log") as running:
        yield f"{running.url}/0"


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert not [each for each in threading.enumerate() if each.name == NAME]


def with_disk(url: str, body: Callable[[Any], Awaitable[None]]) -> None:
    async def run() -> None:
        async with open_disks([url]) as disks:
            await body(disks.disks[disks.default])

    asyncio.run(run())


def has(disk: Any, state: int) -> bool:
    """Whether one of its commands is in this state."""
    return any(slot.state == state for slot in disk._disk.core.queue.tasks)


async def until(condition: Callable[[], bool]) -> None:
    await asyncio.to_thread(until_blocking, condition)


def test_many_requests_at_once(url: str) -> None:
    async def body(disk: Any) -> None:
        assert disk.size == disk.info.size == SIZE
        chance = random.Random(1)
        blocks = [chance.randbytes(8192) for _ in range(200)]

        async def one(index: int) -> bytearray:
            found = bytearray(8192)
            await disk.write(memoryview(blocks[index]), 8192 * index, index % 7 == 0)
            await disk.read_into(memoryview(found), 8192 * index)
            return found

        assert await asyncio.gather(*map(one, range(200))) == blocks
        await disk.write(memoryview(blocks[1]), 0)  # (A FUA before it may have flushed all else.)
        assert disk.dirty
        await disk.flush()
        assert not disk.dirty

    with_disk(url, body)


def test_every_operation(url: str) -> None:
    async def body(disk: Any) -> None:
        assert await disk.refresh() == SIZE
        await disk.write(memoryview(b"x" * 8192), 0)
        await disk.zero(1, 4000, may_trim=True)
        await disk.trim(4096, 4096)
        await disk.cache(0, 4096)
        found = bytearray(4096)
        await disk.read_into(memoryview(found), 0)
        assert found == b"x" + bytes(4000) + b"x" * 95
        extents = await disk.extents(0, SIZE)
        assert extents[0][0] == 0
        answer = await disk.command(bytes(6))
        assert answer == (0, b"", 0, 0)

    with_disk(url, body)


def test_errors(url: str) -> None:
    async def body(disk: Any) -> None:
        with pytest.raises(OutOfRange, match="leave the disk"):
            await disk.read_into(memoryview(bytearray(512)), SIZE)
        with pytest.raises(NotSupported):
            await disk.command(bytes(32), bytearray(1))
        await disk.flush()  # it goes on

    with_disk(url, body)


def test_another_loop_is_told_so(url: str) -> None:
    """Nothing is sent for it; nor without a loop of asyncio. The disk goes on."""

    async def body(disk: Any) -> None:
        def elsewhere() -> None:
            with pytest.raises(LocalProtocolError, match="asyncio loop that opened it"):
                asyncio.run(disk.write(memoryview(b"x" * 512), 0))
            with pytest.raises(LocalProtocolError, match="asyncio loop that opened it"):
                trio.run(disk.flush)

        await asyncio.to_thread(elsewhere)
        assert not disk.dirty and not has(disk, SENT)
        await disk.flush()

    with_disk(url, body)


async def test_another_trio_loop_is_told_so(url: str) -> None:
    async with aio.open_disks([url]) as disks:
        disk = disks.disks[disks.default]

        def elsewhere() -> None:
            for call in (partial(disk.write, memoryview(b"x" * 512), 0), disk.flush, disk.refresh):
                with pytest.raises(LocalProtocolError, match="trio loop that opened it"):
                    trio.run(call)

        await trio.to_thread.run_sync(elsewhere)
        assert not disk.dirty
        await disk.flush()


def test_where_nothing_can_be_opened(tmp_path: Path) -> None:
    async def run() -> None:
        async with open_disks(["iser://127.0.0.1:1/iqn.2026-11.example:disk/0"]):
            raise AssertionError("there is no target")

    with pytest.raises(ConnectFailed):
        asyncio.run(run())


def test_an_error_of_the_body_is_the_callers(url: str) -> None:
    async def body(_disk: Any) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        with_disk(url, body)


def test_cancelled(start_target: StartTarget) -> None:
    """The task goes on only when the command has been aborted: its buffer is free then."""
    running = start_target(f"lun:size={SIZE}")

    async def body(disk: Any) -> None:
        buffer = bytearray(4096)
        running.pause()
        task = asyncio.create_task(disk.read_into(memoryview(buffer), 0))
        await until(lambda: has(disk, SENT))
        task.cancel()
        await until(lambda: has(disk, ABORTING))
        assert not task.done()
        task.cancel()  # once more changes nothing
        running.resume()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not has(disk, SENT) and not has(disk, ABORTING)
        await disk.read_into(memoryview(buffer), 0)

    with_disk(f"{running.url}/0", body)


# (Or when it has: what was not flushed is sent again then.)
@pytest.mark.logs("flush that was given up", "an earlier flush", logs.RECONNECTED)
def test_cancelled_before_it_began(url: str) -> None:
    async def body(disk: Any) -> None:
        data = bytearray(b"x" * 512)
        task = asyncio.create_task(disk.write(memoryview(data), 0))
        await asyncio.sleep(0)  # it has made its request
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await disk.flush()
        await disk.flush()

    with_disk(url, body)


def test_opening_is_cancelled(start_target: StartTarget) -> None:
    running = start_target(f"lun:size={SIZE}")

    async def never() -> None:
        async with open_disks([f"{running.url}/0"]):
            raise AssertionError("the target does not answer")

    async def run() -> None:
        task = asyncio.create_task(never())
        await until(lambda: any(each.name == NAME for each in threading.enumerate()))
        task.cancel()
        await task

    running.pause()
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(run())
    running.resume()


def test_opening_is_cancelled_at_once(url: str) -> None:
    """The thread has been started, and is not known to run trio yet."""

    async def never() -> None:
        async with open_disks([url]):
            raise AssertionError("it was cancelled")

    async def run() -> None:
        task = asyncio.create_task(never())
        await asyncio.sleep(0)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(run())


def test_trio_cannot_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_descriptors(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    async def run() -> None:
        async with open_disks(["iser://127.0.0.1:1/iqn.2026-11.example:disk/0"]):
            raise AssertionError("trio does not run")

    monkeypatch.setattr(trio.lowlevel, "start_guest_run", without_descriptors)
    with pytest.raises(OSError, match="Too many open files"):
        asyncio.run(run())


def test_what_looks_after_the_sessions_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that is made before the disks are closed ends all the same."""
    broken, asked = threading.Event(), threading.Event()
    disk: Any = SimpleNamespace(client=None, flush=trio.sleep_forever, abandon=lambda _mine: 0)

    async def breaks() -> None:
        raise RuntimeError("broken")

    @asynccontextmanager
    async def breaking(*_: object) -> AsyncIterator[Any]:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(breaks)
            try:
                yield TrioDiskSet({"lun0": disk}, lambda: None)
            finally:
                broken.set()
                with trio.CancelScope(shield=True):
                    await trio.to_thread.run_sync(asked.wait)

    async def run() -> None:
        async with open_disks(["iser://127.0.0.1:1/iqn.2026-11.example:disk/0"]) as disks:
            await until(broken.is_set)
            flush = asyncio.create_task(disks.disks["lun0"].flush())
            await asyncio.sleep(0)  # it has made its request
            asked.set()
            with pytest.raises(ConnectionLost, match="disks were closed"):
                await flush

    monkeypatch.setattr(aio, "open_disks", breaking)
    with pytest.raises(ExceptionGroup) as raised:
        asyncio.run(run())
    assert raised.group_contains(RuntimeError, match="broken")


@pytest.mark.logs(logs.RECONNECTED)
def test_closed_while_requests_are_under_way(start_target: StartTarget) -> None:
    running = start_target(f"lun:size={SIZE}")

    async def kill_then(disk: Any) -> None:
        await until(lambda: has(disk, ABORTING))
        running.kill()  # (With an answer a request succeeds.)

    async def run() -> None:
        async with open_disks([f"{running.url}/0"]) as disks:
            disk = disks.disks["lun0"]
            running.pause()
            reads = [
                asyncio.create_task(disk.read_into(memoryview(bytearray(512)), 0)) for _ in range(3)
            ]
            await until(lambda: has(disk, SENT))
            killed = asyncio.create_task(kill_then(disk))
        await killed
        for read in reads:
            with pytest.raises(ConnectionLost, match="disks were closed"):
                await read
        with pytest.raises(TransportError):
            await disk.flush()

    asyncio.run(run())


def test_sessions_are_looked_after_while_the_loop_is_busy(start_target: StartTarget) -> None:
    """trio runs in a thread of its own: a request ends while asyncio's thread does other work."""
    running = start_target(f"lun:size={SIZE}")

    async def body(disk: Any) -> None:
        task = asyncio.create_task(disk.write(memoryview(b"y" * 512), 0))
        await asyncio.sleep(0)
        ended = threading.Event()

        def watch() -> None:
            while not disk.dirty:
                pass
            ended.set()

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        assert ended.wait(30)  # blocks the loop
        assert not task.done()
        await task

    with_disk(f"{running.url}/0", body)
