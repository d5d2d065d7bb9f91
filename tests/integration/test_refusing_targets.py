"""Targets that say that they can, and refuse: through each face nothing is lost, the first refusal
is remembered, and one line is logged for each kind."""

from __future__ import annotations

import logging
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest
import trio

from iserblk.disk import aio
from iserblk.disk.seam import EXTENT_HOLE, AsyncDisk
from iserblk.errors import IserblkError
from iserblk.scsi import opcodes
from iserblk.target.lunspec import open_lun, parse_lun_spec
from tests.integration.conftest import StartTarget
from tests.support import logs
from tests.support.faces import FACES, GATEWAY, NBD, one_disk, read
from tests.support.gateway import running_gateway
from tests.support.profiles import truenas
from tests.support.refusing import Refusing
from tests.support.target import IQN
from tests.support.target_here import serve

pytestmark = pytest.mark.logs(
    logs.REFUSED, logs.LOST_POWER, logs.RECONNECTED, r"does not know SYNCHRONIZE CACHE"
)

KIB, MIB = 1 << 10, 1 << 20
SIZE = 16 * MIB
PROFILES = (
    *("longhorn", "three_par", "summitstor", "truenas", "equallogic", "oracle_cloud"),
    "burst_bound",
)


class Served:
    """A LUN of a target with the habits of ``profile``."""

    def __init__(self, url: str, device: Refusing, file: Path) -> None:
        self.url = url
        self.device = device
        self.file = file

    def refused(self, *kinds: int) -> int:
        return sum(cdb[0] in kinds for cdb in self.device.refused)


@asynccontextmanager
async def served(tmp_path: Path, profile: str, block: int = 512) -> AsyncIterator[Served]:
    kind: type[Refusing] = import_module(f"tests.support.profiles.{profile}").Device
    made: list[Refusing] = []

    def make(*words: object) -> Refusing:
        made.append(kind(*words))  # type: ignore[arg-type]
        return made[0]

    file = tmp_path / "lun"
    unit = open_lun(parse_lun_spec(f"{file}:size={SIZE}:block={block}"), "test")
    send, receive = trio.open_memory_channel[str](1)
    try:
        async with trio.open_nursery() as nursery:
            target = partial(serve, make_device=make)
            nursery.start_soon(target, "127.0.0.1:0", IQN, {0: unit}, send.send_nowait)
            yield Served(f"{await receive.receive()}/0", made[0], file)
            nursery.cancel_scope.cancel()
    finally:
        unit.close()


async def work(disk: AsyncDisk, steps: int, seed: int) -> bytearray:
    """Write and zero at random places; returns what the disk has to hold."""
    chance = random.Random(seed)
    model = bytearray(SIZE)
    for step in range(steps):
        length = chance.choice((512, 4 * KIB, 5000, 300_001, 2 * MIB, 6 * MIB))
        offset = chance.randrange(SIZE - length)
        if step % 3 == 2:
            await disk.zero(offset, length, may_trim=step % 2 == 0)
            model[offset : offset + length] = bytes(length)
        else:
            data = chance.randbytes(min(length, MIB))
            await disk.write(memoryview(data), offset, step % 4 == 1)
            model[offset : offset + len(data)] = data
    await disk.flush()
    return model


@pytest.mark.parametrize("face", ["async", NBD, GATEWAY])
@pytest.mark.parametrize("profile", PROFILES)
async def test_all_is_carried_out(
    tmp_path: Path, profile: str, face: str, caplog: pytest.LogCaptureFixture
) -> None:
    block = 4096 if profile == "equallogic" else 512
    async with served(tmp_path, profile, block) as target, one_disk(face, target.url) as disk:
        model = await work(disk, 40, 1)
        found = len(target.device.refused)
        offset = 0
        while offset < SIZE:
            extents = await disk.extents(offset, SIZE - offset)
            for start, length, flags in extents:
                assert start == offset
                assert not flags & EXTENT_HOLE or not any(model[start : start + length])
                offset = start + length
        assert await read(disk, 0, SIZE) == model
        if profile in ("longhorn", "three_par", "burst_bound"):
            assert found
            more = target.refused(*(cdb[0] for cdb in target.device.refused))
            assert more <= found + (face == GATEWAY)
    told = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert len(told) <= 2, [each.message for each in told]
    assert target.file.read_bytes() == model


@pytest.mark.parametrize("face", FACES)
async def test_trims_are_not_supported_where_unmap_is_not_known(
    start_target: StartTarget, face: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "iserblk.disk.lun.refusals")
    running = start_target(f"lun:size={SIZE}", profile="summitstor")
    async with one_disk(face, f"{running.url}/0") as disk:
        for _ in range(3):
            with pytest.raises(IserblkError, match="unmap") as raised:
                await disk.trim(0, MIB)
            assert raised.value.exit_status == 27
    assert len([each for each in caplog.records if "UNMAP" in each.message]) == 1


