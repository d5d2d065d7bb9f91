"""A logical unit: its size in blocks, its limits, its identity, and when it writes durably."""

from __future__ import annotations

import errno
from typing import Any

import pytest

from iserblk.errors import BadArgument
from iserblk.scsi import inquiry
from iserblk.target.ports import TargetPorts
from iserblk.target.scsi import unit as unit_module
from iserblk.target.scsi.unit import LogicalUnit
from iserblk.target.seam import Nexus
from tests.target.fake_store import FakeStore

IQN = "iqn.2026-11.example:disk"
ONE, OTHER = Nexus("iqn.x:one", b"isid-1"), Nexus("iqn.x:other", b"isid-2")


def made(size: int = 1 << 20, **options: Any) -> tuple[LogicalUnit, FakeStore]:
    store = FakeStore(size)
    return LogicalUnit(store, **{"serial": "S1", **options}), store


@pytest.mark.parametrize("serial", ["", "x" * 65, "größe", "a\nb", "a\x7f"])
def test_serial_numbers_that_cannot_be(serial: str) -> None:
    with pytest.raises(BadArgument, match="serial"):
        made(serial=serial)


@pytest.mark.parametrize("serial", ["x", "x" * 64, "a serial: number!"])
def test_serial_numbers(serial: str) -> None:
    unit, _ = made(serial=serial)
    page = unit.vpd_pages(IQN)[inquiry.UNIT_SERIAL_NUMBER]
    assert inquiry.decode_serial(memoryview(page)) == serial


@pytest.mark.parametrize("block", [512, 4096])
def test_only_whole_blocks_count(block: int) -> None:
    unit, _ = made(10 * 4096 + 511, block=block)
    assert unit.blocks == 10 * 4096 // block
    assert (unit.capacity.blocks, unit.capacity.block_size) == (unit.blocks, block)


@pytest.mark.parametrize("block", [512, 4096])
def test_limits_are_in_blocks(block: int) -> None:
    """One command asks for no more memory, and no longer work, than the module's constants say."""
    unit, _ = made(block=block)
    page = unit.vpd_pages(IQN)[inquiry.BLOCK_LIMITS]
    limits = inquiry.decode_block_limits(memoryview(page))
    assert limits.max_transfer_length * block == unit_module.MAX_TRANSFER
    assert limits.max_unmap_lba_count * block == unit_module.MAX_UNMAP
    assert limits.max_write_same_length * block == unit_module.MAX_WRITE_SAME
    assert limits.optimal_granularity * block == 4096
    assert unit.max_transfer_blocks == limits.max_transfer_length


def test_a_unit_grows_with_its_file_and_never_shrinks() -> None:
    unit, store = made(1 << 20)
    assert unit.grow() is False
    store.size += 511
    assert unit.grow() is False and unit.blocks == 2048
    store.size += 1
    assert unit.grow() is True
    assert unit.blocks == unit.capacity.blocks == 2049
    assert unit.grow() is False
    store.size = 1 << 19
    assert unit.grow() is False and unit.blocks == 2049


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, True),
        ({"write_cache": False}, False),
        ({"read_only": True}, False),
        ({"read_only": True, "write_cache": False}, False),
    ],
)
def test_whether_a_flush_has_anything_to_do(options: dict[str, Any], expected: bool) -> None:
    unit, _ = made(**options)
    assert unit.must_sync is expected


def test_a_change_is_durable_at_once_without_a_write_cache() -> None:
    unit, store = made(write_cache=False)
    unit.settle(ONE, 0)
    assert store.calls == [("flush",)]
    unit, store = made()
    unit.settle(ONE, 0)
    assert store.calls == []
    unit.flush(ONE)
    assert store.calls == [("flush",)]


def test_a_cache_that_was_turned_off_is_still_flushed_when_asked() -> None:
    """What its last flush could not write is reported to each nexus once, and so to its next."""
    unit, store = made()
    unit.settle(ONE, 0)
    unit.write_through = True
    unit.drain_cache(ONE)
    assert store.calls == [("flush",)] and not unit.write_cache and unit.must_sync
    unit.settle(ONE, 0)
    assert store.calls == [("flush",), ("flush",)], "a change is durable at once"


def test_a_change_that_a_failed_flush_may_have_lost_is_told_to_its_nexus() -> None:
    unit, store = made()
    unit.settle(OTHER, 0)
    store.failure = OSError(errno.EIO, "bad block")
    with pytest.raises(OSError, match="bad block"):
        unit.flush(ONE)
    store.failure = None
    with pytest.raises(OSError, match="flush"):
        unit.flush(OTHER)
    unit.flush(OTHER)


def test_every_page_is_listed_and_says_which_it_is() -> None:
    pages = made()[0].vpd_pages(IQN)
    listed = inquiry.decode_supported_pages(memoryview(pages[inquiry.SUPPORTED_PAGES]))
    assert listed == tuple(sorted(pages))
    assert all(page[1] == code for code, page in pages.items())


def test_identifiers_follow_from_the_serial_number() -> None:
    """They are the same after a restart, and different for every LUN."""

    def identifiers(serial: str) -> set[str]:
        unit, _ = made(serial=serial)
        page = unit.vpd_pages(IQN)[inquiry.DEVICE_IDENTIFICATION]
        return set(inquiry.decode_identifiers(memoryview(page)))

    assert identifiers("S1") == identifiers("S1")
    assert len(identifiers("S1")) >= 2
    assert not identifiers("S1") & identifiers("S2")


def test_ports_of_one_unit_have_pages_of_their_own() -> None:
    """The port designators differ, the unit's identifiers do not."""
    unit, _ = made()
    first, second = (
        unit.vpd_pages(IQN, port)[inquiry.DEVICE_IDENTIFICATION]
        for port in TargetPorts([1, 2]).by_tag.values()
    )
    assert first != second
    assert inquiry.decode_identifiers(memoryview(first)) == inquiry.decode_identifiers(
        memoryview(second)
    )


def test_closing_flushes_and_closes_the_store() -> None:
    """What was acknowledged is on the disk then, as no initiator can ask for that any more. A
    read-only unit has nothing to flush."""
    unit, store = made()
    unit.close()
    assert store.calls == [("flush",), ("close",)]
    unit, store = made(read_only=True)
    unit.close()
    assert store.calls == [("close",)]


def test_a_store_that_cannot_be_flushed_is_closed() -> None:
    closed = []

    class Closing(FakeStore):
        def close(self) -> None:
            closed.append(self)

    store = Closing(1 << 20)
    unit = LogicalUnit(store, serial="S", block=512)
    store.failure = OSError(errno.EIO, "bad block")
    with pytest.raises(OSError, match="bad block"):
        unit.close()
    assert closed == [store]
