"""Our initiator on software iWARP, and LIO's iSER target on the kernel's siw."""

from __future__ import annotations

import logging
import os
import random
import subprocess

import pytest
import trio

from iserblk.disk.aio import open_disks
from tests.support.blockwork import everything
from tests.support.interop import Record

PIECE, PIECES = 1 << 20, 32


def set_mtu(mtu: int) -> None:
    """Set the MTU of the link that connects the guest with itself."""
    subprocess.run(["ip", "link", "set", "lo", "mtu", str(mtu)], check=True)


# shows: SYSTEM-1, SYSTEM-13, SYSTEM-53
@pytest.mark.parametrize(
    ("crc", "mtu", "frames"),
    [
        ("yes", 65536, "auto"),
        ("no", 65536, "auto"),
        ("yes", 1500, "auto"),
        pytest.param("no", 1500, "auto", marks=pytest.mark.long),
        pytest.param("yes", 1500, "8", marks=pytest.mark.long),
    ],
)
async def test_all_block_operations(crc: str, mtu: int, frames: str, record: Record) -> None:
    set_mtu(mtu)
    options = {"rcap": "iwarp", "mpa-crc": crc, "mpa-frames": frames}
    outcome = await everything(os.environ["LAB_URL"], options)
    assert outcome.connection["provider"] == "iwarp"
    record(
        ours="initiator, software iWARP",
        peer="LIO isert on siw",
        transport=f"iWARP, CRC {'on' if crc == 'yes' else 'off'}, MTU {mtu}"
        + (f", frames of {frames} segments" if frames != "auto" else ""),
        outcome=outcome,
    )


@pytest.mark.parametrize("immediate", ["yes", "no"])
async def test_writes_around_the_size_of_its_receives(
    immediate: str, caplog: pytest.LogCaptureFixture
) -> None:
    """LIO accepts the offered message size, whatever it is, but its receives have 8,268 bytes."""
    set_mtu(65536)
    options = {"rcap": "iwarp", "immediate-data": immediate}
    async with open_disks([os.environ["LAB_URL"]], options) as disks:
        disk = disks.disks[disks.default]
        for size in (4096, 8192, 8704, 12288, 16384, 16896):
            data = random.Random(size).randbytes(size)
            await disk.write(memoryview(data), 1 << 20)
            back = bytearray(size)
            await disk.read_into(memoryview(back), 1 << 20)
            assert back == data
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("mtu", "frames", "mulpdu"),
    [
        (1500, "1", 1442),
        (1500, "8", 8 * 1448 - 6),
        pytest.param(1500, "64", 45 * 1448 - 6, marks=pytest.mark.long),
        (1499, "8", 1438),
    ],
)
async def test_no_crc_is_split_when_windows_fill_up(
    mtu: int, frames: str, mulpdu: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Frames are sent faster than siw takes them, so that TCP also cuts where the window ends. siw
    ends the connection when a CRC is cut in two. With MTU 1499 segments are no multiple of four
    bytes."""
    set_mtu(mtu)
    options = {"rcap": "iwarp", "mpa-crc": "yes", "mpa-frames": frames, "queue-depth": "32"}
    async with open_disks([os.environ["LAB_URL"]], options) as disks:
        disk = disks.disks[disks.default]
        data = random.Random(frames).randbytes(PIECE + PIECES)

        async def write(index: int) -> None:
            await disk.write(memoryview(data)[index : index + PIECE], index * PIECE)

        async with trio.open_nursery() as nursery:
            for index in range(PIECES):
                nursery.start_soon(write, index)
        back = bytearray(PIECE)
        for index in range(PIECES):
            await disk.read_into(memoryview(back), index * PIECE)
            assert back == data[index : index + PIECE]
        assert disk.info.connection["mulpdu"] == mulpdu
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]
