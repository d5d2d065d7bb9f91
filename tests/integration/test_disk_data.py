"""What both faces of the disk read and write, against a real target and a model in memory."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest
import trio

from iserblk.disk.seam import EXTENT_DATA, EXTENT_HOLE, EXTENT_ZERO, AsyncDisk, Extent
from tests.integration.conftest import StartTarget
from tests.support.faces import FACES, one_disk, opened, read, write
from tests.support.target import TargetProcess, running_target

KIB = 1024
MIB = 1 << 20
LUN_SIZE = 32 * MIB
BLOCKS = (512, 4096)
HOLE = EXTENT_HOLE | EXTENT_ZERO

face = pytest.mark.parametrize("face", FACES)
block = pytest.mark.parametrize("block", BLOCKS)


@pytest.fixture(scope="module", params=["iser", "iscsi"])
def target(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TargetProcess]:
    """A target: LUN 0 has blocks of 512 bytes, LUN 1 of 4096. Tests leave any content behind."""
    place = tmp_path_factory.mktemp("luns")
    specs = [f"{place}/{size}:size={LUN_SIZE}:block={size}" for size in BLOCKS]
    with running_target(specs, place / "target.log") as running:
        running.url = running.url.replace("iser://", f"{request.param}://")
        yield running


def url(target: TargetProcess, block: int) -> str:
    return f"{target.url}/{BLOCKS.index(block)}"


def noise(length: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(length)


# shows: SYSTEM-1
@face
@block
async def test_sizes_and_alignments(target: TargetProcess, face: str, block: int) -> None:
    """512 bytes to 8 MiB, and one byte less and more; bytes around the range stay."""
    margin = 2 * 4096
    async with one_disk(face, url(target, block)) as disk:
        assert disk.size == disk.info.size == LUN_SIZE
        assert disk.info.block_size == block
        for seed, (base, more, offset) in enumerate(
            itertools.product(
                (512, 4 * KIB, 64 * KIB, MIB, 8 * MIB), (-1, 0, 1), (margin, margin + 1, 12_795)
            )
        ):
            length = base + more
            around = noise(length + offset + margin, seed)
            await write(disk, around, 0)
            data = noise(length, seed + 1000)
            await write(disk, data, offset)
            expected = around[:offset] + data + around[offset + length :]
            assert await read(disk, 0, len(expected)) == expected, (length, offset)
            assert await read(disk, offset, length) == data, (length, offset)


@face
@block
async def test_every_small_range_of_three_blocks(
    target: TargetProcess, face: str, block: int
) -> None:
    edges = sorted({0, 1, block - 1, block, block + 1, 2 * block - 1, 2 * block, 3 * block})
    async with one_disk(face, url(target, block)) as disk:
        model = bytearray(noise(3 * block, 1))
        await write(disk, bytes(model), 0)
        for seed, (start, stop) in enumerate(itertools.combinations(edges, 2)):
            data = noise(stop - start, seed)
            await write(disk, data, start)
            model[start:stop] = data
            assert await read(disk, 0, 3 * block) == model, (start, stop)
            assert await read(disk, start, stop - start) == data, (start, stop)


@face
@block
async def test_the_last_bytes(target: TargetProcess, face: str, block: int) -> None:
    async with one_disk(face, url(target, block)) as disk:
        for length in (1, block - 1, block, block + 1, MIB + 1):
            data = noise(length, length)
            await write(disk, data, LUN_SIZE - length)
            assert await read(disk, LUN_SIZE - length, length) == data


@face
async def test_zero_length_does_nothing(target: TargetProcess, face: str) -> None:
    async with one_disk(face, url(target, 512)) as disk:
        before = await read(disk, 0, 4096)
        for offset in (0, 1, LUN_SIZE):
            await read(disk, offset, 0)
            await write(disk, b"", offset)
            await write(disk, b"", offset, fua=True)
            await disk.trim(offset, 0)
            await disk.zero(offset, 0)
            await disk.cache(offset, 0)
        assert await read(disk, 0, 4096) == before


@face
@block
async def test_writers_of_one_block_leave_their_neighbours_alone(
    target: TargetProcess, face: str, block: int
) -> None:
    """Slots of 100 bytes, each owned by one of 16 writers, all writing at once."""
    writers, slot_size, rounds = 16, 100, 12
    slots = 4 * block // slot_size
    model = bytearray(slots * slot_size)
    async with one_disk(face, url(target, block)) as disk:
        await write(disk, bytes(model), 0)

        async def writer(number: int) -> None:
            chance = random.Random(number)
            own = range(number, slots, writers)
            for _ in range(rounds if own else 0):
                at = chance.choice(own) * slot_size
                data = chance.randbytes(slot_size)
                model[at : at + slot_size] = data
                await write(disk, data, at)

        async with trio.open_nursery() as nursery:
            for number in range(writers):
                nursery.start_soon(writer, number)
        assert await read(disk, 0, len(model)) == model


@face
@block
async def test_overlapping_writes_of_one_block_happen_one_after_the_other(
    target: TargetProcess, face: str, block: int
) -> None:
    """Writers of part of a block, each with one byte value, against writers of the whole block."""
    start, stop = 100, 300
    async with one_disk(face, url(target, block)) as disk:
        for _ in range(12):
            async with trio.open_nursery() as nursery:
                for value in range(1, 9):
                    nursery.start_soon(write, disk, bytes([value]) * (stop - start), start)
                    nursery.start_soon(write, disk, bytes([100 + value]) * block, 0)
            content = await read(disk, 0, block)
            outside = content[:start] + content[stop:]
            assert len(set(outside)) == 1 and outside[0] > 100
            assert len(set(content[start:stop])) == 1


@face
async def test_flush_fua_and_read_ahead(target: TargetProcess, face: str) -> None:
    data = noise(70_000, 5)
    async with one_disk(face, url(target, 512)) as disk:
        await write(disk, data, 1001)
        await disk.flush()
        await disk.flush()
        await write(disk, data[::-1], 100_001, fua=True)
        await disk.cache(1001, 70_000)
        await disk.cache(0, LUN_SIZE)
        assert await read(disk, 1001, 70_000) == data
        assert await read(disk, 100_001, 70_000) == data[::-1]


@face
@block
@pytest.mark.parametrize(
    ("offset", "length"),
    [(0, 64 * KIB), (1, 64 * KIB), (4095, 1), (4097, 100), (8192, 3 * MIB + 1), (5000, 12_288)],
)
async def test_zero_with_all_its_flags(
    target: TargetProcess, face: str, block: int, offset: int, length: int
) -> None:
    around = noise(offset + length + 10_000, 9)
    expected = around[:offset] + bytes(length) + around[offset + length :]
    async with one_disk(face, url(target, block)) as disk:
        for may_trim, fast, fua in itertools.product((False, True), repeat=3):
            await write(disk, around, 0)
            await disk.zero(offset, length, may_trim=may_trim, fast=fast, fua=fua)
            assert await read(disk, 0, len(around)) == expected, (may_trim, fast, fua)


@face
@block
@pytest.mark.parametrize("fua", [False, True])
@pytest.mark.parametrize(("offset", "length"), [(0, MIB), (1, MIB), (4095, 4098), (5000, 100)])
async def test_trim_takes_whole_granules_only(
    target: TargetProcess, face: str, block: int, fua: bool, offset: int, length: int
) -> None:
    around = noise(2 * MIB, 11)
    start, stop = -(-offset // 4096) * 4096, (offset + length) // 4096 * 4096
    async with one_disk(face, url(target, block)) as disk:
        assert disk.info.can_trim and disk.info.zero_by_unmap
        await write(disk, around, 0)
        await disk.trim(offset, length, fua)
        content = await read(disk, 0, len(around))
        if start < stop:
            assert content == around[:start] + bytes(stop - start) + around[stop:]
        else:
            assert content == around


async def whole_map(disk: AsyncDisk, start: int, stop: int) -> list[Extent]:
    """All extents of the range, from as many calls as needed; equal neighbours are merged."""
    found: list[Extent] = []
    while start < stop:
        for offset, length, flags in await disk.extents(start, stop - start):
            assert offset == start and length > 0
            if found and found[-1][2] == flags:
                found[-1] = (found[-1][0], found[-1][1] + length, flags)
            else:
                found.append((offset, length, flags))
            start += length
    assert start == stop
    return found


@face
async def test_extents_are_what_was_written(start_target: StartTarget, face: str) -> None:
    """On a file system whose blocks are 4 KiB and which tells holes from data."""
    async with one_disk(face, f"{start_target('fresh:size=64M').url}/0") as disk:
        assert await whole_map(disk, 0, disk.size) == [(0, disk.size, HOLE)]
        await write(disk, noise(64 * KIB, 1), MIB)
        await write(disk, noise(4 * KIB, 2), 3 * MIB)
        await disk.flush()
        expected = [
            (0, MIB, HOLE),
            (MIB, 64 * KIB, EXTENT_DATA),
            (MIB + 64 * KIB, 2 * MIB - 64 * KIB, HOLE),
            (3 * MIB, 4 * KIB, EXTENT_DATA),
            (3 * MIB + 4 * KIB, 61 * MIB - 4 * KIB, HOLE),
        ]
        assert await whole_map(disk, 0, disk.size) == expected
        # Any range, aligned or not, is a part of the same map.
        assert await whole_map(disk, MIB + 1, 3 * MIB + 1) == [
            (MIB + 1, 64 * KIB - 1, EXTENT_DATA),
            (MIB + 64 * KIB, 2 * MIB - 64 * KIB, HOLE),
            (3 * MIB, 1, EXTENT_DATA),
        ]
        await disk.trim(MIB + 16 * KIB, 16 * KIB)
        await disk.zero(3 * MIB, 4 * KIB, may_trim=True)
        assert await whole_map(disk, MIB, disk.size) == [
            (MIB, 16 * KIB, EXTENT_DATA),
            (MIB + 16 * KIB, 16 * KIB, HOLE),
            (MIB + 32 * KIB, 32 * KIB, EXTENT_DATA),
            (MIB + 64 * KIB, 63 * MIB - 64 * KIB, HOLE),
        ]


@face
async def test_more_extents_than_one_answer_holds(start_target: StartTarget, face: str) -> None:
    count = 1500
    async with one_disk(face, f"{start_target('fresh:size=64M').url}/0") as disk:
        for number in range(count):
            await write(disk, b"x" * 4096, number * 8192)
        found = await whole_map(disk, 0, count * 8192)
    assert found == [(at * 4096, 4096, HOLE if at % 2 else EXTENT_DATA) for at in range(2 * count)]


@face
async def test_several_luns_of_one_url(start_target: StartTarget, face: str) -> None:
    """A URL without a LUN means all LUNs; each has its own bytes."""
    sizes = [MIB, 2 * MIB, 3 * MIB]
    running = start_target(*(f"file{i}:size={size}" for i, size in enumerate(sizes)))
    async with opened(face, running.url) as disks:
        assert list(disks) == ["lun0", "lun1", "lun2"]
        assert [disk.size for disk in disks.values()] == sizes
        for number, disk in enumerate(disks.values()):
            await write(disk, bytes([number]) * MIB, 0)
        for number, disk in enumerate(disks.values()):
            assert await read(disk, 0, MIB) == bytes([number]) * MIB
        serials = {disk.info.serial for disk in disks.values()}
        assert len(serials) == len(disks)


@face
async def test_two_urls_keep_their_order(start_target: StartTarget, face: str) -> None:
    running = start_target("first:size=1M", "second:size=2M")
    async with opened(face, f"{running.url}/1", f"{running.url}/0") as disks:
        assert [(name, disk.size) for name, disk in disks.items()] == [
            ("lun1", 2 * MIB),
            ("lun0", MIB),
        ]


@face
@pytest.mark.parametrize(
    "options",
    [
        {"mpa-crc": "no"},
        {"queue-depth": "1"},
        {"immediate-data": "yes"},
        {"immediate-data": "no"},
        {"mpa-frames": "1"},
        {"mpa-frames": "2"},
    ],
)
async def test_the_connection_options_change_no_byte(
    target: TargetProcess, face: str, options: dict[str, str]
) -> None:
    async with one_disk(face, url(target, 512), options) as disk:
        for length in (1, 512, 4096, 8192, 16384, 16385, 20480, 100_000, 3 * MIB + 17):
            data = noise(length, length)
            await write(disk, data, 777)
            assert await read(disk, 777, length) == data


@face
@pytest.mark.parametrize(("option", "crc"), [("yes", True), ("no", False)])
async def test_crc_is_used_when_the_initiator_asks(
    target: TargetProcess, face: str, option: str, crc: bool
) -> None:
    where = url(target, 512).replace("iscsi://", "iser://")
    async with one_disk(face, where, {"mpa-crc": option}) as disk:
        assert disk.info.connection["mpa_crc"] is crc


@face
async def test_a_lun_of_more_than_4_gib(start_target: StartTarget, face: str) -> None:
    """Lengths that do not fit into 32 bits of bytes, and LBAs beyond 32 bits of them."""
    size = 3 << 40
    async with one_disk(face, f"{start_target(f'huge:size={size}').url}/0") as disk:
        assert disk.size == size
        data = noise(8192, 3)
        for offset in (4 * 1024 * MIB - 4096, 2 * 1024**4 - 100, size - 8192):
            await write(disk, data, offset)
            assert await read(disk, offset, 8192) == data
        await disk.trim(0, (1 << 32) - 1)
        await disk.zero(1, (1 << 32) - 1, may_trim=True)
        assert await read(disk, 4 * 1024 * MIB - 4096, 8192) == bytes(4096) + data[4096:]
