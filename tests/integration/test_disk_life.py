"""Many threads and tasks, cancellation, lost connections, and no resources left at the end."""

from __future__ import annotations

import random
import threading
from collections.abc import Awaitable, Callable

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from iserblk.disk import aio, blocking
from iserblk.disk.seam import AsyncDisk, BlockingDisk
from iserblk.errors import CommandTimeout, ConnectionLost, TransportError
from iserblk.initiator.session import deadlines
from tests.integration.conftest import StartTarget
from tests.support import logs
from tests.support.census import census, nothing_new
from tests.support.cores import session_of
from tests.support.faces import FACES, one_disk, read, write
from tests.support.target import TargetProcess
from tests.support.until import until

pytestmark = pytest.mark.logs(logs.DEADLINES, logs.RECONNECTED)

KIB = 1024
MIB = 1 << 20
PATIENCE_S = 30.0

face = pytest.mark.parametrize("face", FACES)


# --- many at once ------------------------------------------------------------------------------


def _random_steps(number: int, size: int, count: int) -> list[tuple[str, int, int]]:
    """Random steps of a client in its own region: (what, offset, length)."""
    chance = random.Random(number)
    steps = []
    for _ in range(count):
        length = chance.choice((1, 100, 512, 513, 4096, 5000, 65_536, 200_001))
        offset = chance.randrange(size - length)
        steps.append((chance.choice(("read", "write", "write", "zero", "trim")), offset, length))
    return steps


