"""Comparing a LUN with its journal: the newest change of each block, and no block twice."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iserblk.commands.command import Command
from iserblk.disk.durability import comparing
from iserblk.disk.durability.comparing import compare
from iserblk.disk.durability.seam import Entry, Waiting
from iserblk.errors import ConnectionLost
from iserblk.scsi import cdb
from iserblk.scsi.sense import ILLEGAL_REQUEST, encode_fixed
from tests.disk import fake_target
from tests.disk.durability.test_block_sets import BLOCKS, RANGES
from tests.disk.fake_target import BLOCK, LUN, MEDIUM_ERROR, NOT_READY, FakeSession, FakeTarget

INVALID_FIELD = encode_fixed(ILLEGAL_REQUEST, 0x24, 0x00)


def content(*numbers: int) -> memoryview:
    return memoryview(b"".join(bytes((number,)) * BLOCK for number in numbers))


class Bench:
    """``read``: the blocks that were read, in order."""

    def __init__(self, max_transfer: int = 4 * BLOCK) -> None:
        self.session = FakeSession()
        self.target = FakeTarget(BLOCKS)
        self.core = fake_target.disk(self.session, BLOCKS, max_transfer)
        self.fresh = FakeSession()
        self.read: list[int] = []
        self.senses: list[bytes] = []  # that the first READs end with
        self.lost = False

    def compare(
        self,
        entries: list[Entry],
        settled: Iterable[tuple[int, int]] = (),
        waiting: Sequence[Waiting] = (),
    ) -> bool:
        steps = compare(
            self.fresh,  # type: ignore[arg-type]
            LUN,
            self.core.info,
            self.core.pack_read,
            entries,
            settled,
            waiting,
        )
        try:
            while True:
                step = next(steps)
                while not isinstance(step, float) and step.pending:
                    self.answer(self.fresh.flight[-1])
        except StopIteration as stop:
            assert self.fresh.busy == 0
            return bool(stop.value)

    def answer(self, slot: Command) -> None:
        if self.lost:
            self.fresh.end(slot, error=ConnectionLost("gone"))
        elif self.senses:
            self.fresh.end(slot, sense=self.senses.pop(0))
        else:
            first = int.from_bytes(slot.cdb[2:10], "big")
            self.read += range(first, first + slot.length // BLOCK)
            self.target.execute(slot)
            self.fresh.end(slot)


def written(sequence: int, first: int, *numbers: int) -> Entry:
    return Entry(sequence, first, first + len(numbers) - 1, content(*numbers))


def test_newest_change_of_each_block_counts() -> None:
    bench = Bench()
    bench.target.cached = {at: bytes(content(2 if at == 3 else 1)) for at in range(2, 6)}
    assert bench.compare([written(1, 2, 1, 9, 1, 1), written(2, 3, 2)])
    assert sorted(bench.read) == [2, 3, 4, 5]
    assert not bench.compare([written(1, 2, 1, 2, 1, 1), written(2, 3, 1)])


def test_unmapped_blocks_may_hold_anything() -> None:
    bench = Bench()
    bench.target.cached = {4: bytes(content(7))}
    unmapped = Entry(2, 4, 4, None, cdb.unmap(24))
    assert bench.compare([written(1, 4, 1), unmapped])
    assert not bench.compare([unmapped, written(3, 4, 1)])


@pytest.mark.parametrize("there", [0, 1])
def test_zeroed_blocks_are_zero(there: int) -> None:
    bench = Bench()
    bench.target.cached = {9: bytes(content(there))}
    zeroed = Entry(1, 2, 19, None, cdb.write_same16(2, 18, False, True))
    assert bench.compare([zeroed]) is not bool(there)


@pytest.mark.plain("replaces a constant")
@pytest.mark.logs("too large to be read back")
def test_more_than_can_be_read_back_counts_as_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparing, "MOST_COMPARED", 10 * BLOCK)
    bench = Bench()
    assert bench.compare([Entry(1, 0, 9, None, cdb.write_same16(0, 10, False, True))])
    assert not bench.compare([Entry(1, 0, 10, None, cdb.write_same16(0, 11, False, True))])


@pytest.mark.parametrize("waits", [True, False])
def test_what_is_settled_is_not_looked_at(waits: bool) -> None:
    """Nor is what a command will change that waits, and has no data of its own."""
    bench = Bench()
    settled = [(3, 3), (4, 4)]
    if waits:
        waiting = [Waiting(*each, None) for each in settled]
        assert bench.compare([written(1, 2, 0, 5, 5, 0)], (), waiting)
    else:
        assert bench.compare([written(1, 2, 0, 5, 5, 0)], settled)
    assert sorted(bench.read) == [2, 5]


@pytest.mark.parametrize(
    ("there", "same"),
    [
        ([1, 1, 1, 1], True),  # not carried out yet
        ([1, 2, 3, 1], True),  # on the connection that was lost
        ([1, 1, 3, 1], True),
        ([1, 0, 3, 1], False),
        ([1, 3, 3, 1], False),  # the content of the next block
        ([2, 2, 3, 1], False),
        ([1, 2, 3, 0], False),
    ],
)
def test_a_write_that_waits_may_have_been_carried_out(there: list[int], same: bool) -> None:
    """What is neither its content nor what was there before is lost, whatever becomes of it."""
    bench = Bench()
    bench.target.cached = {at: bytes(content(byte)) for at, byte in enumerate(there, 2)}
    waiting = [Waiting(3, 4, content(2, 3))]
    assert bench.compare([written(1, 2, 1, 1, 1, 1)], (), waiting) is same


def test_lun_that_lets_less_be_read_at_once() -> None:
    bench = Bench()
    bench.target.cached = {at: bytes(content(1)) for at in range(8)}
    bench.senses = [INVALID_FIELD] * 3
    assert bench.compare([written(1, 0, *[1] * 8)])
    assert sorted(bench.read) == list(range(8))


@pytest.mark.parametrize("sense", [MEDIUM_ERROR, INVALID_FIELD])
def test_what_cannot_be_read_is_lost(sense: bytes) -> None:
    bench = Bench()
    bench.senses = [sense]
    assert not bench.compare([written(1, 0, 0)])


def test_lun_that_is_ready_soon_is_waited_for() -> None:
    bench = Bench()
    bench.senses = [NOT_READY]
    assert bench.compare([written(1, 0, 0)])


def test_connection_that_is_lost_decides_nothing() -> None:
    bench = Bench()
    bench.lost = True
    with pytest.raises(ConnectionLost):
        bench.compare([written(1, 0, 0)])


@given(st.lists(RANGES, max_size=12), st.lists(RANGES, max_size=3))
def test_each_block_is_read_once_for_its_newest_change(
    changes: list[tuple[int, int]], settled: list[tuple[int, int]]
) -> None:
    bench = Bench()
    entries = []
    for number, (first, last) in enumerate(changes, 1):
        entries.append(written(number, first, *[number] * (last - first + 1)))
        bench.target.cached.update((at, bytes(content(number))) for at in range(first, last + 1))
    skipped = {at for first, last in settled for at in range(first, last + 1)}
    for at in skipped:
        bench.target.cached[at] = bytes(content(0xEE))
    assert bench.compare(entries, settled)
    changed = {at for first, last in changes for at in range(first, last + 1)}
    assert sorted(bench.read) == sorted(changed - skipped)
