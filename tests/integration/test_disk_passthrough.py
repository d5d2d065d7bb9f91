"""CDBs of the caller's own, to a real target, through every face of the disk."""

from __future__ import annotations

import asyncio
import os
import random
import threading
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from iserblk import aio
from iserblk import asyncio as for_asyncio
from iserblk.commands.command import SENT
from iserblk.disk.blocking import open_disks
from iserblk.disk.seam import CommandResult
from iserblk.errors import CommandTimeout, ConnectionLost, IserblkError
from iserblk.scsi import cdb, mode, sense, status
from tests.integration.conftest import StartTarget
from tests.support import logs
from tests.support.cores import core_of, session_of
from tests.support.target import TargetProcess, running_target
from tests.support.until import PAUSE_S, all_ended, until, until_blocking

MIB = 1 << 20
SIZE = 4 * MIB
BLOCK = 512
OLD, NEW, NEWER = b"o" * BLOCK, b"n" * BLOCK, b"N" * BLOCK

FACES = ("blocking", "async", "asyncio")


@pytest.fixture(scope="module", params=["iser", "iscsi"])
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    place = tmp_path_factory.mktemp("lun")
    with running_target([f"{place}/lun:size={SIZE}"], place / "target.log") as running:
        yield f"{running.url.replace('iser:', request.param + ':')}/0"


def ten(pack: Callable[[bytearray, int, int, int], None], lba: int, blocks: int) -> bytes:
    block = bytearray(16)
    pack(block, lba, blocks, 0)
    return bytes(block[:10])


def one_by_one(face: str, url: str, *commands: tuple[Any, ...]) -> list[CommandResult]:
    """Send these commands (CDB, Data-In, Data-Out) through ``face``, then flush."""

    async def in_tasks(found: Any) -> list[CommandResult]:
        disk = found.disks[found.default]
        results = [await disk.command(*each) for each in commands]
        await disk.flush()
        return results

    async def in_trio() -> list[CommandResult]:
        async with aio.open_disks([url]) as found:
            return await in_tasks(found)

    async def in_asyncio() -> list[CommandResult]:
        async with for_asyncio.open_disks([url]) as found:
            return await in_tasks(found)

    if face == "async":
        return trio.run(in_trio)
    if face == "asyncio":
        return asyncio.run(in_asyncio())
    with open_disks([url]) as disks:
        disk = disks.disks[disks.default]
        results = [disk.command(*each) for each in commands]
        disk.flush()
        return results


