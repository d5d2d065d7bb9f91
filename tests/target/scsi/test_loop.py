"""Commands of a unit whose store begins and ends them in the loop."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from typing import Any

import pytest

from iserblk.scsi import sense
from iserblk.scsi import status as sam
from iserblk.target.scsi.device import DeviceServer, LogicalUnit
from iserblk.target.seam import Nexus, ScsiTask
from iserblk.target.store.status import StatusError
from iserblk.target.store.store import Ended
from tests.support import logs
from tests.support.until import until_blocking
from tests.target.fake_store import FakeStore
from tests.target.scsi_client import IQN, Client

READ = bytes((0x28, 0, 0, 0, 0, 1, 0, 0, 1, 0))
WRITE = bytes((0x2A, 0, 0, 0, 0, 1, 0, 0, 1, 0))
FUA_WRITE = bytes((0x2A, 8, 0, 0, 0, 1, 0, 0, 1, 0))
FLUSH = bytes((0x35,)) + bytes(9)
UNMAP = bytes((0x42, 0, 0, 0, 0, 0, 0, 0, 24, 0))


class LoopFake(FakeStore):
    """Implements LoopStore. Operations stay in ``begun`` until ``end`` is called. ``owners``: those
    of all that were begun."""

    def __init__(self, size: int = 1 << 20) -> None:
        super().__init__(size)
        self.batch_ended: Callable[[], None] = lambda: None
        self.begun: list[tuple[str, Ended]] = []
        self.owners: list[object] = []
        self.given_up: list[object] = []
        self.settling: list[Callable[[], None]] = []

    def _begin(self, name: str, owner: object, ended: Ended, *more: object) -> object:
        self.owners.append(owner)
        self.begun.append((name, ended))
        self.calls.append((name, *more))
        return name

    def begin_read(self, buffer: memoryview, offset: int, owner: object, ended: Ended) -> object:
        buffer[:] = self.content[offset : offset + len(buffer)]
        return self._begin("read", owner, ended, offset)

    def begin_write(
        self, data: memoryview, offset: int, durable: bool, owner: object, ended: Ended
    ) -> object:
        self.content[offset : offset + len(data)] = data
        return self._begin("write", owner, ended, offset, durable)

    def begin_flush(self, owner: object, ended: Ended) -> object:
        return self._begin("flush", owner, ended)

    def give_up(self, operation: object) -> None:
        self.given_up.append(operation)

    def settle(self, ended: Callable[[], None]) -> None:
        self.settling.append(ended)

    def hurry(self) -> None:
        self.calls.append(("hurry",))

    def end(self, error: OSError | None = None) -> None:
        _, ended = self.begun.pop(0)
        ended(error)


class Started:
    """One command that was started."""

    def __init__(self, server: DeviceServer, nexus: Nexus, cdb: bytes, data: bytes = b"") -> None:
        self.task: ScsiTask = server.begin(nexus, 0, cdb)
        assert not self.task.status and self.task.may_block and self.task.in_loop
        self.buffer = memoryview(bytearray(data.ljust(self.task.length, b"\0")))
        self.ended = 0
        self.started = server.start(self.task, self.buffer, self._end)

    def _end(self) -> None:
        self.ended += 1

    @property
    def code(self) -> tuple[int, int]:
        found = sense.decode(self.task.sense)
        return found.key, found.code


@pytest.fixture
def store() -> LoopFake:
    return LoopFake()


@pytest.fixture
def unit(store: LoopFake) -> LogicalUnit:
    return LogicalUnit(store, serial="S", block=512, loop=store)


@pytest.fixture
def server(unit: LogicalUnit) -> DeviceServer:
    return DeviceServer({0: unit}, IQN)


@pytest.fixture
def begin(server: DeviceServer) -> Callable[..., Started]:
    nexus = Client(server).nexus
    return lambda *words, **more: Started(server, more.get("nexus", nexus), *words)


def test_reads_writes_and_flushes_need_no_thread(store: LoopFake, begin: Any) -> None:
    for cdb, data, call in (
        (WRITE, b"w" * 512, ("write", 512, False)),
        (FUA_WRITE, b"f" * 512, ("write", 512, True)),
        (READ, b"", ("read", 512)),
        (FLUSH, b"", ("flush",)),
    ):
        one = begin(cdb, data)
        assert one.started and not one.ended and store.calls[-1] == call
        store.end()
        assert one.ended == 1 and one.task.status == sam.GOOD
        assert one.task.transferred == (512 if cdb is READ else 0)
    assert store.content[512:1024] == b"f" * 512


def test_each_nexus_owns_its_operations(
    store: LoopFake, server: DeviceServer, unit: LogicalUnit
) -> None:
    """So that initiators take turns. The flush behind a write is that of its nexus, too."""
    one, other = Client(server).nexus, Client(server, name="iqn.2026-11.example:other").nexus
    Started(server, one, READ)
    Started(server, other, WRITE)
    Started(server, one, WRITE)
    Started(server, other, FLUSH)
    assert store.owners == [one, other, one, other]
    del store.begun[:], store.owners[:]
    begun = Started(server, other, WRITE)
    unit.write_through = True  # the cache is turned off meanwhile
    store.end()
    assert store.owners == [other, other] and not begun.ended


def test_what_else_may_wait_goes_to_a_thread(store: LoopFake, begin: Any) -> None:
    assert not begin(UNMAP).started
    assert not store.begun


def test_status_and_sense_of_the_store(store: LoopFake, begin: Any) -> None:
    one, other = begin(READ), begin(WRITE)
    data = sense.encode_fixed(sense.MEDIUM_ERROR, 0x11, 0x04, 77)
    store.end(StatusError(errno.EREMOTEIO, "broken", sam.CHECK_CONDITION, data))
    store.end(StatusError(errno.EBUSY, "away", sam.BUSY))
    assert (one.task.status, one.task.sense, one.task.transferred) == (2, data, 0)
    assert (other.task.status, other.task.sense) == (sam.BUSY, b"")


def test_a_write_in_doubt_is_settled_before_its_abort_is_answered(
    store: LoopFake, begin: Any
) -> None:
    one, other = begin(WRITE), begin(READ)
    one.task.cancel()
    other.task.cancel()
    assert store.given_up == ["write", "read"]
    store.end(StatusError(errno.EBUSY, "aborted", sam.BUSY))
    assert not one.ended
    store.settling.pop()()
    assert one.ended == 1 and one.task.status == sam.TASK_ABORTED
    store.end()
    assert other.ended == 1 and not store.settling  # a read changes nothing
    late = begin(WRITE)
    store.end()
    late.task.cancel()
    assert store.given_up == ["write", "read"]  # it had ended


def test_a_cancelled_task_is_not_started(server: DeviceServer, store: LoopFake) -> None:
    nexus = Client(server).nexus
    task = server.begin(nexus, 0, WRITE)
    task.cancel()
    assert not server.start(task, memoryview(bytearray(512)), lambda: None)
    assert server.run(task, memoryview(bytearray(512))) and task.status == sam.TASK_ABORTED


def test_a_write_waits_for_compare_and_write_in_a_thread(unit: LogicalUnit, begin: Any) -> None:
    with unit.guard.exclusive((512, 1024)):
        assert not begin(WRITE).started


def test_compare_and_write_in_a_thread_waits_for_a_write(
    unit: LogicalUnit, store: LoopFake, begin: Any
) -> None:
    one = begin(WRITE)
    assert one.started
    ended_before = []

    def compare_and_write() -> None:
        with unit.guard.exclusive((512, 1024)):
            ended_before.append(one.ended)

    def announced() -> bool:
        """Whether it keeps new writers out."""
        entered = unit.guard.enter((512, 1024), True)
        if entered:
            unit.guard.leave((512, 1024))
        return not entered

    thread = threading.Thread(target=compare_and_write)
    thread.start()
    until_blocking(lambda: ended_before or announced())
    store.end()
    thread.join()
    assert ended_before == [1]


def test_the_cache_is_turned_off_while_a_write_is_under_way(
    unit: LogicalUnit, store: LoopFake, begin: Any
) -> None:
    """Its GOOD comes after a flush, as the flush of MODE SELECT may have come before it."""
    one = begin(WRITE)
    unit.write_through = True
    store.end()
    assert not one.ended and store.begun[0][0] == "flush"
    store.end()
    assert one.ended == 1 and one.task.status == sam.GOOD


@pytest.mark.logs(logs.FILE_ERRORS)
def test_a_failed_flush_is_told_to_each_that_has_written(
    server: DeviceServer, store: LoopFake, begin: Any
) -> None:
    nexuses = [Client(server, isid=bytes((0x80, 0, 0, 0, 0, at))).nexus for at in range(3)]
    for nexus in nexuses[:2]:
        begin(WRITE, nexus=nexus)
        store.end()
    first = begin(FLUSH, nexus=nexuses[0])
    store.end(StatusError(errno.EREMOTEIO, "lost", sam.CHECK_CONDITION, b""))
    assert first.task.status == sam.CHECK_CONDITION
    found = []
    for nexus in nexuses:
        one = begin(FLUSH, nexus=nexus)
        store.end()
        found.append(one.task.status)
    assert found == [sam.GOOD, sam.CHECK_CONDITION, sam.GOOD]


def test_a_flush_that_was_not_carried_out_has_lost_nothing(
    server: DeviceServer, store: LoopFake, begin: Any
) -> None:
    one, other = (Client(server, isid=bytes((0x80, 0, 0, 0, 0, at))).nexus for at in range(2))
    for nexus in (one, other):
        begin(WRITE, nexus=nexus)
        store.end()
    begin(FLUSH, nexus=one)
    store.end(StatusError(errno.EBUSY, "away", sam.BUSY))
    again = begin(FLUSH, nexus=other)
    store.end()
    assert again.task.status == sam.GOOD


def test_batches_and_the_end_are_passed_on(server: DeviceServer, store: LoopFake) -> None:
    ended = []
    server.on_batch = lambda: ended.append(1)
    store.batch_ended()
    assert ended == [1]
    server.hurry()
    assert store.calls[-1] == ("hurry",)
