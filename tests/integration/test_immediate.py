"""Writes that travel with their command, and in Data-Outs behind it, between our two ends over
software iWARP."""

from __future__ import annotations

import random

import pytest
import trio

from iserblk.errors import TransportError
from iserblk.initiator.connecting.reach import connect
from iserblk.options import Options
from iserblk.url import parse_url
from tests.integration.conftest import StartTarget
from tests.support.faces import FACES, one_disk, read, write

KIB = 1024


@pytest.mark.parametrize(("wanted", "most"), [("yes", 16 * KIB), ("no", 0)])
async def test_up_to_16_kib_travel_with_the_command(
    start_target: StartTarget, wanted: str, most: int
) -> None:
    url = f"{start_target('lun:size=1M').url}/0"
    session = await connect(parse_url(url), Options.from_pairs([("immediate-data", wanted)]))
    assert session.queue.connection.immediate_limit == most
    session.fail(TransportError("the end"))


@pytest.mark.parametrize("frames", ["auto", "1"])
async def test_at_the_limit_no_byte_is_lost(start_target: StartTarget, frames: str) -> None:
    url = f"{start_target('lun:size=1M').url}/0"
    async with one_disk("async", url, {"mpa-frames": frames}) as disk:
        for size in (16 * KIB - 512, 16 * KIB, 16 * KIB + 512, 64 * KIB):
            data = random.Random(size).randbytes(size)
            await write(disk, data, 4096)
            assert await read(disk, 4096, size) == data


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("wanted", ["auto", "yes", "no"])
@pytest.mark.parametrize("immediate", ["yes", "no"])
async def test_unsolicited_data(
    start_target: StartTarget, face: str, wanted: str, immediate: str
) -> None:
    """Writes of all lengths up to FirstBurstLength and beyond, alone and many at a time."""
    url = f"{start_target('lun:size=8M').url}/0"
    options = {"unsolicited-data": wanted, "immediate-data": immediate}
    async with one_disk(face, url, options) as disk:
        for size in (16 * KIB + 512, 32 * KIB, 48 * KIB + 512, 64 * KIB, 64 * KIB + 512):
            data = random.Random(size).randbytes(40 * size)
            await write(disk, data[:size], 512)
            assert await read(disk, 512, size) == data[:size]
            async with trio.open_nursery() as nursery:
                for at in range(0, len(data), size):
                    nursery.start_soon(write, disk, data[at : at + size], at)
            assert await read(disk, 0, len(data)) == data
