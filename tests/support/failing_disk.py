"""A disk that cannot keep what the kernel writes back, and the block that is changed in part while
the report of that is on its way."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest
import trio

from iserblk.disk.seam import AsyncDisk
from iserblk.errors import IserblkError
from iserblk.iscsi import bhs
from iserblk.scsi import opcodes
from iserblk.scsi.cdb import FUA
from tests.support.endurance import disk_and_session
from tests.support.faces import read, write
from tests.support.faults.behaviours import Hold, Item
from tests.support.faults.framing import Unit
from tests.support.faults.proxy import FaultProxy
from tests.support.programs import SLOW_S
from tests.support.until import until

BLOCK = 4096
SIZE = 32 << 20
_WRITE = (opcodes.WRITE_10, opcodes.WRITE_16)
_SYNCHRONIZE = (opcodes.SYNCHRONIZE_CACHE_10, opcodes.SYNCHRONIZE_CACHE_16)
_AT = 8 << 20  # a block of zeroes
_PATIENCE_S = 300.0  # the machine may be emulated
_LOOK_S = 1.0  # for what must not happen

LOST_ANSWER = (
    "its disk does not keep a block, and the status that tells of that is lost with the "
    "connection: with shared=yes a flush tells of it, once"
)  # loses_the_answer_that_tells, as interop.md has it

in_thread = trio.to_thread.run_sync


def _run(*words: object) -> str:
    """Raises CalledProcessError, or OSError."""
    command = [str(word) for word in words]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=SLOW_S)
    return done.stdout.strip()


class FailingDisk:
    """A loop device of SIZE bytes, ``device``, whose file lies in a small file system below
    ``place``. Raises CalledProcessError or OSError without root, loop devices or mounts."""

    def __init__(self, place: Path, room: int = 1 << 20, block: int = 512) -> None:
        self._place = place
        self._filler = place / "filler"
        place.mkdir()
        _run("mount", "-t", "tmpfs", "-o", f"size={room}", "tmpfs", place)
        medium = place / "medium"
        with medium.open("wb") as file:
            file.truncate(SIZE)
        try:
            words = ("losetup", "--find", "--show", "--sector-size", str(block))
            self.device = _run(*words, medium)
        except BaseException:
            _run("umount", place)
            raise

    def fill(self) -> None:
        """From now on it takes no block that it has not taken before."""
        with self._filler.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(BLOCK))
            except OSError:
                pass

    def empty(self) -> None:
        """It takes all blocks again."""
        self._filler.unlink()

    def write_back(self) -> None:
        """Have the kernel write back all that it has cached of the device, and forget it."""
        _run("blockdev", "--flushbufs", self.device)

    def remove(self) -> None:
        _run("losetup", "--detach", self.device)
        _run("umount", self._place)


class _Notes:
    """Notes the tags of the commands that pass for which a target calls fsync."""

    def __init__(self, tags: set[int]) -> None:
        self._tags = tags

    def take(self, item: Item) -> Iterable[Item]:
        if isinstance(item, Unit) and item.cdb:
            durably = item.cdb[0] in _WRITE and item.cdb[1] & FUA
            if durably or item.cdb[0] in _SYNCHRONIZE:
                self._tags.add(item.itt)
        return [item]


def _held(proxy: FaultProxy) -> Hold:
    """Holds the statuses of these commands, on the one connection."""
    tags: set[int] = set()
    hold = Hold(lambda unit: unit.opcode == bhs.SCSI_RESPONSE and unit.itt in tags)
    assert proxy.stack(True, lambda _flow: _Notes(tags)) == 1
    proxy.stack(False, lambda _flow: hold)
    return hold


async def _lose_a_block(disk: AsyncDisk, disk_below: FailingDisk) -> None:
    """Write it; the kernel does not keep it. Nothing tells of the loss yet."""
    await in_thread(disk_below.fill)
    await write(disk, b"w" * BLOCK, _AT)
    await in_thread(disk_below.write_back)
    assert await read(disk, _AT, BLOCK) == bytes(BLOCK)
    await in_thread(disk_below.empty)


async def _is_whole(disk: AsyncDisk, disk_below: FailingDisk) -> None:
    """With the part that was changed; also on the disk."""
    whole = b"w" * 512 + b"x" * 512 + b"w" * (BLOCK - 1024)
    assert await read(disk, _AT, BLOCK) == whole
    await in_thread(disk_below.write_back)
    assert await read(disk, _AT, BLOCK) == whole


async def changes_a_dropped_block_in_part(
    url: str, proxy: FaultProxy, disk_below: FailingDisk, hears: bool
) -> None:
    """A block is written, lost when the kernel writes it back, and then changed in part: no flush
    has told of the loss. ``hears``: of the flush that comes before the change; else its status is
    lost with the connection. ``url``: leads through ``proxy``."""
    async with disk_and_session("async", url, {"io-timeout": "120"}) as (disk, session):
        assert disk.info.block_size == BLOCK and disk.info.write_cache
        await _lose_a_block(disk, disk_below)
        hold = None if hears else _held(proxy)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(write, disk, b"x" * 512, _AT + 512)
            if hold is not None:
                with trio.fail_after(_PATIENCE_S):
                    await until(lambda: hold.holding)
                proxy.cut()
        await disk.flush()
        await _is_whole(disk, disk_below)
        assert session.counts.reconnects == 1


async def changes_a_block_in_part(
    url: str, proxy: FaultProxy, disk_below: FailingDisk, connections: int
) -> None:
    """A block is written, and lost when the kernel writes it back. The target says so with the end
    of a SYNCHRONIZE CACHE, which is held back while a part of the block is written. ``url``: leads
    through ``proxy``."""
    options = {"io-timeout": "120", "connections": str(connections)}
    async with disk_and_session("async", url, options) as (disk, session):
        with trio.fail_after(_PATIENCE_S):
            await until(lambda: session.count == connections)
        assert disk.info.block_size == BLOCK and disk.info.write_cache
        await _lose_a_block(disk, disk_below)

        tags: set[int] = set()
        holds: list[Hold] = []

        def hold(_flow: object) -> Hold:
            made = Hold(lambda unit: unit.opcode == bhs.SCSI_RESPONSE and unit.itt in tags)
            holds.append(made)
            return made

        proxy.stack(True, lambda _flow: _Notes(tags))
        proxy.stack(False, hold)
        written = trio.Event()

        async def flush() -> None:
            with pytest.raises(IserblkError):
                await disk.flush()

        async def change() -> None:
            await write(disk, b"x" * 512, _AT + 512)
            written.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(flush)
            with trio.fail_after(_PATIENCE_S):
                await until(lambda: any(each.holding for each in holds))
            nursery.start_soon(change)
            with trio.move_on_after(_LOOK_S):
                await written.wait()
            assert not written.is_set(), "changed while a report of a loss is on its way"
            for each in holds:
                if each.holding:
                    proxy.release(each)
        await disk.flush()
        await _is_whole(disk, disk_below)
        assert session.counts.reconnects == 1


async def loses_the_answer_that_tells(
    url: str, proxy: FaultProxy, disk_below: FailingDisk, fua: bool
) -> None:
    """With ``shared=yes``: a block is written, and the kernel cannot write it back for a flush, or
    for a write with FUA beside it (``fua``). The status, which says so, is lost with the
    connection, and reads go on showing the block: the next flush tells of the loss all the same,
    once. ``url``: leads through ``proxy``."""
    options = {"io-timeout": "120", "shared": "yes"}
    async with disk_and_session("async", url, options) as (disk, session):
        assert disk.info.write_cache
        await write(disk, b"a" * BLOCK, 0)
        await disk.flush()
        await in_thread(disk_below.fill)
        await write(disk, b"w" * BLOCK, _AT)
        hold = _held(proxy)

        async def durably() -> None:
            await write(disk, b"b" * BLOCK, 0, fua=True)

        async def flush() -> None:
            with pytest.raises(IserblkError):
                await disk.flush()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(durably if fua else flush)
            with trio.fail_after(_PATIENCE_S):
                await until(lambda: hold.holding)
            await in_thread(disk_below.empty)
            proxy.cut()
        if fua:
            await flush()
        assert await read(disk, _AT, BLOCK) == b"w" * BLOCK
        await disk.flush()
        assert session.counts.reconnects == 1
        await in_thread(disk_below.write_back)
        assert await read(disk, _AT, BLOCK) == bytes(BLOCK)
        await write(disk, b"w" * BLOCK, _AT)
        await disk.flush()
        await in_thread(disk_below.write_back)
        assert await read(disk, _AT, BLOCK) == b"w" * BLOCK
