"""Copying and comparing between Ends in memory."""

from __future__ import annotations

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from iserblk.cli import transfer
from iserblk.disk.seam import EXTENT_DATA, EXTENT_HOLE, EXTENT_ZERO, Extent
from iserblk.errors import IserblkError

MIB = 1 << 20


class MemoryEnd:
    """An End in memory with holes. ``runs``: (bytes, is a hole), one after the other.

    One answer to ``extents`` has at most ``answer`` extents, so that the rest must be asked for.
    """

    def __init__(self, runs: list[tuple[bytes, int]], answer: int = 2) -> None:
        self.data = bytearray(b"".join(data for data, _ in runs))
        self.runs = [(len(data), flags) for data, flags in runs if data]
        self.answer = answer
        self.reads: list[tuple[int, int]] = []
        self.writes: list[tuple[int, int]] = []
        self.zeroes: list[tuple[int, int]] = []
        self.flushed_after = -1
        self.gate: trio.Event | None = None
        self.waiting = 0

    @property
    def size(self) -> int:
        return len(self.data)

    async def read_into(self, buffer: memoryview, offset: int) -> None:
        if self.gate is not None:
            self.waiting += 1
            if self.waiting == transfer.DEPTH:
                self.gate.set()
            await self.gate.wait()
        await trio.lowlevel.checkpoint()
        self.reads.append((offset, len(buffer)))
        buffer[:] = self.data[offset : offset + len(buffer)]

    async def write(self, buffer: memoryview, offset: int) -> None:
        await trio.lowlevel.checkpoint()
        assert offset + len(buffer) <= self.size
        self.writes.append((offset, len(buffer)))
        self.data[offset : offset + len(buffer)] = buffer

    async def zero(
        self, offset: int, length: int, *, may_trim: bool = False, patient: bool = False
    ) -> None:
        await trio.lowlevel.checkpoint()
        assert may_trim and offset + length <= self.size
        self.zeroes.append((offset, length))
        self.data[offset : offset + length] = bytes(length)

    async def extents(self, offset: int, length: int) -> list[Extent]:
        await trio.lowlevel.checkpoint()
        found = []
        start = 0
        for size, flags in self.runs:
            low, high = max(start, offset), min(start + size, offset + length)
            if low < high:
                found.append((low, high - low, flags))
            start += size
        return found[: self.answer]

    async def flush(self) -> None:
        self.flushed_after = len(self.writes) + len(self.zeroes)


def other_of(source: MemoryEnd, tail: bytes = b"") -> MemoryEnd:
    """A destination with other content."""
    return MemoryEnd([(b"\xee" * source.size + tail, EXTENT_DATA)])


def copied(source: MemoryEnd, destination: MemoryEnd) -> tuple[transfer.Totals, int]:
    advanced = []  # type: ignore[var-annotated]
    totals = trio.run(transfer.copy, source, destination, advanced.append)
    return totals, sum(advanced)


def test_data_arrives_and_is_flushed_last() -> None:
    source = MemoryEnd([(bytes(range(1, 256)) * 10000, EXTENT_DATA)])
    destination = other_of(source, b"tail")
    totals, advanced = copied(source, destination)
    assert destination.data == source.data + b"tail"
    assert (totals.data, totals.zero, advanced) == (source.size, 0, source.size)
    assert destination.flushed_after == len(destination.writes) > 0


def test_requests_are_aligned() -> None:
    source = MemoryEnd([(b"a" * 100, EXTENT_DATA), (b"b" * (4 * MIB), EXTENT_HOLE)])
    copied(source, other_of(source))
    assert sorted(source.reads) == [
        (0, 100),
        (100, MIB - 100),
        (MIB, MIB),
        (2 * MIB, MIB),
        (3 * MIB, MIB),
        (4 * MIB, 100),
    ]


async def test_many_requests_are_in_flight() -> None:
    """Reads wait until as many have begun as may be in flight: fewer would never end."""
    source = MemoryEnd([(b"b" * (20 * MIB), EXTENT_DATA)])
    source.gate = trio.Event()
    with trio.fail_after(60):
        await transfer.copy(source, other_of(source), lambda _count: None)
    assert len(source.reads) == 20


def test_holes_that_read_as_zeroes_are_not_read() -> None:
    hole = (bytes(70 * MIB), EXTENT_HOLE | EXTENT_ZERO)
    source = MemoryEnd([(b"a" * MIB, EXTENT_DATA), hole, (b"b" * 10, EXTENT_DATA)])
    destination = other_of(source)
    totals, _ = copied(source, destination)
    assert destination.data == source.data
    assert sorted(source.reads) == [(0, MIB), (71 * MIB, 10)]
    assert sorted(destination.zeroes) == [(MIB, 63 * MIB), (64 * MIB, 7 * MIB)]
    assert (totals.data, totals.zero) == (MIB + 10, 70 * MIB)


