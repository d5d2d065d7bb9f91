"""A target dies with its cache and comes back: nothing is lost, or the next flush says so."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest
import trio

from iserblk.disk.seam import AsyncDisk
from iserblk.errors import IserblkError
from tests.integration.conftest import StartTarget
from tests.support import logs
from tests.support.faces import FACES, NBD, QUEUE, one_disk, read, write
from tests.support.until import until

pytestmark = pytest.mark.logs(logs.LOST_POWER, logs.LOST_WRITES, logs.RECONNECTED)

KIB = 1024
MIB = 1 << 20
SPEC = "lun:size=8M:volatile-cache=64M"

face = pytest.mark.parametrize("face", (*FACES, QUEUE))


@face
@pytest.mark.parametrize("journal", ["64M", "64k"])
async def test_lost_cache_is_made_good(start_target: StartTarget, face: str, journal: str) -> None:
    running = start_target(SPEC)
    async with one_disk(face, f"{running.url}/0", {"journal": journal}) as disk:
        model = bytearray(8 * MIB)
        chance = random.Random(7)
        for step in range(120):
            length = chance.choice((512, 700, 4 * KIB, 5000, 64 * KIB, 300_001))
            offset = chance.randrange(len(model) - length)
            if step % 10 == 3:
                start, stop = -(-offset // 4096) * 4096, (offset + length) // 4096 * 4096
                if start < stop:
                    await disk.trim(start, stop - start)
                    model[start:stop] = bytes(stop - start)
            elif step % 10 == 6:
                await disk.zero(offset, length)
                model[offset : offset + length] = bytes(length)
            else:
                data = bytearray(chance.randbytes(length))
                await disk.write(memoryview(data), offset)
                model[offset : offset + length] = data
                data[:] = b"\xee" * length  # it is the caller's again
            if step % 40 == 35:
                running.kill()
                running = start_target(SPEC, listen=running.listen)
        assert await read(disk, 0, len(model)) == model
        await disk.flush()
        running.kill()
        running = start_target(SPEC, listen=running.listen)
        assert await read(disk, 0, len(model)) == model


async def test_large_writes_through_nbd_are_made_good(start_target: StartTarget) -> None:
    """The journal keeps them where the server received them; see ``DirectDisk.take_over``."""
    running = start_target(SPEC)
    async with one_disk(NBD, f"{running.url}/0", {"journal": "4M"}) as disk:
        model = bytearray(8 * MIB)
        chance = random.Random(8)
        for step in range(96):
            length = chance.choice((128 * KIB, 192 * KIB, MIB, 4 * KIB))
            offset = chance.randrange((len(model) - length) // 4096) * 4096
            data = chance.randbytes(length)
            await write(disk, data, offset)
            model[offset : offset + length] = data
            if step % 32 == 17:
                await disk.flush()
            if step % 32 == 27:
                running.kill()
                running = start_target(SPEC, listen=running.listen)
        running.kill()
        running = start_target(SPEC, listen=running.listen)
        assert await read(disk, 0, len(model)) == model


async def _lose(disk: AsyncDisk, start_target: StartTarget, running: object) -> None:
    running.kill()  # type: ignore[attr-defined]
    start_target(SPEC, listen=running.listen)  # type: ignore[attr-defined]
    await read(disk, 0, 512)


@face
@pytest.mark.parametrize("options", [{"shared": "yes"}, {"journal": "off"}])
async def test_what_must_not_be_sent_again_is_told(
    start_target: StartTarget, face: str, options: Mapping[str, str]
) -> None:
    running = start_target(SPEC)
    async with one_disk(face, f"{running.url}/0", options) as disk:
        await write(disk, b"f" * 4096, 0)
        await disk.flush()
        await write(disk, b"u" * 4096, 0)
        await _lose(disk, start_target, running)
        assert await read(disk, 0, 4096) == b"f" * 4096
        with pytest.raises(IserblkError, match="lost"):
            await disk.flush()
        await disk.flush()


@face
async def test_killed_while_many_write(start_target: StartTarget, face: str) -> None:
    """Eight tasks write and flush; each knows what its own region must hold."""
    running = start_target(SPEC)
    async with one_disk(face, f"{running.url}/0", {"io-timeout": "60"}) as disk:
        done = 0

        async def client(number: int) -> None:
            nonlocal done
            chance = random.Random(number)
            size = MIB
            base = number * size
            model = bytearray(size)
            for step in range(60):
                length = chance.choice((512, 4 * KIB, 20 * KIB, 100_000))
                offset = chance.randrange(size - length)
                data = chance.randbytes(length)
                await write(disk, data, base + offset)
                model[offset : offset + length] = data
                if step % 15 == 14:
                    await disk.flush()
                assert await read(disk, base + offset, length) == data
                done += 1
            assert await read(disk, base, size) == model
            await disk.flush()
            assert await read(disk, base, size) == model

        async with trio.open_nursery() as nursery:
            for number in range(8):
                nursery.start_soon(client, number)
            for part in range(1, 4):
                goal = 110 * part
                await until(lambda: done >= goal)  # noqa: B023 (awaited within the turn)
                running.kill()
                running = start_target(SPEC, listen=running.listen)