@pytest.mark.parametrize("profile", ["longhorn", "three_par", "burst_bound", "oracle_cloud"])
async def test_threads_have_it_carried_out_as_well(start_target: StartTarget, profile: str) -> None:
    running = start_target(f"lun:size={SIZE}", profile=profile)
    async with one_disk("blocking", f"{running.url}/0") as disk:
        model = await work(disk, 20, 5)
        assert await read(disk, 0, SIZE) == model


async def test_a_gateway_says_what_its_lun_turns_out_to_be(tmp_path: Path) -> None:
    """Its initiators learn it as the gateway does: by a unit attention, and from the pages."""
    async with (
        served(tmp_path, "summitstor") as target,
        running_gateway(target.url) as (url, _),
        aio.open_disks([url]) as one,
    ):
        disk = one.disks["lun0"]
        assert disk.info.can_trim
        for _ in range(3):
            with pytest.raises(IserblkError, match="unmap"):
                await disk.trim(0, MIB)
        async with aio.open_disks([url]) as other:
            assert not other.disks["lun0"].info.can_trim
        assert target.refused(opcodes.UNMAP) == 1


async def test_an_nbd_client_hears_that_trims_are_not_supported(tmp_path: Path) -> None:
    async with served(tmp_path, "summitstor") as target, one_disk(NBD, target.url) as disk:
        for _ in range(3):
            with pytest.raises(IserblkError) as raised:
                await disk.trim(0, MIB)
            assert raised.value.errno == 95  # NBD_ENOTSUP
        assert target.refused(opcodes.UNMAP) == 1


@pytest.mark.parametrize("face", ["async", NBD])
async def test_a_cache_that_cannot_be_flushed(tmp_path: Path, face: str) -> None:
    async with served(tmp_path, "synology") as target, one_disk(face, target.url) as disk:
        await disk.write(memoryview(b"y" * 4096), 0, True)  # FUA makes it durable
        await disk.write(memoryview(b"x" * 4096), 0)
        for _ in range(2):
            with pytest.raises(IserblkError):
                await disk.flush()
        assert await read(disk, 0, 4096) == b"x" * 4096


async def test_max_transfer_spares_the_search(tmp_path: Path) -> None:
    async with (
        served(tmp_path, "burst_bound") as target,
        aio.open_disks([target.url], {"max-transfer": "128k"}) as disks,
    ):
        disk = disks.disks["lun0"]
        assert disk.info.max_transfer == 128 * KIB
        await work(disk, 10, 2)
        assert not target.device.refused


async def test_what_the_last_blocks_do_not_tell_is_data(tmp_path: Path) -> None:
    async with served(tmp_path, "truenas") as target, one_disk("async", target.url) as disk:
        last = SIZE - truenas.LAST * 512
        assert (await disk.extents(0, SIZE))[0][2] & EXTENT_HOLE
        for _ in range(3):
            assert await disk.extents(last, 4096) == [(last, 4096, 0)]
        assert len(target.device.refused) == 1


@pytest.mark.parametrize("profile", ["longhorn", "three_par", "summitstor", "burst_bound"])
async def test_the_target_comes_back_with_less(start_target: StartTarget, profile: str) -> None:
    """Its cache is lost, and what was done before it does not take in that form any more: the
    journal is sent again in forms that it takes."""
    spec = f"lun:size={SIZE}:volatile-cache=64M"
    running = start_target(spec)
    async with one_disk("async", f"{running.url}/0") as disk:
        model = bytearray(b"\xee" * SIZE)
        await disk.write(memoryview(model), 0)
        await disk.flush()
        chance = random.Random(3)
        for step in range(30):
            length = chance.choice((512, 5000, 300_001, MIB, 5 * MIB))
            offset = chance.randrange(SIZE - length)
            if step % 3 == 0:
                await disk.zero(offset, length, may_trim=step % 2 == 0)
                model[offset : offset + length] = bytes(length)
            elif step % 7 == 1:
                await disk.trim(offset, length)  # what it does must not matter: written again
                data = chance.randbytes(length)
                await disk.write(memoryview(data), offset)
                model[offset : offset + length] = data
            else:
                data = chance.randbytes(length)
                await disk.write(memoryview(data), offset)
                model[offset : offset + length] = data
        running.kill()
        running = start_target(spec, listen=running.listen, profile=profile)
        assert await read(disk, 0, SIZE) == model
        await disk.flush()
        running.kill()
        start_target(spec, listen=running.listen, profile=profile)
        assert await read(disk, 0, SIZE) == model