@pytest.mark.parametrize("block", [512, 4096])
def test_32_threads(start_target: StartTarget, block: int) -> None:
    """Each thread verifies its own region, whose edges share blocks with its neighbours."""
    count, size = 32, 300_001
    running = start_target(f"lun:size=16M:block={block}")
    failed: list[str] = []

    def client(disk: BlockingDisk, number: int) -> None:
        base = number * size
        model = bytearray(random.Random(-number).randbytes(size))
        disk.write(memoryview(model), base)
        for what, offset, length in _random_steps(number, size, 40):
            if what == "write":
                model[offset : offset + length] = random.Random(offset).randbytes(length)
                disk.write(memoryview(model)[offset : offset + length], base + offset)
            elif what == "zero":
                model[offset : offset + length] = bytes(length)
                disk.zero(base + offset, length, may_trim=bool(offset & 1))
            elif what == "trim":
                disk.trim(base + offset, length)
                start = -(-(base + offset) // 4096) * 4096 - base
                stop = (base + offset + length) // 4096 * 4096 - base
                if start < stop:
                    model[start:stop] = bytes(stop - start)
            buffer = bytearray(length)
            disk.read_into(memoryview(buffer), base + offset)
            if buffer != model[offset : offset + length]:
                failed.append(f"client {number}: {what} {length} bytes at {offset}")
        buffer = bytearray(size)
        disk.read_into(memoryview(buffer), base)
        if buffer != model:
            failed.append(f"client {number}: at the end")

    with blocking.open_disks([f"{running.url}/0"], {}) as disks:
        disk = disks.disks[disks.default]
        threads = [
            threading.Thread(target=client, args=(disk, number), daemon=True)
            for number in range(count)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failed


@face
@pytest.mark.parametrize("depth", ["1", "4"])
async def test_more_clients_than_slots(start_target: StartTarget, face: str, depth: str) -> None:
    """A client that finds no free slot waits until any other client gives one back."""
    running = start_target("lun:size=16M")
    async with one_disk(face, f"{running.url}/0", {"queue-depth": depth}) as disk:

        async def client(number: int) -> None:
            for turn in range(6):
                data = bytes([number]) * (4096 if turn % 2 else 5000)
                await write(disk, data, number * 8192 + 77 * (turn % 2))
                assert await read(disk, number * 8192 + 77 * (turn % 2), len(data)) == data

        async with trio.open_nursery() as nursery:
            for number in range(48):
                nursery.start_soon(client, number)


# --- cancellation ------------------------------------------------------------------------------


async def _cancelled_while_paused(
    running: TargetProcess, *operations: Callable[[], Awaitable[object]]
) -> tuple[int, int]:
    """Start the operations against a paused target, cancel them, let the target go on.

    Returns how many were cancelled: before the target went on, and in all."""
    cancelled = 0

    async def one(operation: Callable[[], Awaitable[object]]) -> None:
        nonlocal cancelled
        with trio.CancelScope() as scope:
            scopes.append(scope)
            await operation()
        cancelled += scope.cancelled_caught

    scopes: list[trio.CancelScope] = []
    async with trio.open_nursery() as nursery:
        running.pause()
        try:
            for operation in operations:
                nursery.start_soon(one, operation)
            await wait_all_tasks_blocked()
            for scope in scopes:
                scope.cancel()
            await wait_all_tasks_blocked()
            early = cancelled
        finally:
            running.resume()
    return early, cancelled


async def test_cancelled_reads_leave_their_buffers_alone(start_target: StartTarget) -> None:
    """After Cancelled the buffer is the caller's: nothing is written to it any more."""
    running = start_target("lun:size=32M")
    async with one_disk("async", f"{running.url}/0") as disk:
        await write(disk, b"\xff" * (16 * MIB), 0)
        # More commands than task management requests can be under way at once.
        buffers = [bytearray(256 * KIB) for _ in range(24)]
        buffers += [bytearray(3 * MIB + 1), bytearray(4096), bytearray(100)]

        def reading(buffer: bytearray) -> Callable[[], Awaitable[object]]:
            async def operation() -> None:
                try:
                    await disk.read_into(memoryview(buffer), 0)
                finally:
                    buffer[:] = bytes(len(buffer))  # given back: a late write would show

            return operation

        outcome = await _cancelled_while_paused(running, *map(reading, buffers))
        assert outcome == (0, len(buffers))
        # Answers that were under way have arrived when this one has.
        assert await read(disk, 0, 2 * MIB) == b"\xff" * (2 * MIB)
        assert not any(any(buffer) for buffer in buffers)
        for buffer in buffers:
            buffer.clear()  # BufferError while a view of it exists
    await until(lambda: not running.census()["open regions"])


async def test_cancelled_writes_send_nothing_of_a_buffer_given_back(
    start_target: StartTarget,
) -> None:
    """Each block holds old or new data, and none that the caller put into the buffer later."""
    running = start_target("lun:size=32M")
    async with one_disk("async", f"{running.url}/0") as disk:
        await write(disk, b"\x01" * (8 * MIB), 0)
        buffers = [bytearray(b"\x02" * MIB) for _ in range(8)]

        def writing(number: int) -> Callable[[], Awaitable[object]]:
            async def operation() -> None:
                buffer = buffers[number]
                try:
                    await disk.write(memoryview(buffer), number * MIB)
                finally:
                    buffer[:] = b"\x03" * len(buffer)

            return operation

        outcome = await _cancelled_while_paused(running, *(writing(i) for i in range(8)))
        assert outcome == (0, 8)
        assert set(await read(disk, 0, 8 * MIB)) <= {1, 2}


@pytest.mark.logs(logs.LOST_POWER, logs.RECONNECTED)  # where the flush had been sent
async def test_after_cancellation_the_session_goes_on(start_target: StartTarget) -> None:
    """All slots and range locks are given back, also those that a cancelled command waited for."""
    running = start_target("lun:size=4M")
    async with one_disk("async", f"{running.url}/0", {"queue-depth": "2"}) as disk:
        data = memoryview(bytes(5000))
        for _ in range(5):
            _, cancelled = await _cancelled_while_paused(
                running,
                lambda: read(disk, 0, 4096),
                lambda: disk.write(data, 100),
                lambda: disk.write(data, 100),
                lambda: disk.write(data[:4096], 0),
                lambda: disk.zero(10, MIB),
                lambda: disk.trim(0, MIB),
                disk.flush,
                lambda: disk.extents(0, MIB),
            )
            assert cancelled == 8
        async with trio.open_nursery() as nursery:
            for number in range(16):
                nursery.start_soon(write, disk, bytes([number]) * 700, number * 700)
        content = await read(disk, 0, 16 * 700)
        assert content == b"".join(bytes([number]) * 700 for number in range(16))


# --- the connection ends -----------------------------------------------------------------------


# shows: SYSTEM-43
@face
async def test_a_target_that_dies_ends_every_request(start_target: StartTarget, face: str) -> None:
    """Requests in flight fail, and so do later ones, when their io-timeout is over."""
    # proves: ISER-5.2.3.2-1
    running = start_target("lun:size=32M")
    errors: list[CommandTimeout] = []

    async def client(disk: AsyncDisk, number: int) -> None:
        try:
            if number % 2:
                await read(disk, number * MIB, MIB)
            else:
                await write(disk, bytes(MIB + 1), number * MIB + 1)
        except CommandTimeout as error:
            errors.append(error)

    async with one_disk(face, f"{running.url}/0", {"io-timeout": "1"}) as disk:
        running.pause()
        async with trio.open_nursery() as nursery:
            for number in range(16):
                nursery.start_soon(client, disk, number)
            await wait_all_tasks_blocked(0.05)
            running.kill()
        assert len(errors) == 16
        assert len({id(error) for error in errors}) == 16  # each task raises an object of its own
        for call in (
            lambda: read(disk, 0, 512),
            lambda: write(disk, b"x", 0),
            disk.flush,
            lambda: disk.zero(0, 512),
            lambda: disk.trim(0, MIB),
            lambda: disk.extents(0, MIB),
        ):
            with pytest.raises(CommandTimeout, match="not connected for"):
                await call()


@face
async def test_a_target_that_stands_still_is_given_up(
    start_target: StartTarget, face: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deadline passes and no task management request is answered: the connection is cut."""
    monkeypatch.setattr(deadlines, "STEP_S", 0.1)
    running = start_target("lun:size=1M")
    async with one_disk(face, f"{running.url}/0", {"io-timeout": "1"}) as disk:
        running.pause()
        with pytest.raises(CommandTimeout):
            await read(disk, 0, 4096)
        running.resume()
        assert await read(disk, 0, 4096) == bytes(4096)  # on a connection of its own


# --- what is left ------------------------------------------------------------------------------


async def _settled(census: Callable[[], dict[str, int]], before: dict[str, int]) -> None:
    """Wait until the census has nothing that was not there ``before``."""
    now: dict[str, int] = {}

    def settled() -> bool:
        now.update(census())
        return nothing_new(now, before)

    with trio.move_on_after(PATIENCE_S):
        await until(settled)
    assert nothing_new(now, before), (now, before)


# shows: SYSTEM-43
@face
async def test_200_connects_and_disconnects(start_target: StartTarget, face: str) -> None:
    """Orderly connections, each with data both ways: nothing is left at either end."""
    # proves: ISER-5.2.2-5
    running = start_target("lun:size=4M")
    url = f"{running.url}/0"

    def once_blocking() -> None:
        with blocking.open_disks([url], {}) as disks:
            disk = disks.disks[disks.default]
            disk.write(memoryview(bytes(8192)), 100)
            disk.read_into(memoryview(bytearray(8192)), 100)

    async def once_async() -> None:
        async with aio.open_disks([url], {}) as disks:
            disk = disks.disks[disks.default]
            await disk.write(memoryview(bytes(8192)), 100)
            await disk.read_into(memoryview(bytearray(8192)), 100)

    async def once() -> None:
        if face == "async":
            await once_async()
        else:
            once_blocking()

    before = census()  # tests before this one may have left something
    await once()  # what the first connection leaves (caches of modules) belongs to the process
    ours, theirs = census(), running.census()
    nothing = dict.fromkeys(("queue pairs", "open regions"), 0)
    for each in nothing:
        assert ours[each] == before[each]
    for turn in range(200):
        await once()
        if turn % 50 == 49:
            await _settled(census, ours)
    await _settled(running.census, theirs | nothing)
    numbers = [line for line in running.log.read_text().splitlines() if "session ended" in line]
    assert len(numbers) == 201


async def test_connections_cut_in_mid_flight_leave_nothing_at_the_target(
    start_target: StartTarget,
) -> None:
    """Clients that vanish with reads and writes under way."""
    # proves: ISER-5.2.3.1-1, ISER-5.2.3.1-3
    running = start_target("lun:size=32M")
    before = running.census()
    lost = 0

    async def cut(operation: Awaitable[object]) -> None:
        nonlocal lost
        try:
            await operation
        except TransportError:
            lost += 1  # the target may have answered others before the connection was cut

    for _ in range(30):
        async with one_disk("async", f"{running.url}/0") as disk, trio.open_nursery() as nursery:
            for number in range(8):
                nursery.start_soon(cut, read(disk, number * MIB, MIB))
                nursery.start_soon(cut, write(disk, bytes(MIB), (16 + number) * MIB))
            await trio.lowlevel.checkpoint()
            session_of(disk).fail(ConnectionLost("cut"))
    assert lost
    await _settled(running.census, before)
    async with one_disk("async", f"{running.url}/0") as disk:
        assert len(await read(disk, 0, MIB)) == MIB


@face
async def test_many_sessions_at_once(start_target: StartTarget, face: str) -> None:
    """Sixteen clients of one target, each with a connection of its own."""
    running = start_target("lun:size=16M")
    before = running.census()

    async def client(number: int) -> None:
        data = bytes([number + 1]) * 98_304
        async with one_disk(face, f"{running.url}/0") as disk:
            await write(disk, data, number * 98_304)
            await barrier.wait()
            assert await read(disk, number * 98_304, len(data)) == data

    class Barrier:
        def __init__(self) -> None:
            self.missing = 16
            self.all_here = trio.Event()

        async def wait(self) -> None:
            self.missing -= 1
            if not self.missing:
                self.all_here.set()
            await self.all_here.wait()

    barrier = Barrier()
    async with trio.open_nursery() as nursery:
        for number in range(16):
            nursery.start_soon(client, number)
    await _settled(running.census, before)
