"""VolatileStore against a plain bytearray, and what is lost when."""

from __future__ import annotations

import errno
import os
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from iserblk.target.store.store import Extent
from iserblk.target.store.volatile import VolatileStore
from tests.target.fake_store import FakeStore

SIZE = 64 * 512
MEMORY = 8192  # bytes: small, so that write-back happens

RANGES = st.tuples(st.integers(0, 63), st.integers(1, 64)).map(
    lambda pair: (pair[0] * 512, min(pair[1], 64 - pair[0]) * 512)
)


class ExtentStore(FakeStore):
    """A store that knows which of its bytes are allocated."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.allocated = bytearray(size)

    def write(self, data: memoryview, offset: int, durable: bool, nowait: bool) -> bool:
        super().write(data, offset, durable, nowait)
        self.allocated[offset : offset + len(data)] = b"\1" * len(data)
        return True

    def punch(self, offset: int, length: int) -> None:
        super().punch(offset, length)
        self.allocated[offset : offset + length] = bytes(length)

    zero = punch

    def extents(self, offset: int, length: int, limit: int) -> list[Extent]:
        return runs(self.allocated, offset, length)[:limit]


def runs(allocated: bytearray, offset: int, length: int) -> list[Extent]:
    found: list[Extent] = []
    for at in range(offset, offset + length, 512):
        is_data = bool(allocated[at])
        if found and found[-1][2] == is_data:
            found[-1] = (found[-1][0], found[-1][1] + 512, is_data)
        else:
            found.append((at, 512, is_data))
    return found


class VolatileModel(RuleBasedStateMachine):
    """``content``, ``allocated``: what readers must see. ``durable``: what a power failure must
    leave at least, block by block; None where either old or new may be there."""

    def __init__(self) -> None:
        super().__init__()
        self.below = ExtentStore(SIZE)
        self.store = VolatileStore(self.below, MEMORY)
        self.content = bytearray(SIZE)
        self.allocated = bytearray(SIZE)
        self.durable: list[bytes | None] = [bytes(512)] * 64

    def changed(self, offset: int, data: bytes, allocated: bool, durable: bool = False) -> None:
        end = offset + len(data)
        self.content[offset:end] = data
        self.allocated[offset:end] = bytes((allocated,)) * len(data)
        for at in range(offset, end, 512):
            self.durable[at // 512] = bytes(self.content[at : at + 512]) if durable else None

    @rule(where=RANGES, fill=st.integers(1, 255), durable=st.booleans(), nowait=st.booleans())
    def write(self, where: tuple[int, int], fill: int, durable: bool, nowait: bool) -> None:
        offset, length = where
        data = bytes((fill,)) * length
        calls = len(self.below.calls)
        if not self.store.write(memoryview(data), offset, durable, nowait):
            # In the loop nothing is written back to make room.
            assert nowait and not durable and len(self.below.calls) == calls
            assert self.store.write(memoryview(data), offset, durable, False)
        self.changed(offset, data, True, durable)

    @rule(where=RANGES)
    def punch(self, where: tuple[int, int]) -> None:
        self.store.punch(*where)
        self.changed(where[0], bytes(where[1]), False)

    @rule(where=RANGES)
    def zero(self, where: tuple[int, int]) -> None:
        self.store.zero(*where)
        self.changed(where[0], bytes(where[1]), False)

    @rule()
    def flush(self) -> None:
        self.store.flush()
        self.durable = [bytes(self.content[at : at + 512]) for at in range(0, SIZE, 512)]
        assert self.below.content == self.content
        assert self.below.calls[-1] == ("flush",)
        assert self.store.used == 0

    @rule(where=RANGES, nowait=st.booleans())
    def read(self, where: tuple[int, int], nowait: bool) -> None:
        offset, length = where
        buffer = memoryview(bytearray(length))
        assert self.store.read_into(buffer, offset, nowait)
        assert buffer == self.content[offset : offset + length]

    @rule(where=RANGES)
    def extents(self, where: tuple[int, int]) -> None:
        assert self.store.extents(*where, 1000) == runs(self.allocated, *where)

    @invariant()
    def all_reads_right(self) -> None:
        buffer = memoryview(bytearray(SIZE))
        assert self.store.read_into(buffer, 0, False)
        assert buffer == self.content

    @invariant()
    def what_is_durable_is_below(self) -> None:
        for index, block in enumerate(self.durable):
            at = index * 512
            assert block is None or self.below.content[at : at + 512] == block

    @invariant()
    def memory_is_bounded(self) -> None:
        # One transfer above the capacity, and the piece that cutting may add.
        assert self.store.used <= MEMORY + SIZE + 1024
        assert self.store.used == sum(each.cost for each in self.store._cached.values())


VolatileModel.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestVolatileModel = VolatileModel.TestCase


@pytest.fixture
def below() -> FakeStore:
    return FakeStore(SIZE)


def filled(byte: int, length: int = 512) -> memoryview:
    return memoryview(bytes((byte,)) * length)


def test_nothing_reaches_the_store_before_the_flush(below: FakeStore) -> None:
    """What a killed target loses."""
    store = VolatileStore(below, 1 << 20)
    store.write(filled(1), 0, False, False)
    store.punch(512, 512)
    store.zero(1024, 512)
    assert below.calls == []
    store.flush()
    assert below.calls == [
        ("write", 0, 512, False),
        ("punch", 512, 512),
        ("zero", 1024, 512),
        ("flush",),
    ]
    store.flush()
    assert below.calls[4:] == [("flush",)]


def test_a_durable_write_takes_only_its_own_range_along(below: FakeStore) -> None:
    store = VolatileStore(below, 1 << 20)
    store.write(filled(1, 2048), 0, False, False)
    store.write(filled(2), 512, True, False)
    assert below.calls == [("write", 512, 512, True)]
    store.flush()
    assert below.content[:2048] == b"\1" * 512 + b"\2" * 512 + b"\1" * 1024


def test_the_oldest_goes_first_when_the_cache_is_full(below: FakeStore) -> None:
    store = VolatileStore(below, 8 * 1024)
    order = [5, 3, 40, 1, 17, 2, 30, 9]  # in blocks; each costs 512 bytes and as much for itself
    for index, lba in enumerate(order):
        store.write(filled(index + 1), lba * 512, False, False)
    assert below.calls == []
    store.write(filled(99), 60 * 512, False, False)
    written = [call[1] for call in below.calls]
    assert written == [5 * 512, 3 * 512]


def test_a_write_larger_than_the_cache(below: FakeStore) -> None:
    store = VolatileStore(below, 4096)
    store.write(filled(1, SIZE), 0, False, False)
    store.write(filled(2), 0, False, False)
    buffer = memoryview(bytearray(SIZE))
    store.read_into(buffer, 0, False)
    assert buffer == b"\2" * 512 + b"\1" * (SIZE - 512)
    store.flush()
    assert below.content == buffer


def test_small_extents_count_too(below: FakeStore) -> None:
    """Punches hold no data, yet they cannot fill the memory."""
    store = VolatileStore(below, 4096)
    for block in range(0, 64, 2):
        store.punch(block * 512, 512)
        assert store.used <= 4096 + 512


def test_a_full_disk_changes_nothing(below: FakeStore) -> None:
    store = VolatileStore(below, 4096)
    for block in range(4):
        store.write(filled(block + 1), block * 512, False, False)
    below.failure = OSError(errno.ENOSPC, "No space left on device")
    for _ in range(3):
        with pytest.raises(OSError, match="No space left"):
            store.write(filled(9, 2048), 0, False, False)
        with pytest.raises(OSError, match="No space left"):
            store.flush()
    assert store.used == 4096
    below.failure = None
    buffer = memoryview(bytearray(2048))
    store.read_into(buffer, 0, False)
    assert buffer == b"".join(bytes((block + 1,)) * 512 for block in range(4))
    store.flush()
    assert below.content[:2048] == buffer


def test_a_failed_durable_write_keeps_the_older_bytes(below: FakeStore) -> None:
    store = VolatileStore(below, 1 << 20)
    store.write(filled(1), 0, False, False)
    below.failure = OSError(errno.EIO, "Input/output error")
    with pytest.raises(OSError, match="Input/output"):
        store.write(filled(2), 0, True, False)
    below.failure = None
    buffer = memoryview(bytearray(512))
    store.read_into(buffer, 0, False)
    assert buffer == b"\1" * 512


def test_closing_loses_nothing(below: FakeStore) -> None:
    store = VolatileStore(below, 1 << 20)
    store.write(filled(1), 0, False, False)
    store.close()
    assert below.calls == [("write", 0, 512, False), ("flush",), ("close",)]


def test_the_file_is_closed_even_when_the_flush_fails() -> None:
    class Failing(FakeStore):
        def flush(self) -> None:
            raise OSError(errno.EIO, "Input/output error")

    below = Failing(SIZE)
    with pytest.raises(OSError, match="Input/output"):
        VolatileStore(below, 1 << 20).close()
    assert below.calls == [("close",)]


def test_nobody_waits_who_asked_not_to() -> None:
    """While a flush writes back, reads and writes without waiting are put off."""
    inside, go_on = threading.Event(), threading.Event()

    class Slow(FakeStore):
        def write(self, data: memoryview, offset: int, durable: bool, nowait: bool) -> bool:
            inside.set()
            assert go_on.wait(30)
            return super().write(data, offset, durable, nowait)

    below = Slow(SIZE)
    store = VolatileStore(below, 1 << 20)
    store.write(filled(1), 0, False, False)
    flush = threading.Thread(target=store.flush)
    flush.start()
    assert inside.wait(30)
    buffer = memoryview(bytearray(512))
    assert not store.read_into(buffer, 0, nowait=True)
    assert not store.write(filled(2), 0, False, nowait=True)
    go_on.set()
    flush.join()
    assert store.read_into(buffer, 0, nowait=True)
    assert buffer == b"\1" * 512


def test_what_is_below_may_have_to_wait(below: FakeStore) -> None:
    below.cached = False
    store = VolatileStore(below, 1 << 20)
    buffer = memoryview(bytearray(512))
    assert not store.read_into(buffer, 0, nowait=True)
    assert store.read_into(buffer, 0, nowait=False)


def test_extents_end_where_the_store_ends_them(below: FakeStore) -> None:
    below.holes = [(0, 1024, False), (1024, 512, True)]
    store = VolatileStore(below, 1 << 20)
    store.write(filled(1), 0, False, False)
    store.write(filled(1), 4096, False, False)
    assert store.extents(0, SIZE, 10) == [(0, 512, True), (512, 512, False), (1024, 512, True)]
    assert store.extents(0, SIZE, 1) == [(0, 512, True)]


def test_prefetch_passes_through(below: FakeStore) -> None:
    VolatileStore(below, 1 << 20).prefetch(0, 4096)
    assert below.calls == [("prefetch", 0, 4096)]


@given(st.lists(st.tuples(RANGES, st.integers(0, 255)), max_size=30))
def test_threads_that_keep_to_their_half(writes: list[tuple[tuple[int, int], int]]) -> None:
    """Two writers at once, each in its own half, with write-back going on: none is lost."""
    below = FakeStore(2 * SIZE)
    store = VolatileStore(below, 4096)
    expected = bytearray(2 * SIZE)

    def write(base: int) -> None:
        for (offset, length), fill in writes:
            data = bytes((fill ^ (base != 0),)) * length
            store.write(memoryview(data), base + offset, False, False)
            expected[base + offset : base + offset + length] = data

    threads = [threading.Thread(target=write, args=(base,)) for base in (0, SIZE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store.flush()
    assert below.content == expected


def test_random_data_survives(below: FakeStore) -> None:
    """Patterns of one byte could hide a shifted copy."""
    store = VolatileStore(below, 3000)
    expected = bytearray(SIZE)
    for step in range(200):
        offset = (step * 7919) % 60 * 512
        data = os.urandom((step % 4 + 1) * 512)
        store.write(memoryview(data), offset, False, False)
        expected[offset : offset + len(data)] = data
        buffer = memoryview(bytearray(SIZE))
        store.read_into(buffer, 0, False)
        assert buffer == expected
