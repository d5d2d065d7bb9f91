"""XDWRITEREAD(10) from our initiator to our target, over iSER and TCP, for threads and trio."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial

import pytest
import trio

from iserblk import aio
from iserblk.commands.command import Operation
from iserblk.commands.running import command
from iserblk.disk.aio import TrioDisk
from iserblk.disk.blocking import open_disks
from iserblk.disk.lun.operations import DiskCore
from iserblk.errors import OutOfRange
from iserblk.scsi import cdb
from tests.support.cores import core_of, in_thread
from tests.support.target import TargetProcess, running_target

SIZE = 4 << 20
WAYS = {
    "iser": ("iser", {}),
    "iser-nocrc": ("iser", {"mpa-crc": "no"}),
    "tcp": ("iscsi", {}),
    "tcp-digests": ("iscsi", {"header-digest": "crc32c", "data-digest": "crc32c"}),
    "tcp-r2t": ("iscsi", {"immediate-data": "no"}),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TargetProcess]:
    place = tmp_path_factory.mktemp("lun")
    with running_target([f"{place}/lun:size={SIZE}"], place / "target.log") as running:
        yield running


def exchange(core: DiskCore, lba: int, out: bytes, back: bytearray) -> Operation[int]:
    return command(
        core.session,
        core.lun,
        cdb.xdwriteread10(lba, len(out) // 512),
        core.info.name,
        data_in=memoryview(back),
        data_out=memoryview(out),
    )


def xor(one: bytes, two: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(one, two, strict=True))


# shows: SYSTEM-36
@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("size", [512, 4096, 65536, 300 * 512, 1 << 20])
def test_for_threads(target: TargetProcess, way: str, size: int) -> None:
    """The blocks have the new data, and the answer is its exclusive or with the old.

    proves: ISER-9.5.3-1
    """
    scheme, options = WAYS[way]
    url = f"{target.url.replace('iser:', scheme + ':')}/0"
    old, new = (random.Random(seed).randbytes(size) for seed in (size, size + 1))
    back, found = bytearray(size), bytearray(size)
    with open_disks([url], options) as disks:
        disk = disks.disks[disks.default]
        disk.write(memoryview(old), 8 * 512)
        core = core_of(disk)
        moved = in_thread(disk, exchange(core, 8, new, back))
        disk.read_into(memoryview(found), 8 * 512)
        with pytest.raises(OutOfRange):
            in_thread(disk, exchange(core, SIZE // 512, new, bytearray(size)))
    assert moved == size and back == xor(old, new) and found == new
    for buffer in (back, found):
        buffer.clear()  # BufferError while a view of it is left


@pytest.mark.parametrize("way", ["iser", "tcp"])
async def test_for_trio(target: TargetProcess, way: str) -> None:
    """Many at once, between reads and writes of other blocks."""
    scheme, options = WAYS[way]
    url = f"{target.url.replace('iser:', scheme + ':')}/0"
    chance = random.Random(way)
    old, new = ([chance.randbytes(4096) for _ in range(32)] for _ in range(2))
    back = [bytearray(4096) for _ in range(32)]
    async with aio.open_disks([url], options) as disks:
        disk = disks.disks[disks.default]
        assert isinstance(disk, TrioDisk)
        run = disk.driver.run_operation

        async def one(index: int) -> None:
            await run(exchange(disk.core, 8 * index, new[index], back[index]))

        async def other(index: int) -> None:
            data = bytearray(4096)
            await disk.write(memoryview(old[index]), (1 << 20) + 4096 * index)
            await disk.read_into(memoryview(data), (1 << 20) + 4096 * index)
            assert data == old[index]

        await disk.write(memoryview(b"".join(old)), 0)
        async with trio.open_nursery() as nursery:
            for index in range(32):
                nursery.start_soon(partial(one, index))
                nursery.start_soon(partial(other, index))
        found = bytearray(32 * 4096)
        await disk.read_into(memoryview(found), 0)
    assert found == b"".join(new)
    assert back == [xor(one, two) for one, two in zip(old, new, strict=True)]