def test_zeroes_that_are_data_are_made_zero_and_not_sent() -> None:
    source = MemoryEnd([(bytes(2 * MIB + 7), EXTENT_DATA)])
    destination = other_of(source)
    totals, _ = copied(source, destination)
    assert destination.data == source.data
    assert not destination.writes
    assert totals.zero == source.size


def test_holes_of_unknown_content_are_read() -> None:
    source = MemoryEnd([(b"old" * 1000, EXTENT_HOLE)])
    destination = other_of(source)
    copied(source, destination)
    assert destination.data == source.data


def test_nothing_to_copy() -> None:
    totals, advanced = copied(MemoryEnd([]), MemoryEnd([(b"x", EXTENT_DATA)]))
    assert (totals.data, totals.zero, advanced) == (0, 0, 0)


PIECES = st.one_of(
    st.tuples(st.integers(0, 3 * MIB).map(bytes), st.sampled_from([1, 3, 0, 2])),
    st.tuples(st.integers(1, 3 * MIB).map(lambda size: b"\x5a" * size), st.sampled_from([0, 1])),
)


@given(st.lists(PIECES, max_size=6), st.integers(1, 3))
def test_any_layout(runs: list[tuple[bytes, int]], answer: int) -> None:
    source = MemoryEnd(runs, answer)
    destination = other_of(source)
    totals, advanced = copied(source, destination)
    assert destination.data == source.data
    assert totals.data + totals.zero == advanced == source.size
    trio.run(transfer.verify, source, destination, lambda _count: None)


@pytest.mark.parametrize("place", [0, 1, MIB - 1, MIB, 3 * MIB + 4, 5 * MIB - 1])
@pytest.mark.parametrize("flags", [EXTENT_DATA, EXTENT_HOLE | EXTENT_ZERO])
def test_verifying_finds_one_wrong_byte(place: int, flags: int) -> None:
    source = MemoryEnd([(bytes(5 * MIB), flags)])
    destination = MemoryEnd([(bytes(6 * MIB), EXTENT_DATA)])
    destination.data[place] ^= 1
    with pytest.raises(IserblkError, match=rf"differ at byte {place}$"):
        trio.run(transfer.verify, source, destination, lambda _count: None)


def test_behind_the_source_nothing_is_verified() -> None:
    source = MemoryEnd([(b"abc", EXTENT_DATA)])
    destination = MemoryEnd([(b"abcd", EXTENT_DATA)])
    trio.run(transfer.verify, source, destination, lambda _count: None)
    assert destination.reads == [(0, 3)]


def difference(one: MemoryEnd, other: MemoryEnd) -> int | None:
    return trio.run(transfer.compare, one, other, lambda _count: None)


@given(st.lists(PIECES, max_size=6), st.lists(PIECES, max_size=6), st.integers(1, 3))
def test_comparing_any_two(
    runs: list[tuple[bytes, int]], others: list[tuple[bytes, int]], answer: int
) -> None:
    one, other = MemoryEnd(runs, answer), MemoryEnd(others, answer)
    size = max(one.size, other.size)
    ours, theirs = bytes(one.data).ljust(size, b"\0"), bytes(other.data).ljust(size, b"\0")
    expected = None
    if ours != theirs:
        expected = next(at for at in range(size) if ours[at] != theirs[at])
    assert difference(one, other) == difference(other, one) == expected


def test_of_several_differences_the_first_counts() -> None:
    """The piece that has it ends last."""

    class Slow(MemoryEnd):
        async def read_into(self, buffer: memoryview, offset: int) -> None:
            if not offset:
                await trio.testing.wait_all_tasks_blocked()
            await super().read_into(buffer, offset)

    data = bytearray(b"b" * (40 * MIB))
    one = MemoryEnd([(bytes(data), EXTENT_DATA)])
    for at in (17, 3 * MIB, 30 * MIB):
        data[at] = 0
    other = Slow([(bytes(data), EXTENT_DATA)])
    assert difference(one, other) == 17
    assert len(one.reads) < 40, "behind a difference no more is read than has begun"


def test_holes_of_both_are_not_read() -> None:
    hole = (bytes(70 * MIB), EXTENT_HOLE | EXTENT_ZERO)
    one = MemoryEnd([(b"a" * MIB, EXTENT_DATA), hole])
    other = MemoryEnd([(b"a" * MIB, EXTENT_DATA), hole, (bytes(MIB), EXTENT_DATA)])
    assert difference(one, other) is None
    assert one.reads == [(0, MIB)] and sorted(other.reads) == [(0, MIB), (71 * MIB, MIB)]
