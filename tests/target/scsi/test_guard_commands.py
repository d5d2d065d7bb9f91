"""COMPARE AND WRITE and XDWRITEREAD against what else changes their blocks, of other nexuses."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from iserblk.scsi import cdb, inquiry, lba, opcodes, third_party
from iserblk.scsi import status as sam
from iserblk.target.scsi.device import DeviceServer, LogicalUnit
from tests.target.fake_store import FakeStore
from tests.target.scsi_client import GOOD, IQN, Client

SIZE = 64 * 512
PAUSE_S = 0.05  # in which a command that does not wait would have ended


class HeldStore(FakeStore):
    """Holds up the first read of block 4: the command that reads it has to write it then."""

    def __init__(self) -> None:
        super().__init__(SIZE)
        self.reading, self.go_on = threading.Event(), threading.Event()

    def read_into(self, buffer: memoryview, offset: int, nowait: bool) -> bool:
        done = super().read_into(buffer, offset, nowait)
        if offset == 4 * 512 and not self.reading.is_set():
            self.reading.set()
            assert self.go_on.wait(30)
        return done


def copy_list(*names: tuple[int, int, int, bytes]) -> bytes:
    """From block 0 of the first LUN to block 5 of the second."""
    cscds = [
        third_party.Cscd(third_party.IDENTIFICATION, association, kind, code_set, name)
        for association, kind, code_set, name in names
    ]
    segment = third_party.Segment(third_party.BLOCK_TO_BLOCK, third_party.DC, 0, 1, 1, 0, 5)
    return third_party.encode_copy_list(third_party.CopyList(0, cscds, [segment]))


def named(unit: LogicalUnit) -> tuple[int, int, int, bytes]:
    return next(each for each in unit.names if each[1] == inquiry.TYPE_NAA)


@pytest.fixture
def store() -> Iterator[HeldStore]:
    store = HeldStore()
    yield store
    store.go_on.set()


@pytest.fixture
def units(store: HeldStore) -> list[LogicalUnit]:
    return [LogicalUnit(FakeStore(SIZE), serial="A"), LogicalUnit(store, serial="B")]


@pytest.fixture
def server(units: list[LogicalUnit]) -> DeviceServer:
    return DeviceServer(dict(enumerate(units)), IQN)


ONE, TWO = b"\1" * 512, b"\2" * 512
OTHERS = {
    "WRITE": (cdb.RW16.pack(opcodes.WRITE_16, 0, 5, 1, 0, 0), TWO),
    "WRITE with FUA": (cdb.RW16.pack(opcodes.WRITE_16, cdb.FUA, 5, 1, 0, 0), TWO),
    "WRITE AND VERIFY": (cdb.RW16.pack(opcodes.WRITE_AND_VERIFY_16, 0, 5, 1, 0, 0), TWO),
    "WRITE SAME": (cdb.write_same16(5, 1), TWO),
    "WRITE SAME of zeroes": (cdb.write_same16(5, 1, ndob=True), b""),
    "WRITE SAME that unmaps": (cdb.write_same16(5, 1, unmap=True, ndob=True), b""),
    "UNMAP": (cdb.unmap(24), lba.unmap_parameters([(5, 1)])),
    "COMPARE AND WRITE": (cdb.compare_and_write(5, 1), ONE + TWO),
    "XDWRITEREAD": (cdb.xdwriteread10(5, 1), TWO),
    "EXTENDED COPY": (b"", b""),
}


@pytest.mark.parametrize(
    ("command", "data"),
    [
        (cdb.compare_and_write(4, 2), bytes(1024) + ONE * 2),
        (cdb.xdwriteread10(4, 2), ONE * 2),
    ],
    ids=["COMPARE AND WRITE", "XDWRITEREAD"],
)
@pytest.mark.parametrize("other", OTHERS)
def test_nothing_comes_between(
    server: DeviceServer,
    units: list[LogicalUnit],
    store: HeldStore,
    other: str,
    command: bytes,
    data: bytes,
) -> None:
    """A command of another nexus that overlaps by one block waits, and comes behind."""
    first, second = Client(server, 1, isid=b"first."), Client(server, 1, isid=b"second")
    ends: list[tuple[int, int]] = []
    swap = threading.Thread(target=lambda: ends.append(first.code(command, data)))
    swap.start()
    assert store.reading.wait(30)
    cdb_of_other, more = OTHERS[other]
    if other == "EXTENDED COPY":
        more = copy_list(*map(named, units))
        cdb_of_other = third_party.extended_copy(len(more))
    task = server.begin(second.nexus, 1, cdb_of_other)
    assert not task.status
    buffer = memoryview(bytearray(more))
    if not task.may_block:
        assert not server.run(task, buffer, True), "it waits for a thread"
    thread = threading.Thread(target=server.run, args=(task, buffer))
    thread.start()
    thread.join(PAUSE_S)
    assert thread.is_alive() and not store.calls
    far = cdb.RW16.pack(opcodes.WRITE_16, 0, 6, 1, 0, 0)
    assert second.code(far, TWO) == GOOD, "the block behind is free"
    store.go_on.set()
    swap.join()
    thread.join()
    assert ends == [GOOD] and task.status == sam.GOOD
    assert [each[1] for each in store.calls if each[1:]][:3] == [6 * 512, 4 * 512, 5 * 512]
    assert store.content[4 * 512 : 5 * 512] == ONE
    assert store.content[5 * 512 : 6 * 512] in (TWO, bytes(512))


def test_a_preempted_compare_and_write_that_waits_changes_nothing(
    server: DeviceServer, units: list[LogicalUnit], store: HeldStore
) -> None:
    """A reset ends the tasks of other sessions, and is answered when threads have ended: what has
    waited for its blocks until then is not carried out."""
    first, second = Client(server, 1, isid=b"first."), Client(server, 1, isid=b"second")
    swap = threading.Thread(target=first.code, args=(cdb.compare_and_write(4, 2), bytes(2048)))
    swap.start()
    assert store.reading.wait(30)
    task = server.begin(second.nexus, 1, cdb.compare_and_write(5, 1))
    thread = threading.Thread(
        target=server.run, args=(task, memoryview(bytearray(bytes(512) + TWO)))
    )
    thread.start()
    task.cancel()
    store.go_on.set()
    swap.join()
    thread.join()
    assert task.status == sam.TASK_ABORTED
    assert store.content == bytes(SIZE)
