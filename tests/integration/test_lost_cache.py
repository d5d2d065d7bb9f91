"""A target dies with its cache and comes back: nothing is lost, or the next flush says so."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path

import pytest
import trio

from iserblk.disk.seam import AsyncDisk
from iserblk.errors import IserblkError
from iserblk.nbd import messages as nbd
from tests.integration.conftest import StartTarget
from tests.support import logs
from tests.support.faces import FACES, NBD, QUEUE, one_disk, read, write
from tests.support.nbd_client import RawClient, connected, request
from tests.support.nbdkit import running_nbd
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


class Writer:
    """A client of an NBD server, which writes to a region of its own: with FUA now and then, and
    with flushes; and which breaks its connection off in the middle of a write, now and then."""

    def __init__(self, path: Path, number: int) -> None:
        self.base = number * MIB
        self.model = bytearray(MIB)  # what has been acknowledged
        # By block of 512 bytes: what a write before a break may have done, or may still do.
        self.perhaps: dict[int, list[bytes]] = {}
        self.done = 0
        self._path = path
        self._chance = random.Random(number)

    async def work(self, steps: int) -> None:
        client = await connected(self._path)
        for step in range(steps):
            offset = self._chance.randrange(MIB // 4096 - 16) * 4096
            data = self._chance.randbytes(self._chance.choice((512, 4096, 60_416)))
            fua = nbd.FLAG_FUA if step % 5 == 2 else 0
            message = request(nbd.WRITE, self.base + offset, len(data), step, fua) + data
            if step % 12 == 11:
                await client.send(message)
                await trio.aclose_forcefully(client.stream)
                client = await connected(self._path)
                for at in range(0, len(data), 512):
                    self.perhaps.setdefault(offset + at, []).append(data[at : at + 512])
            else:
                await self._ask(client, message)
                self.model[offset : offset + len(data)] = data
            if step % 15 == 14:
                await self._ask(client, request(nbd.FLUSH))
            self.done += 1
        # What is acknowledged now is not lost, whatever comes.
        await self._ask(client, request(nbd.FLUSH))
        async with client:
            await client.send(request(nbd.DISC))

    async def _ask(self, client: RawClient, message: bytes) -> None:
        await client.send(message)
        assert (await client.reply()).error == 0

    def check(self, found: bytes) -> None:
        for at in range(0, MIB, 512):
            good = [bytes(self.model[at : at + 512]), *self.perhaps.get(at, ())]
            assert found[at : at + 512] in good, f"block at {at}"


async def test_killed_while_nbd_clients_write_and_leave(
    start_target: StartTarget, tmp_path: Path
) -> None:
    """Each on a connection of its own. What was acknowledged before a flush that succeeded is there
    when the target has lost its cache for the last time, too."""
    running = start_target(SPEC)
    words = ("io-timeout=60",)
    with running_nbd("iserblk", [f"{running.url}/0"], tmp_path, parameters=words):
        path = tmp_path / "nbd.sock"
        writers = [Writer(path, number) for number in range(6)]
        async with trio.open_nursery() as nursery:
            for each in writers:
                nursery.start_soon(each.work, 90)
            for part in range(1, 4):
                await until(lambda: sum(each.done for each in writers) >= 120 * part)  # noqa: B023
                running.kill()
                running = start_target(SPEC, listen=running.listen)
        running.kill()
        running = start_target(SPEC, listen=running.listen)
    async with one_disk("async", f"{running.url}/0", {}) as disk:
        for each in writers:
            each.check(await read(disk, each.base, MIB))
