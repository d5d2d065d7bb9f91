"""Two hosts write to one LUN, and its target loses its cache: with ``shared=yes`` a host must not
send writes of its journal over what the other host wrote later."""

from __future__ import annotations

import pytest

from iserblk.errors import IserblkError
from tests.integration.conftest import StartTarget
from tests.support import logs
from tests.support.faces import FACES, one_disk, read, write
from tests.support.faults.proxy import FaultProxy

pytestmark = pytest.mark.logs(logs.LOST_POWER, logs.LOST_WRITES, logs.RECONNECTED)

SPEC = "lun:size=8M:volatile-cache=64M"
SIZE = 8192
OLD, NEW, OTHER = (byte * SIZE for byte in (b"o", b"n", b"x"))

face = pytest.mark.parametrize("face", FACES)
transport = pytest.mark.parametrize("transport", ["iser", "iscsi"])


@face
@transport
@pytest.mark.parametrize("shared", ["yes", "no"])
async def test_a_newer_write_of_another_host(
    start_target: StartTarget, face: str, transport: str, shared: str
) -> None:
    """With ``shared=yes`` the newer write stays, and the host that lost data is told at the next
    flush. With ``shared=no`` the newer write is overwritten: so this test can fail."""
    running = start_target(SPEC)
    url = f"{running.url}/0".replace("iser:", f"{transport}:")
    async with one_disk(face, url, {"shared": shared}) as disk:
        await write(disk, OLD, 0)  # in the target's cache, and in this host's journal
        await write(disk, OTHER, 1 << 20)
        async with one_disk(face, url, {"shared": "yes"}) as neighbour:
            await write(neighbour, NEW, 0, fua=True)
        running.kill()
        running = start_target(SPEC, listen=running.listen)
        if shared == "no":
            assert await read(disk, 0, SIZE) == OLD
            assert await read(disk, 1 << 20, SIZE) == OTHER
            await disk.flush()
            return
        assert await read(disk, 0, SIZE) == NEW
        with pytest.raises(IserblkError, match="lost"):
            await disk.flush()
        assert await read(disk, 0, SIZE) == NEW
        assert await read(disk, 1 << 20, SIZE) == bytes(SIZE)  # lost, and the flush said so
        # Later requests succeed.
        await write(disk, OTHER, 1 << 20)
        await disk.flush()
    running.kill()
    running = start_target(SPEC, listen=running.listen)
    async with one_disk(face, url) as disk:
        assert await read(disk, 0, SIZE) == NEW
        assert await read(disk, 1 << 20, SIZE) == OTHER


@face
@transport
async def test_the_journal_restores_what_a_lost_cache_lost(
    start_target: StartTarget, face: str, transport: str
) -> None:
    """The journal restores lost writes in order, after two losses. Flushed writes are not sent
    again."""
    running = start_target(SPEC)
    url = f"{running.url}/0".replace("iser:", f"{transport}:")
    async with one_disk(face, url) as disk:
        await write(disk, OLD, 0)
        await disk.flush()
        await write(disk, NEW, 4096)
        await disk.zero(0, 512)
        await write(disk, OTHER[:512], 1024)
        expected = bytes(512) + OLD[:512] + OTHER[:512] + OLD[:2560] + NEW
        for _ in range(2):
            running.kill()
            running = start_target(SPEC, listen=running.listen)
            assert await read(disk, 0, len(expected)) == expected
        await disk.flush()
    running.kill()
    running = start_target(SPEC, listen=running.listen)
    async with one_disk(face, url) as disk:
        assert await read(disk, 0, len(expected)) == expected


@face
async def test_the_cache_does_lose_it(start_target: StartTarget, face: str) -> None:
    """The target does lose its cache: else the two tests above would prove nothing."""
    running = start_target(SPEC)
    async with one_disk(face, f"{running.url}/0", {"journal": "off"}) as disk:
        await write(disk, OLD, 0)
        running.kill()
        running = start_target(SPEC, listen=running.listen)
        assert await read(disk, 0, SIZE) == bytes(SIZE)
        with pytest.raises(IserblkError, match="lost"):
            await disk.flush()


@face
@transport
async def test_what_was_written_through_is_not_passed_by_older_writes(
    start_target: StartTarget, face: str, transport: str
) -> None:
    """A write with FUA covers a write that is in the journal. The journal must not send the older
    write again: its bytes would replace the newer ones in the cache, and perhaps on the medium."""
    running = start_target(SPEC)
    with FaultProxy(("127.0.0.1", running.port)) as proxy:
        url = proxy.through(f"{running.url}/0").replace("iser:", f"{transport}:")
        async with one_disk(face, url) as disk:
            await write(disk, OLD, 0)
            await write(disk, NEW, 0, fua=True)
            proxy.cut()
            assert await read(disk, 0, SIZE) == NEW
            again = proxy.links[-1].up.units
            assert len(proxy.links) > 1 and any(unit.cdb for unit in again)
            assert not any(unit.is_write_command for unit in again)
            running.kill()
    running = start_target(SPEC, listen=running.listen)
    async with one_disk(face, f"{running.url}/0") as disk:
        assert await read(disk, 0, SIZE) == NEW
