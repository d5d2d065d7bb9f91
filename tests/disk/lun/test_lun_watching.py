"""A LUN in use is looked at from time to time, whatever its target tells."""

from __future__ import annotations

from dataclasses import replace

import pytest

from iserblk.commands.command import Command, Waiter
from iserblk.disk.lun import refusals
from iserblk.disk.lun.operations import DiskCore
from iserblk.disk.lun.watching import EVERY, LunWatch
from iserblk.disk.seam import EXTENT_DATA
from iserblk.errors import ConnectionLost
from iserblk.scsi import inquiry
from iserblk.scsi.sense import NOT_READY, UNIT_ATTENTION, encode_fixed
from tests.disk.fake_lun import FakeLun, FakeLuns, finish, known

OF_ITS_OWN = (inquiry.Designator(0, inquiry.TYPE_NAA, 1, bytes.fromhex("5000c500aabb0001")),)
LIKE_OTHERS = (inquiry.Designator(0, inquiry.TYPE_T10, 2, b"IET     00010001"),)
CAPACITY = "READ CAPACITY(16)"


class Lun(FakeLun):
    """``names``: in VPD page 83h."""

    names = LIKE_OTHERS

    def answer(self, cdb: bytearray) -> tuple[str, bytes]:
        what, data = super().answer(cdb)
        return what, inquiry.encode_identifiers(self.names) if what == "VPD 83" else data


class Unique(Lun):
    names = OF_ITS_OWN


class Session(FakeLuns):
    """``full``: it has no free slot."""

    full = False

    def __init__(self, lun: FakeLun) -> None:
        super().__init__(lun)
        self.suspended = None  # type: ignore[assignment]
        self.takers: list[Waiter] = []

    def take(self, waiter: Waiter, _again: bool = False) -> Command:
        if self.full:
            waiter.pending += 1
            self.takers.append(waiter)
            return None  # type: ignore[return-value]
        return super().take(waiter)


class Bench:
    def __init__(self, lun: FakeLun) -> None:
        self.session = Session(lun)
        self.lun = lun
        self.disk: DiskCore = known(self.session)
        self.session.asked.clear()

    def ticks(self, count: int = EVERY) -> list[str]:
        """What was asked meanwhile."""
        before = len(self.session.asked)
        for _ in range(count):
            self.session.listeners.tick()
        return [what for _, what in self.session.asked[before:]]


@pytest.fixture
def bench() -> Bench:
    return Bench(Unique())


def test_two_commands_in_less_than_ten_seconds(bench: Bench) -> None:
    assert EVERY < 10
    assert bench.ticks(EVERY - 1) == []
    for _ in range(3):
        assert bench.ticks(EVERY) == ["VPD 83", CAPACITY]
    assert not bench.disk.identity.in_doubt and bench.session.queue.busy == 0


def test_a_serial_number_counts_where_nothing_is_unique() -> None:
    bench = Bench(Lun())
    assert bench.ticks() == ["VPD 83", "VPD 80", CAPACITY]
    bench.lun.serial = "S2"
    bench.ticks()
    assert bench.disk.identity.in_doubt


@pytest.mark.parametrize("lun", [Lun(serial="", errors={"VPD 83": encode_fixed(5, 0x24, 0)})])
def test_one_that_tells_nothing_but_its_kind(lun: FakeLun) -> None:
    bench = Bench(lun)
    assert bench.ticks() == ["INQUIRY", CAPACITY]
    assert not bench.disk.identity.in_doubt
    bench.disk.info = replace(bench.disk.info, product="another")
    bench.ticks()
    assert bench.disk.identity.in_doubt


@pytest.mark.parametrize("what", ["names", "size", "block", "gone"])
def test_a_swap_that_nobody_tells_is_found(bench: Bench, what: str) -> None:
    if what == "names":
        bench.lun.names = LIKE_OTHERS  # type: ignore[attr-defined]
    elif what == "size":
        bench.lun.blocks *= 2
    elif what == "block":
        bench.lun.blocks, bench.lun.block = bench.lun.blocks // 8, 4096
    else:
        del bench.session.luns[0]
    bench.ticks()
    assert bench.disk.identity.in_doubt
    assert bench.ticks() == [], "it is compared before it is looked at again"


