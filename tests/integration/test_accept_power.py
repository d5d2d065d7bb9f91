"""Power failure: the target, with a volatile cache, is killed in mid-write.

The client gets errors, flushed data is there afterwards, and data that was not flushed is lost. The
loss shows that the check of flushed data can fail.
"""

from __future__ import annotations

import pytest
import trio

from iserblk.disk.seam import AsyncDisk
from iserblk.errors import CommandTimeout
from tests.integration.conftest import StartTarget
from tests.support import logs
from tests.support.faces import FACES, one_disk, read, write

pytestmark = pytest.mark.logs(logs.RECONNECTED)

KIB = 1024
MIB = 1 << 20
CHUNK = 64 * KIB

OLD, FLUSHED, UNFLUSHED, FUA = (byte * CHUNK for byte in (b"o", b"f", b"u", b"F"))
SPEC = "lun:size=64M:volatile-cache=64M"

face = pytest.mark.parametrize("face", FACES)


class _Writers:
    """Eight tasks that write chunks at 32 MiB and up until one finds no target in time.

    ``written``: what was acknowledged. ``busy``: set when a good part of that is there.
    """

    def __init__(self, disk: AsyncDisk) -> None:
        self.disk = disk
        self.written: set[int] = set()
        self.busy = trio.Event()

    async def run(self, number: int) -> None:
        with pytest.raises(CommandTimeout):
            while True:
                for at in range(number, 256, 8):
                    await write(self.disk, UNFLUSHED, 32 * MIB + at * CHUNK)
                    self.written.add(at)
                    if len(self.written) == 64:
                        self.busy.set()


@face
async def test_killed_in_mid_write(start_target: StartTarget, face: str) -> None:
    running = start_target(SPEC)
    # With a journal a write with FUA flushes what is in it.
    options = {"io-timeout": "2", "journal": "off"}
    async with one_disk(face, f"{running.url}/0", options) as disk:
        assert disk.info.write_cache
        for at in range(4):
            await write(disk, OLD, at * CHUNK)
        await disk.flush()
        await write(disk, FLUSHED, 0)
        await disk.zero(CHUNK, CHUNK)
        await disk.trim(8 * MIB, CHUNK)
        await disk.flush()
        await write(disk, UNFLUSHED, 2 * CHUNK)  # over bytes that were flushed
        await disk.zero(3 * CHUNK, CHUNK)
        await write(disk, FUA, 16 * MIB, fua=True)
        await write(disk, FUA[1:], 17 * MIB + 1, fua=True)
        await disk.zero(18 * MIB, CHUNK)
        await write(disk, UNFLUSHED, 19 * MIB)
        writers = _Writers(disk)
        async with trio.open_nursery() as nursery:
            for number in range(8):
                nursery.start_soon(writers.run, number)
            await writers.busy.wait()
            running.kill()
        with pytest.raises(CommandTimeout):
            await disk.flush()
        with pytest.raises(CommandTimeout):
            await read(disk, 0, 512)

    again = start_target(SPEC)
    async with one_disk(face, f"{again.url}/0") as disk:
        # Flushed, or written through: there.
        assert await read(disk, 0, CHUNK) == FLUSHED
        assert await read(disk, CHUNK, CHUNK) == bytes(CHUNK)
        assert await read(disk, 8 * MIB, CHUNK) == bytes(CHUNK)
        assert await read(disk, 16 * MIB, CHUNK) == FUA
        assert await read(disk, 17 * MIB, CHUNK) == b"\0" + FUA[1:]
        # Acknowledged, but never flushed: lost, and what was there before is there again.
        assert await read(disk, 2 * CHUNK, CHUNK) == OLD
        assert await read(disk, 3 * CHUNK, CHUNK) == OLD
        assert await read(disk, 19 * MIB, CHUNK) == bytes(CHUNK)
        for at in writers.written:
            assert await read(disk, 32 * MIB + at * CHUNK, CHUNK) == bytes(CHUNK)


@face
async def test_an_orderly_end_loses_nothing(start_target: StartTarget, face: str) -> None:
    running = start_target(SPEC)
    async with one_disk(face, f"{running.url}/0") as disk:
        await write(disk, UNFLUSHED, MIB)
    running.stop()
    async with one_disk(face, f"{start_target(SPEC).url}/0") as disk:
        assert await read(disk, MIB, CHUNK) == UNFLUSHED


@face
async def test_without_a_write_cache_every_write_is_durable(
    start_target: StartTarget, face: str
) -> None:
    """The initiator sees WCE=0, and a killed target has every write (its host has not failed)."""
    running = start_target("lun:size=8M:wce=0")
    async with one_disk(face, f"{running.url}/0") as disk:
        assert not disk.info.write_cache
        await write(disk, UNFLUSHED, 1)
        running.kill()
    async with one_disk(face, f"{start_target('lun:wce=0').url}/0") as disk:
        assert await read(disk, 1, CHUNK) == UNFLUSHED


@face
async def test_a_flush_reaches_what_other_sessions_wrote(
    start_target: StartTarget, face: str
) -> None:
    """The cache is the LUN's, not the session's."""
    running = start_target(SPEC)
    async with one_disk(face, f"{running.url}/0") as one, one_disk(face, f"{running.url}/0") as two:
        await write(one, FLUSHED, 0)
        await two.flush()
        running.kill()
    async with one_disk(face, f"{start_target(SPEC).url}/0") as disk:
        assert await read(disk, 0, CHUNK) == FLUSHED
