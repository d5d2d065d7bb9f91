"""UNMAP, WRITE SAME, GET LBA STATUS."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iserblk.scsi import cdb, lba, sense
from iserblk.scsi import status as sam
from iserblk.target.scsi import provisioning
from iserblk.target.scsi.device import DeviceServer, LogicalUnit
from iserblk.target.scsi.provisioning import block_ranges
from iserblk.target.store.store import Extent
from tests.support import logs
from tests.target.fake_store import FakeStore
from tests.target.scsi_client import (
    GOOD,
    INVALID_FIELD,
    IQN,
    LBA_OUT_OF_RANGE,
    Client,
    make_unit,
)

pytestmark = pytest.mark.logs(logs.FILE_ERRORS)

BLOCKS = 64
BLOCK = 512
INVALID_PARAMETER = (sense.ILLEGAL_REQUEST, sense.INVALID_FIELD_IN_PARAMETER_LIST)
WRONG_LENGTH = (sense.ILLEGAL_REQUEST, sense.PARAMETER_LIST_LENGTH_ERROR)


@pytest.fixture
def store() -> FakeStore:
    store = FakeStore(BLOCKS * BLOCK)
    store.content[:] = os.urandom(store.size)
    return store


@pytest.fixture
def client(store: FakeStore) -> Client:
    return Client(DeviceServer({0: LogicalUnit(store, serial="S", block=BLOCK)}, IQN))


def large_client(size: int) -> Client:
    """A LUN of ``size`` bytes without content."""
    store = FakeStore(0)
    store.size = size
    return Client(DeviceServer({0: LogicalUnit(store, serial="S", block=BLOCK)}, IQN))


# -- UNMAP -----------------------------------------------------------------------------------------


def unmap(client: Client, *ranges: tuple[int, int]) -> tuple[int, int]:
    parameters = lba.unmap_parameters(ranges)
    return client.code(cdb.unmap(len(parameters)), parameters)


def test_unmap(client: Client, store: FakeStore) -> None:
    assert unmap(client, (0, 1), (8, 0), (10, 5), (BLOCKS - 1, 1)) == GOOD
    assert store.calls == [
        ("punch", 0, BLOCK),
        ("punch", 10 * BLOCK, 5 * BLOCK),
        ("punch", (BLOCKS - 1) * BLOCK, BLOCK),
    ]
    assert unmap(client) == GOOD
    assert client.code(cdb.unmap(0)) == GOOD


def test_unmap_touches_nothing_when_one_range_is_wrong(client: Client, store: FakeStore) -> None:
    assert unmap(client, (0, 1), (BLOCKS, 1)) == LBA_OUT_OF_RANGE
    assert unmap(client, (0, 1), (BLOCKS - 1, 2)) == LBA_OUT_OF_RANGE
    assert unmap(client, (0, 1), (2**64 - 1, 2**32 - 1)) == LBA_OUT_OF_RANGE
    assert unmap(client, *[(0, 1)] * 257) == INVALID_PARAMETER
    assert not store.calls
    assert unmap(client, *[(0, 1)] * 256) == GOOD


def test_unmap_of_more_blocks_than_the_limit() -> None:
    client = large_client(8 << 30)
    limit = (4 << 30) // BLOCK
    assert unmap(client, (0, limit), (limit, 1)) == INVALID_PARAMETER


@pytest.mark.parametrize(
    "parameters", ["00" * 7, "0016001000000000" + "00" * 8, "0000001000000000" + "00" * 16]
)
def test_unmap_lists_that_cannot_be(client: Client, store: FakeStore, parameters: str) -> None:
    data = bytes.fromhex(parameters)
    sent = data if len(data) >= 8 else b""
    assert client.code(cdb.unmap(len(data)), sent) == WRONG_LENGTH
    assert not store.calls


def test_without_a_write_cache_all_is_durable_at_once(store: FakeStore) -> None:
    unit = LogicalUnit(store, serial="S", block=BLOCK, write_cache=False)
    client = Client(DeviceServer({0: unit}, IQN))
    assert unmap(client, (0, 1)) == GOOD
    assert client.code(cdb.write_same16(1, 1, ndob=True)) == GOOD
    assert [call[0] for call in store.calls] == ["punch", "flush", "zero", "flush"]


# -- WRITE SAME ------------------------------------------------------------------------------------


@pytest.mark.parametrize("build", [cdb.write_same10, cdb.write_same16])
@pytest.mark.parametrize("may_unmap", [False, True])
def test_write_same_of_zeroes(
    client: Client, store: FakeStore, build: object, may_unmap: bool
) -> None:
    assert callable(build)
    expected = bytearray(store.content)
    expected[3 * BLOCK : 8 * BLOCK] = bytes(5 * BLOCK)
    assert client.code(build(3, 5, may_unmap), bytes(BLOCK)) == GOOD
    assert store.content == expected
    assert store.calls == [("punch" if may_unmap else "zero", 3 * BLOCK, 5 * BLOCK)]


@pytest.mark.parametrize("may_unmap", [False, True])
def test_write_same_without_data(client: Client, store: FakeStore, may_unmap: bool) -> None:
    assert client.code(cdb.write_same16(3, 5, may_unmap, ndob=True)) == GOOD
    assert store.calls == [("punch" if may_unmap else "zero", 3 * BLOCK, 5 * BLOCK)]


@pytest.mark.parametrize("may_unmap", [False, True])
def test_write_same_of_a_pattern(client: Client, store: FakeStore, may_unmap: bool) -> None:
    """A pattern that is not zero is written, also with the UNMAP bit."""
    pattern = bytes(BLOCK - 1) + b"\1"
    expected = bytearray(store.content)
    expected[3 * BLOCK : 8 * BLOCK] = pattern * 5
    assert client.code(cdb.write_same16(3, 5, may_unmap), pattern) == GOOD
    assert store.content == expected


@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_a_long_pattern_has_no_seams(extra: int) -> None:
    """The target writes the pattern in tiles of 1 MiB."""
    blocks = (2 << 20) // BLOCK + extra
    store = FakeStore((blocks + 2) * BLOCK)
    client = Client(DeviceServer({0: LogicalUnit(store, serial="S", block=BLOCK)}, IQN))
    pattern = os.urandom(BLOCK)
    assert client.code(cdb.write_same16(1, blocks), pattern) == GOOD
    assert store.content == bytes(BLOCK) + pattern * blocks + bytes(BLOCK)


def test_write_same_to_the_end(client: Client, store: FakeStore) -> None:
    assert client.code(cdb.write_same16(10, 0, ndob=True)) == GOOD
    assert client.code(cdb.write_same10(60, 0, True), bytes(BLOCK)) == GOOD
    assert store.calls == [
        ("zero", 10 * BLOCK, (BLOCKS - 10) * BLOCK),
        ("punch", 60 * BLOCK, 4 * BLOCK),
    ]


def test_write_same_of_more_than_the_limit() -> None:
    client = large_client(8 << 30)
    limit = (2 << 30) // BLOCK
    for blocks in (limit + 1, 0):
        answer = client.run(cdb.write_same16(0, blocks, ndob=True))
        assert (answer.code, answer.sense.field) == (INVALID_FIELD, 10)


# -- GET LBA STATUS --------------------------------------------------------------------------------


def status(client: Client, first: int, allocation: int = 4096) -> list[tuple[int, int, int]]:
    return list(lba.decode_lba_status(client.data(cdb.get_lba_status16(first, allocation))))


def test_lba_status_of_a_sparse_file(tmp_path: os.PathLike[str]) -> None:
    fd = os.open(tmp_path, os.O_TMPFILE | os.O_RDWR)
    os.ftruncate(fd, 1 << 20)
    client = Client(DeviceServer({0: make_unit(fd, 1 << 20)}, IQN))
    assert status(client, 0) == [(0, 2048, lba.DEALLOCATED)]
    os.pwrite(fd, b"x" * 8192, 65536)
    assert status(client, 0) == [
        (0, 128, lba.DEALLOCATED),
        (128, 16, lba.MAPPED),
        (144, 1904, lba.DEALLOCATED),
    ]
    assert status(client, 130) == [(130, 14, lba.MAPPED), (144, 1904, lba.DEALLOCATED)]
    assert unmap(client, (128, 8)) == GOOD
    assert status(client, 100, 24) == [(100, 36, lba.DEALLOCATED)]
    assert client.code(cdb.get_lba_status16(2048, 64)) == LBA_OUT_OF_RANGE
    os.close(fd)


def test_lba_status_is_cut_to_the_allocation_length(client: Client, store: FakeStore) -> None:
    store.holes = [(0, 4 * BLOCK, True), (4 * BLOCK, 60 * BLOCK, False)]
    whole = client.data(cdb.get_lba_status16(0, 4096))
    assert len(whole) == 8 + 2 * 16
    for allocation in (0, 1, 8, 23, 24):
        answer = client.data(cdb.get_lba_status16(0, allocation))
        assert len(answer) == allocation
        assert answer[4:] == whole[4:allocation]
    # A huge allocation length asks for no huge buffer.
    assert client.server.begin(client.nexus, 0, cdb.get_lba_status16(0, 2**32 - 1)).length < 20000


@given(
    st.sampled_from([512, 4096]),
    st.integers(0, 4),
    st.lists(st.integers(1, 40), min_size=1, max_size=12),
    st.booleans(),
)
def test_blocks_are_deallocated_only_when_all_of_them_is(
    block: int, first: int, lengths: list[int], starts_with_data: bool
) -> None:
    """File systems allocate in units of 1 KiB, too: half a block may be a hole."""
    extents: list[Extent] = []
    position = first * block
    is_data = starts_with_data
    for length in lengths:
        extents.append((position, length * 512, is_data))
        position += length * 512
        is_data = not is_data
    has_data = bytearray(position)
    for offset, length, is_data in extents:
        has_data[offset : offset + length] = bytes((is_data,)) * length
    found = block_ranges(extents, block)
    expected_next = first
    for lba_first, blocks, state in found:
        assert lba_first == expected_next and blocks > 0
        expected_next += blocks
        for each in range(lba_first, lba_first + blocks):
            mapped = any(has_data[each * block : (each + 1) * block])
            assert mapped == (state == lba.MAPPED)
    assert expected_next == position // block


def test_extents_of_more_blocks_than_a_descriptor_holds() -> None:
    found = block_ranges([(0, (2**32 + 5) * 512, False)], 512)
    assert found == [(0, 2**32 - 1, lba.DEALLOCATED), (2**32 - 1, 6, lba.DEALLOCATED)]


# -- what takes long -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "data"),
    [
        (cdb.verify16(0, 3 << 11), b""),
        (cdb.write_same16(0, 3 << 11), b"x" * BLOCK),
        (cdb.verify16(0, 3 << 11, cdb.BYTCHK), bytes(3 << 20)),
        (cdb.unmap(40), lba.unmap_parameters([(0, 8), (16, 8)])),
        (cdb.unmap(24), lba.unmap_parameters([(0, 9 << 10)])),
        (cdb.write_same16(0, 9 << 10, unmap=True, ndob=True), b""),
        (cdb.write_same16(0, 9 << 10, ndob=True), b""),
    ],
    ids=[
        "VERIFY",
        "WRITE SAME",
        "VERIFY of data",
        "UNMAP of two",
        "UNMAP of much",
        "WRITE SAME that unmaps",
        "WRITE SAME of zeroes",
    ],
)
def test_a_cancelled_command_ends_between_its_steps(
    command: bytes, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command ends with TASK ABORTED, does no more, and other commands may write there."""
    monkeypatch.setattr(provisioning, "CLEAR_STEP", 4 << 20)
    store = FakeStore(8 << 20)
    client = Client(DeviceServer({0: LogicalUnit(store, serial="S", block=BLOCK)}, IQN))
    task = client.server.begin(client.nexus, 0, command)
    steps: list[str] = []

    def step(name: str, call: Callable[..., object]) -> Callable[..., object]:
        def stepped(*arguments: object) -> object:
            steps.append(name)
            task.cancelled = True
            return call(*arguments)

        return stepped

    for name in ("read_into", "write", "punch", "zero"):
        setattr(store, name, step(name, getattr(store, name)))
    assert client.server.run(task, memoryview(bytearray(data)))
    assert task.status == sam.TASK_ABORTED and not task.sense
    assert len(steps) == 1
    assert client.code(cdb.write_same16(0, 3 << 11, ndob=True)) == GOOD