@pytest.mark.logs("refused")
def test_a_lun_of_which_not_all_is_used_has_the_size_that_it_told(bench: Bench) -> None:
    """Otherwise it would be in doubt at each look, and at each ``refresh``."""
    disk = bench.disk
    disk.refusals.lacks(refusals.LONG_TRANSFERS, "refused")
    bench.lun.blocks = (1 << 32) + 8
    most = (1 << 32) * 512
    bench.ticks()
    for blocks in ((1 << 32) + 8, 1 << 33):
        bench.lun.blocks = blocks
        assert finish(disk.refresh())[0] == disk.size == disk.info.size == most
        bench.session.asked.clear()
        assert bench.ticks() == ["VPD 83", CAPACITY]
        assert finish(disk.refresh())[0] == most
        assert [what for _, what in bench.session.asked] == ["VPD 83", CAPACITY, CAPACITY]
        assert not disk.identity.in_doubt
        end = finish(disk.extents(most - 4096, 4096))[0]
        assert end == [(most - 4096, 4096, EXTENT_DATA)]
        assert bench.session.asked[3:] == [(0, "GET LBA STATUS")]
        assert not disk.refusals.refused(refusals.LBA_STATUS)
    bench.lun.blocks = 1 << 32
    bench.ticks()
    assert disk.identity.in_doubt, "the size that is used is not the size that it told"


@pytest.mark.parametrize("error", [0x08, encode_fixed(NOT_READY, 4, 1), 0x18])
@pytest.mark.parametrize("what", ["VPD 83", CAPACITY])
def test_an_error_means_nothing(bench: Bench, what: str, error: bytes | int) -> None:
    bench.lun.errors[what] = [error]
    bench.ticks()
    assert not bench.disk.identity.in_doubt and bench.session.queue.busy == 0
    assert bench.ticks() == ["VPD 83", CAPACITY]


def test_what_a_look_is_told_counts(bench: Bench) -> None:
    bench.lun.errors[CAPACITY] = [encode_fixed(UNIT_ATTENTION, 0x3F, 0x0E)]
    bench.ticks()
    assert bench.disk.identity.in_doubt


def _odd(_cdb: bytearray) -> tuple[str, bytes]:
    return "odd", b"\0\x80\0\x04abcd"


def test_an_answer_that_is_none_of_that_page(bench: Bench) -> None:
    bench.lun.answer = _odd  # type: ignore[method-assign, assignment]
    assert bench.ticks() == ["odd"]
    assert not bench.disk.identity.in_doubt


def test_nothing_is_asked_without_a_connection(bench: Bench) -> None:
    bench.session.suspended = ConnectionLost("gone")  # type: ignore[assignment]
    assert bench.ticks(3 * EVERY) == []
    bench.session.suspended = None  # type: ignore[assignment]
    assert bench.ticks(1) == ["VPD 83", CAPACITY]


def test_it_waits_for_a_free_slot(bench: Bench) -> None:
    """A client that keeps all slots busy does not prevent it."""
    bench.session.full = True
    assert bench.ticks(2 * EVERY) == []
    (waiter,) = bench.session.takers
    bench.session.full = False
    waiter.task_done()
    assert [what for _, what in bench.session.asked] == ["VPD 83", CAPACITY]
    assert isinstance(waiter, LunWatch) and not waiter.pending


def test_each_look_ends_before_the_next(bench: Bench) -> None:
    held: list[Command] = []

    def hold(slot: Command) -> None:
        held.append(slot)

    bench.session.submit = hold  # type: ignore[method-assign]
    bench.ticks(5 * EVERY)
    assert len(held) == 1
