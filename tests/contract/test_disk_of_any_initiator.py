"""The disk's contract suite, and a client of NBD, over an initiator that is not iSCSI's."""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import pytest
import trio

from iserblk.disk.request_queue import open_queue
from iserblk.errors import ScsiError
from iserblk.scsi import cdb, opcodes
from tests.integration import test_disk_data as suite
from tests.support.faces import MEMORY, InQueue, one_disk, read, write
from tests.support.nbd_disk import FORMS, through_nbd
from tests.support.plain_initiator import plain_disk

MIB = 1 << 20


class Memory(NamedTuple):
    """In place of a target: where the disks of a test are."""

    url: str


def memory(spec: str = "") -> Memory:
    """``spec``: as ``start_target`` has it."""
    found = re.search(r"size=(\d+)(M?)", spec)
    size = int(found[1]) << (20 if found[2] else 0) if found else suite.LUN_SIZE
    return Memory(f"{MEMORY}:{size}")


Test = Callable[..., Awaitable[None]]
# Those that are about several LUNs, or about a connection.
OF_ISCSI = {
    "test_several_luns_of_one_url",
    "test_two_urls_keep_their_order",
    "test_the_connection_options_change_no_byte",
    "test_crc_is_used_when_the_initiator_asks",
}


def cases() -> list[tuple[Test, dict[str, object]]]:
    """Every test of the suite that is about a disk, with all parameters but its face."""
    found: list[tuple[Test, dict[str, object]]] = []
    for name, test in vars(suite).items():
        if not name.startswith("test_") or name in OF_ISCSI:
            continue
        values: list[dict[str, object]] = [{}]
        for mark in getattr(test, "pytestmark", []):
            if mark.name != "parametrize" or mark.args[0] == "face":
                continue
            names = mark.args[0] if isinstance(mark.args[0], tuple) else mark.args[0].split(",")
            names = [each.strip() for each in names]
            values = [
                {**before, **dict(zip(names, each if len(names) > 1 else (each,), strict=True))}
                for before in values
                for each in mark.args[1]
            ]
        found += [(test, each) for each in values]
    return found


@pytest.mark.parametrize(
    ("test", "values"), cases(), ids=lambda each: getattr(each, "__name__", str(each))
)
async def test_the_suite(test: Test, values: dict[str, object]) -> None:
    places = {"target": memory(), "start_target": memory, "face": MEMORY}
    wanted = inspect.signature(test).parameters
    await test(**{name: each for name, each in places.items() if name in wanted}, **values)


def test_the_suite_is_there() -> None:
    assert len({test for test, _ in cases()}) >= 10
    assert all(hasattr(suite, name) for name in OF_ISCSI)


async def test_a_queue_of_requests() -> None:
    async with (
        plain_disk(MIB) as direct,
        trio.open_nursery() as nursery,
        open_queue(direct) as queue,
    ):
        disk = InQueue(direct, queue)
        nursery.start_soon(disk.hand_out)
        data = suite.noise(64 * 1024 + 100, 1)
        await write(disk, data, 77)
        await disk.flush()
        assert await read(disk, 77, len(data)) == data
        nursery.cancel_scope.cancel()


async def test_clients_of_nbd() -> None:
    """Their requests go the quick way, by plain calls, and that of operations."""
    async with plain_disk(8 * MIB) as direct, through_nbd(direct, FORMS, 0) as disk:
        for seed, (offset, length) in enumerate(
            ((0, 4096), (512, 511), (4097, MIB), (MIB, 3 * MIB))
        ):
            data = suite.noise(length, seed)
            await write(disk, data, offset)
            assert await read(disk, offset, length) == data
        await disk.zero(MIB, MIB)
        assert not any(await read(disk, MIB, MIB))
        await disk.flush()


async def test_commands_of_the_callers_own() -> None:
    async with plain_disk(MIB) as disk:
        buffer = bytearray(96)
        assert (await disk.command(cdb.inquiry(96), buffer)).status == 0
        assert any(buffer)
        unknown = await disk.command(bytes((0xFF,)).ljust(16, b"\0"))
        assert unknown.decoded.is_unknown_command


async def test_an_error_of_the_lun_is_one_of_the_request() -> None:
    async with plain_disk(MIB) as disk:
        await write(disk, b"x" * 512, 0)
        disk.core.size += 512  # as if the LUN had shrunk since
        with pytest.raises(ScsiError):
            await read(disk, MIB, 512)
        assert await read(disk, 0, 512) == b"x" * 512


async def test_a_flush_is_sent_once() -> None:
    async with plain_disk(MIB) as disk:
        await write(disk, b"x" * 512, 0)
        assert disk.dirty
        await disk.flush()
        executed = disk.core.session.executed  # type: ignore[attr-defined]
        assert executed.count(opcodes.SYNCHRONIZE_CACHE_16) == 1 and not disk.dirty


async def test_a_cancelled_request_leaves_no_command_behind() -> None:
    async with plain_disk(MIB) as disk:
        with trio.CancelScope() as scope:
            scope.cancel()
            await write(disk, b"x" * 4096, 0)
        assert scope.cancelled_caught
        await write(disk, b"y" * 4096, 0)
        assert await read(disk, 0, 4096) == b"y" * 4096


def test_one_disk_of_memory_has_the_size_that_it_is_given() -> None:
    async def main() -> None:
        async with one_disk(MEMORY, f"{MEMORY}:{MIB}/1") as disk:
            assert (disk.size, disk.info.block_size) == (MIB, 4096)

    trio.run(main)