def test_long_changes_are_cut_between_granules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever block they begin with."""
    monkeypatch.setattr(provisioning, "CLEAR_STEP", 1 << 20)
    store = FakeStore(4 << 20)
    client = Client(DeviceServer({0: LogicalUnit(store, serial="S", block=BLOCK)}, IQN))
    assert client.code(cdb.unmap(24), lba.unmap_parameters([(2047, 2049)])) == GOOD
    assert store.calls == [
        ("punch", 2047 * BLOCK, BLOCK),
        ("punch", 2048 * BLOCK, 1 << 20),
    ]


@pytest.mark.parametrize(
    "command", [cdb.write_same16(0, 8, ndob=True), cdb.synchronize_cache16(0, 0)]
)
def test_a_command_that_was_cancelled_before_it_began_does_nothing(
    client: Client, store: FakeStore, command: bytes
) -> None:
    """For example, its session was cut off while it waited for a thread."""
    task = client.server.begin(client.nexus, 0, command)
    task.cancelled = True
    assert client.server.run(task, None)
    assert task.status == sam.TASK_ABORTED
    assert not store.calls


def test_what_was_cut_off_a_file_has_no_status(tmp_path: Path) -> None:
    """MEDIUM ERROR, as for READ: neither a hole nor data. The log says why."""

    def read10(block: int, count: int) -> bytes:
        return bytes((0x28, 0, 0, 0, 0, block, 0, 0, count, 0))

    fd = os.open(tmp_path / "disk", os.O_CREAT | os.O_RDWR)
    os.ftruncate(fd, BLOCKS * BLOCK)
    os.pwrite(fd, bytes(BLOCKS * BLOCK), 0)
    client = Client(DeviceServer({0: make_unit(fd, BLOCKS * BLOCK)}, IQN))
    os.ftruncate(fd, 8 * BLOCK + 100)
    lost = (sense.MEDIUM_ERROR, sense.UNRECOVERED_READ_ERROR)
    for block in (8, 9, BLOCKS - 1):
        assert client.code(cdb.get_lba_status16(block, 512)) == lost
        assert client.code(read10(block, 1)) == lost
    assert client.code(read10(7, 2)) == lost
    found = lba.decode_lba_status(client.data(cdb.get_lba_status16(0, 512)))
    assert [each[:2] for each in found] == [(0, 8)]
    assert client.data(read10(7, 1)) == bytes(BLOCK)
    os.close(fd)