@pytest.mark.parametrize("face", FACES)
def test_statuses_sense_and_residuals(url: str, face: str) -> None:
    data = random.Random(face).randbytes(8 * BLOCK)
    page, short, found = bytearray(255), bytearray(8), bytearray(8 * BLOCK)
    read, write = bytearray(16), bytearray(16)
    cdb.pack_read16(read, 100, 8, 0)
    cdb.pack_write16(write, 100, 8, 0)
    answers = one_by_one(
        face,
        url,
        (bytes((0x12, 1, 0x80, 0, 255, 0)), page),
        (bytes(write), None, data),
        (bytes(read), found),
        (bytes(read), short),
        (read_of(SIZE // BLOCK), bytearray(BLOCK)),
        (cdb.test_unit_ready(),),
        (bytes((0xC1,)) + bytes(9),),
    )
    inquiry, wrote, got, cut, failed, ready, unknown = answers
    assert inquiry.status == status.GOOD and page[:2] == b"\x00\x80"
    assert inquiry.residual == 255 - 4 - page[3] and not any(page[4 + page[3] :])
    assert wrote == got == ready == (status.GOOD, b"", 0, 0)
    assert found == data
    assert cut.residual == len(short) - len(data) and short == data[:8]
    assert failed.status == status.CHECK_CONDITION and failed.residual == BLOCK
    assert (failed.decoded.key, failed.decoded.code) == (
        sense.ILLEGAL_REQUEST,
        sense.LBA_OUT_OF_RANGE,
    )
    assert unknown.decoded.code == sense.INVALID_OPERATION_CODE
    for buffer in (page, short, found):
        buffer.clear()  # BufferError while a view of it is left


@pytest.mark.parametrize("face", FACES)
def test_bidirectional(url: str, face: str) -> None:
    old, new = (random.Random(f"{face}{seed}").randbytes(4096) for seed in range(2))
    write, back = ten(cdb.pack_write10, 8, 8), bytearray(4096 + 100)
    _, answer = one_by_one(face, url, (write, None, old), (cdb.xdwriteread10(8, 8), back, new))
    assert answer == (status.GOOD, b"", 0, 100)
    assert back[:4096] == bytes(a ^ b for a, b in zip(old, new, strict=True))


def write_of(lba: int) -> bytes:
    return ten(cdb.pack_write10, lba, 1)


def read_of(lba: int) -> bytes:
    return ten(cdb.pack_read10, lba, 1)


def in_flight(disk: Any) -> int:
    return sum(slot.state == SENT for slot in core_of(disk).queue.tasks)


async def block(disk: Any, lba: int) -> bytes:
    found = bytearray(BLOCK)
    await disk.read_into(memoryview(found), lba * BLOCK)
    return bytes(found)


@pytest.mark.logs(logs.RECONNECTED, logs.LOST_WRITES)
async def test_only_what_changes_nothing_is_sent_again(start_target: StartTarget) -> None:
    """On another connection. A write ends with ConnectionLost: it may have been carried out."""
    spec = f"lun:size={SIZE}"
    running = start_target(spec)
    async with aio.open_disks([f"{running.url}/0"]) as disks:
        disk = disks.disks[disks.default]
        found = bytearray(BLOCK)
        results: list[CommandResult] = []

        async def read() -> None:
            results.append(await disk.command(read_of(7), found))

        async def write() -> None:
            with pytest.raises(ConnectionLost, match="0x2a, which may have been carried out"):
                await disk.command(write_of(9), None, NEW)

        await disk.write(memoryview(OLD), 7 * BLOCK)
        await disk.flush()  # else the command would wait for a flush
        running.pause()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            await until(lambda: in_flight(disk) == 1)
            nursery.start_soon(write)
            await until(lambda: in_flight(disk) == 2)
            running.kill()
            start_target(spec, listen=running.listen)
        assert results == [(status.GOOD, b"", 0, 0)] and found == OLD
        with pytest.raises(IserblkError, match="were lost at the target"):
            await disk.flush()  # the write may have been lost with the target


@pytest.mark.logs(logs.RECONNECTED, logs.LOST_WRITES, logs.LOST_POWER)
async def test_a_cache_that_is_lost(start_target: StartTarget) -> None:
    """The journal does not have what a command of the caller's wrote: so the flush says that it is
    lost, and nothing older is put over what the target has. After a flush it is safe, and the
    journal has what follows."""
    spec = f"lun:size={SIZE}:volatile-cache=64M"
    running = start_target(spec)
    async with aio.open_disks([f"{running.url}/0"]) as disks:
        disk = disks.disks[disks.default]
        await disk.write(memoryview(OLD), 0)
        await disk.command(write_of(0), None, NEW)
        await disk.write(memoryview(OLD), BLOCK)
        running.kill()
        running = start_target(spec, listen=running.listen)
        with pytest.raises(IserblkError, match="were lost at the target"):
            await disk.flush()
        assert await block(disk, 0) == OLD  # which was flushed before the command

        await disk.command(write_of(0), None, NEW)
        await disk.flush()
        await disk.write(memoryview(NEWER), BLOCK)
        running.kill()
        start_target(spec, listen=running.listen)
        await disk.flush()
        assert await block(disk, 0) == NEW and await block(disk, 1) == NEWER


async def test_changes_run_alone(start_target: StartTarget) -> None:
    """A write to the same blocks waits for the command, and one before it is waited for."""
    running: TargetProcess = start_target(f"lun:size={SIZE}")
    async with aio.open_disks([f"{running.url}/0"], {"journal": "off"}) as disks:
        disk = disks.disks[disks.default]
        running.pause()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(disk.write, memoryview(OLD), 0)
            await until(lambda: in_flight(disk) == 1)
            nursery.start_soon(disk.command, write_of(0), None, NEW)
            await trio.testing.wait_all_tasks_blocked()
            assert in_flight(disk) == 1
            nursery.start_soon(disk.write, memoryview(NEWER), 0)
            await trio.testing.wait_all_tasks_blocked()
            assert in_flight(disk) == 1
            running.resume()
        assert await block(disk, 0) == NEWER


async def test_a_change_does_not_wait_beyond_its_own_deadline(start_target: StartTarget) -> None:
    """For a command that has more time: of whole blocks, of a part of one, a trim and another
    command. None is sent then, nor later."""
    running = start_target(f"lun:size={SIZE}")
    async with aio.open_disks([f"{running.url}/0"], {"io-timeout": "1"}) as disks:
        disk = disks.disks[disks.default]
        running.pause()

        async def too_late(change: Callable[[], Awaitable[object]]) -> None:
            with pytest.raises(CommandTimeout, match="not done within 1 s"):
                await change()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(disk.command, write_of(0), None, OLD, timeout_s=100))
            await until(lambda: in_flight(disk) == 1)
            async with trio.open_nursery() as late:
                late.start_soon(too_late, partial(disk.write, memoryview(NEW), 0))
                late.start_soon(too_late, partial(disk.write, memoryview(NEW)[:7], 7))
                late.start_soon(too_late, partial(disk.trim, 0, SIZE))
                late.start_soon(too_late, partial(disk.command, write_of(0), None, NEW))
            assert in_flight(disk) == 1
            running.resume()
        assert await block(disk, 0) == OLD


def test_nor_does_a_thread(start_target: StartTarget) -> None:
    running = start_target(f"lun:size={SIZE}")
    with open_disks([f"{running.url}/0"], {"io-timeout": "1"}) as disks:
        disk = disks.disks[disks.default]
        running.pause()
        long = threading.Thread(
            target=partial(disk.command, write_of(0), None, OLD, timeout_s=100), daemon=True
        )
        long.start()
        until_blocking(lambda: in_flight(disk) == 1)
        for buffer, offset in ((NEW, 0), (NEW[:7], 7)):
            with pytest.raises(CommandTimeout, match="not done within 1 s"):
                disk.write(memoryview(buffer), offset)
        assert in_flight(disk) == 1
        running.resume()
        long.join()
        found = bytearray(BLOCK)
        disk.read_into(memoryview(found), 0)
        assert found == OLD


async def test_a_cancelled_command_is_aborted(start_target: StartTarget) -> None:
    """Its buffer is free then, and the LUN is not locked any more."""
    running = start_target(f"lun:size={SIZE}")
    async with aio.open_disks([f"{running.url}/0"]) as disks:
        disk = disks.disks[disks.default]
        data = bytearray(NEW)
        running.pause()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(disk.command, write_of(0), None, data)
            await until(lambda: in_flight(disk) == 1)
            nursery.cancel_scope.cancel()
            running.resume()
        data.clear()
        await disk.write(memoryview(NEWER), 0)
        assert await block(disk, 0) == NEWER
        await all_ended(session_of(disk).queue)


async def test_request_sense_keeps_nothing_from_the_disk(
    start_target: StartTarget, tmp_path: Path
) -> None:
    """It takes the unit attention of a LUN that has grown, and the disk asks for the size."""
    running = start_target(f"lun:size={SIZE}")
    async with aio.open_disks([f"{running.url}/0"]) as disks:
        disk = disks.disks[disks.default]
        os.truncate(tmp_path / "lun", 2 * SIZE)
        answer = bytearray(252)
        heard = sense.decode(b"")
        while not heard.is_unit_attention:  # the target looks once a second
            await trio.sleep(PAUSE_S)
            result = await disk.command(cdb.request_sense(252), answer)
            heard = sense.decode(bytes(answer[: len(answer) - result.residual]))
        assert heard.code == sense.CAPACITY_CHANGED
        await disk.write(memoryview(NEW), 2 * SIZE - BLOCK)
        assert disk.size == 2 * SIZE


@pytest.mark.logs(logs.RECONNECTED, logs.LOST_POWER)
async def test_a_cache_that_is_switched_on(start_target: StartTarget) -> None:
    """By MODE SELECT, of which the target tells only other initiators: from then on, the journal
    keeps what is written."""
    spec = f"lun:size={SIZE}:volatile-cache=64M"
    running = start_target(spec)
    async with aio.open_disks([f"{running.url}/0"]) as disks:
        parameters = bytes(4) + mode.caching_page(write_cache=False)
        block_of = cdb.mode_select6(len(parameters))
        assert not (await disks.disks["lun0"].command(block_of, None, parameters)).status
    async with aio.open_disks([f"{running.url}/0"]) as disks:
        disk = disks.disks[disks.default]
        assert not disk.info.write_cache
        parameters = bytes(4) + mode.caching_page(write_cache=True)
        answer = await disk.command(block_of, None, parameters)
        assert answer == (status.GOOD, b"", 0, 0)
        await disk.flush()  # before it the journal does not have everything
        await disk.write(memoryview(NEW), 0)
        await disk.write(memoryview(NEWER), BLOCK)
        running.kill()
        start_target(spec, listen=running.listen)
        assert await block(disk, 0) == NEW and await block(disk, 1) == NEWER
        await disk.flush()
