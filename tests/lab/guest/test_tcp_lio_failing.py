"""LIO over a device that fails when the kernel writes its cache back."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from iserblk import aio
from iserblk.disk.seam import AsyncLun
from iserblk.errors import IserblkError
from iserblk.scsi import cdb, opcodes
from iserblk.scsi import status as sam
from iserblk.scsi.cdb import FUA
from tests.lab.guest import lio
from tests.support import failing_disk, logs
from tests.support.faces import write
from tests.support.faults.proxy import FaultProxy
from tests.support.interop import Record

pytestmark = pytest.mark.logs(
    logs.LOST_POWER, logs.LOST_WRITES, logs.RECONNECTED, logs.ONE_OF_SEVERAL
)

MIB = 1 << 20
BEYOND = 8 * MIB  # more than the device takes


@pytest.fixture(autouse=True)
def without_chap() -> Iterator[None]:
    with lio.without_chap():
        yield


@pytest.fixture
def two_connections() -> Iterator[None]:
    with lio.connections(2):
        yield


@pytest.fixture
def through_proxy() -> Iterator[FaultProxy]:
    with FaultProxy((os.environ["LAB_ADDRESS"], int(os.environ["LAB_PORT"]))) as proxy:
        yield proxy


@pytest.fixture
def failing(tmp_path: Path) -> Iterator[lio.Failing]:
    made = lio.Failing(tmp_path / "failing")
    yield made
    made.remove()


async def status_of_write(disk: AsyncLun, at: int, flags: int) -> int:
    """Of a WRITE(16) of a MiB that is sent as it is."""
    block = bytearray(16)
    block[0], block[1] = opcodes.WRITE_16, flags
    block[2:10] = (at // 512).to_bytes(8, "big")
    block[10:14] = (MIB // 512).to_bytes(4, "big")
    return (await disk.command(bytes(block), data_out=b"f" * MIB)).status


async def status_of_flush(disk: AsyncLun) -> int:
    return (await disk.command(cdb.synchronize_cache10(0, 0))).status


async def test_what_lio_says(failing: lio.Failing) -> None:
    """Why its FUA is not used: it hides the loss, also from the SYNCHRONIZE CACHE behind it."""
    async with aio.open_disks([failing.url], {"journal": "off"}) as found:
        (disk,) = found.disks.values()
        assert disk.info.write_cache and not disk.info.fua
        assert await status_of_write(disk, BEYOND, FUA) == sam.GOOD
        assert await status_of_flush(disk) == sam.GOOD
        assert await status_of_write(disk, 2 * BEYOND, 0) == sam.GOOD
        assert await status_of_flush(disk) == sam.CHECK_CONDITION
        assert await status_of_flush(disk) == sam.GOOD


@pytest.mark.parametrize("journal", ["off", "64M"])
async def test_a_write_that_could_not_be_kept(
    failing: lio.Failing, record: Record, journal: str
) -> None:
    """With FUA the write fails. Without, the next flush does."""
    async with aio.open_disks([failing.url], {"journal": journal}) as found:
        (disk,) = found.disks.values()
        await write(disk, b"a" * 4096, 0, fua=True)
        with pytest.raises(IserblkError):
            await write(disk, b"b" * MIB, BEYOND, fua=True)
        await write(disk, b"c" * MIB, 2 * BEYOND)
        with pytest.raises(IserblkError):
            await disk.flush()
    record(
        ours="initiator",
        peer="LIO",
        transport="TCP",
        ran="its disk does not keep what was written: a write with FUA fails, or the next flush",
    )


@pytest.mark.parametrize("fua", [False, True], ids=["flush", "FUA"])
async def test_the_answer_that_tells_of_a_loss_is_lost(
    failing: lio.Failing, through_proxy: FaultProxy, record: Record, fua: bool
) -> None:
    """And the kernel goes on showing what it could not write: a comparison proves nothing."""
    url = through_proxy.through(failing.url)
    await failing_disk.loses_the_answer_that_tells(url, through_proxy, failing.disk, fua)
    record(
        ours="initiator",
        peer="LIO",
        transport="TCP",
        ran=failing_disk.LOST_ANSWER,
    )


@pytest.mark.usefixtures("two_connections")
async def test_a_block_is_changed_in_part_while_the_report_of_a_loss_is_on_its_way(
    tmp_path: Path, through_proxy: FaultProxy, record: Record
) -> None:
    failing = lio.Failing(tmp_path / "failing", failing_disk.BLOCK)
    try:
        url = through_proxy.through(failing.url)
        await failing_disk.changes_a_block_in_part(url, through_proxy, failing.disk, 2)
    finally:
        failing.remove()
    record(
        ours="initiator",
        peer="LIO",
        transport="TCP, connections=2",
        ran="its disk does not keep a block, which is changed in part before a flush tells of "
        "that: it is written again, and then changed",
    )
