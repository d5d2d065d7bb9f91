"""The trio driver: interrupted operations, an interrupted pump, and strands."""

from __future__ import annotations

import os
import signal
from typing import cast

import pytest
import trio
import trio.testing

from iserblk.commands.command import SENT, Operation
from iserblk.datamover.iser_initiator import IserInitiator
from iserblk.datamover.seam import ROUNDS
from iserblk.disk.aio import TrioDisk
from iserblk.errors import ConnectionLost
from iserblk.initiator.drivers.tasks import GATHER_BESIDE, TrioDriver, TrioWaiter
from iserblk.initiator.session.driving import GATHER_COMMANDS
from iserblk.initiator.session.slots import TaskSlot
from iserblk.iscsi import bhs, pdu
from iserblk.loop import busy_polling
from iserblk.loop.busy_polling import HITS
from iserblk.loop.strands import open_strands
from iserblk.rcap.seam import QueuePair
from tests.initiator.peer import Heard, answering_slowly, disk_of, linked
from tests.support import clocks
from tests.support.restless import Restless
from tests.support.until import until

WAIT_S = 30


@trio.lowlevel.enable_ki_protection
def _interrupt() -> None:
    """As when the user presses ^C while trio's own code runs: the main task gets the exception."""
    signal.raise_signal(signal.SIGINT)


def test_interrupt_gives_the_buffer_back_first() -> None:
    """A read raises KeyboardInterrupt only after its command was aborted."""
    buffer = bytearray(b"mine" * 128)
    seen: list[int] = []

    async def main() -> None:
        session, peer = linked()

        def answer(heard: Heard) -> None:
            seen.append(heard.opcode)
            if heard.opcode == bhs.TASK_MANAGEMENT_REQUEST:
                peer.complete(heard)
            elif heard.opcode == bhs.LOGOUT_REQUEST:
                peer.goodbye(heard)
            else:
                _interrupt()

        driver = TrioDriver(session)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(peer.run, answer)
            await nursery.start(driver.run)
            with pytest.raises(KeyboardInterrupt):
                await TrioDisk(disk_of(session), driver).read_into(memoryview(buffer), 0)
            assert session.error is None and session.queue.in_flight == 0
            buffer.clear()  # BufferError while a view of it exists
            await driver.log_out()
            peer.close()
            nursery.cancel_scope.cancel()

    trio.run(main)
    assert seen[:2] == [bhs.SCSI_COMMAND, bhs.TASK_MANAGEMENT_REQUEST]


def test_an_interrupt_does_not_end_an_operation_between_its_commands() -> None:
    done: list[str] = []

    def operation() -> Operation[int]:
        signal.raise_signal(signal.SIGINT)
        done.append("went on")
        yield 0.001
        pytest.fail("it is raised where the operation waits")

    async def main() -> None:
        session, peer = linked()
        with pytest.raises(KeyboardInterrupt):
            await TrioDriver(session).run_operation(operation())
        peer.close()

    trio.run(main)
    assert done == ["went on"]


@pytest.mark.parametrize("busy_poll_us", [0, 60_000_000])
async def test_one_read_after_the_other_keeps_the_loop_awake(
    busy_poll_us: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1})
    monkeypatch.setattr(busy_polling, "CROWDED_S", 3600.0)  # however busy this machine is
    session, peer = linked()
    session.busy_poll_us = busy_poll_us
    driver = TrioDriver(session)
    disk = TrioDisk(disk_of(session), driver)

    give_way = os.sched_yield
    looks: list[None] = []
    monkeypatch.setattr(os, "sched_yield", lambda: looks.append(give_way()))
    thread = answering_slowly(peer)
    async with trio.open_nursery() as nursery:
        await nursery.start(driver.run)
        for _ in range(HITS + 1):
            await disk.read_into(memoryview(bytearray(512)), 0)
        for _ in range(5):
            await disk.read_into(memoryview(bytearray(512)), 0)
        assert (len(looks) > 0) is (busy_poll_us > 0)
        await driver.log_out()
        nursery.cancel_scope.cancel()
    await trio.to_thread.run_sync(thread.join)
    peer.close()


@pytest.mark.plain("replaces a method")
async def test_pump_that_breaks_ends_every_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug in the pump, or ^C in the middle of it, leaves no operation waiting for ever."""
    session, peer = linked()
    driver = TrioDriver(session)

    def broken(_now: float) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(session, "progress", broken)
    disk = TrioDisk(disk_of(session), driver)
    buffer = bytearray(4096)
    errors: list[BaseExceptionGroup[BaseException]] = []

    async def operation() -> None:
        try:
            await disk.read_into(memoryview(buffer), 0)
        except trio.Cancelled:
            assert session.queue.in_flight == 0
            raise

    with trio.fail_after(WAIT_S):
        try:
            async with trio.open_nursery(strict_exception_groups=True) as nursery:
                await nursery.start(driver.run)
                nursery.start_soon(operation)
                await trio.testing.wait_all_tasks_blocked()
                peer.poll()
                peer.respond(peer.heard[0])
        except BaseExceptionGroup as group:
            errors.append(group)
    assert errors[0].split(KeyboardInterrupt)[0] is not None
    assert isinstance(session.error, ConnectionLost)
    peer.close()


@pytest.mark.plain("replaces a method")
async def test_a_break_while_the_loop_is_kept_awake(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same where the loop does not sleep between the answers."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1})
    monkeypatch.setattr(busy_polling, "CROWDED_S", 3600.0)  # however busy this machine is
    session, peer = linked()
    session.busy_poll_us = 60_000_000
    driver = TrioDriver(session)
    disk = TrioDisk(disk_of(session), driver)
    ended: list[Exception] = []

    def broken(_now: float) -> int:
        raise ZeroDivisionError

    def answer(heard: Heard) -> None:
        if len(peer.heard) > 2 * HITS:
            monkeypatch.setattr(session, "progress", broken)
        peer.respond(heard)

    async def operations() -> None:
        try:
            while True:
                await disk.read_into(memoryview(bytearray(512)), 0)
        except ConnectionLost as error:
            ended.append(error)

    with trio.fail_after(WAIT_S), pytest.RaisesGroup(ZeroDivisionError, flatten_subgroups=True):
        async with trio.open_nursery() as nursery:
            await nursery.start(driver.run)
            nursery.start_soon(peer.run, answer)
            nursery.start_soon(operations)
    assert isinstance(session.error, ConnectionLost)
    assert [str(error) for error in ended] == [str(session.error)]
    peer.close()


@pytest.mark.plain("replaces a method")
async def test_a_single_answer_is_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind it, with no other command under way, nothing can have come yet."""
    session, peer = linked()
    driver = TrioDriver(session)
    disk = TrioDisk(disk_of(session), driver)
    looks: list[int] = []
    progress = session.progress

    def counted(now: float) -> int:
        looks.append(progress(now))
        return looks[-1]

    async def reads() -> None:
        for _ in range(20):
            await disk.read_into(memoryview(bytearray(512)), 0)

    with trio.fail_after(WAIT_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(peer.run, peer.respond)
            await nursery.start(driver.run)
            monkeypatch.setattr(session, "progress", counted)
            async with open_strands() as group:
                group.start_soon(reads)
            monkeypatch.undo()
            nursery.cancel_scope.cancel()
    peer.close()
    assert sum(looks) == 20
    assert looks.count(0) < 10  # the peer's messages may come in pieces, and the clock looks, too


async def test_a_strand_gives_the_buffer_back_first() -> None:
    """A strand that is closed during a read ends only after its command was aborted."""
    session, peer = linked()
    driver = TrioDriver(session)
    disk = TrioDisk(disk_of(session), driver)
    buffer = bytearray(b"mine" * 128)
    seen: list[int] = []

    def answer(heard: Heard) -> None:
        seen.append(heard.opcode)
        if heard.opcode == bhs.TASK_MANAGEMENT_REQUEST:
            with pytest.raises(BufferError):
                buffer.clear()
            peer.complete(heard)
        elif heard.opcode == bhs.LOGOUT_REQUEST:
            peer.goodbye(heard)
        else:
            scope.cancel()

    with trio.fail_after(WAIT_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(peer.run, answer)
            await nursery.start(driver.run)
            with trio.CancelScope() as scope:
                async with open_strands() as group:
                    group.start_soon(disk.read_into, memoryview(buffer), 0)
            assert session.error is None and session.queue.in_flight == 0
            assert seen == [bhs.SCSI_COMMAND, bhs.TASK_MANAGEMENT_REQUEST]
            del group
            buffer.clear()  # BufferError while a view of it exists
            await driver.log_out()
            peer.close()
            nursery.cancel_scope.cancel()


@pytest.mark.plain("replaces a method")
async def test_strands_keep_many_reads_going(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each strand gets its own result, over several batches of answers. Commands are sent a few at
    a time, so that the target has work while more are prepared."""
    session, peer = linked(depth=20)
    flush = session.queue.flush
    sent: list[int] = []

    def counted() -> None:
        sent.append(session.queue.unsent)
        flush()

    monkeypatch.setattr(session.queue, "flush", counted)
    driver = TrioDriver(session)
    disk = TrioDisk(disk_of(session), driver)
    ended: list[int] = []

    def answer(heard: Heard) -> None:
        if heard.opcode == bhs.LOGOUT_REQUEST:
            peer.goodbye(heard)
        else:
            peer.respond(heard)

    async def read(number: int) -> None:
        buffer = memoryview(bytearray(512))
        for _ in range(20):
            await disk.read_into(buffer, number * 512)
        ended.append(number)

    with trio.fail_after(WAIT_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(peer.run, answer)
            await nursery.start(driver.run)
            async with open_strands() as group:
                for number in range(20):
                    group.start_soon(read, number)
            assert sorted(ended) == list(range(20))
            assert max(sent) == GATHER_COMMANDS
            assert session.queue.in_flight == 0
            await driver.log_out()
            peer.close()
            nursery.cancel_scope.cancel()


@pytest.mark.plain("replaces a method")
async def test_what_several_clients_begin_in_one_turn_leaves_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """But only while the target has enough to do."""
    session, peer = linked(depth=20)
    flush = session.queue.flush
    sent: list[int] = []

    def counted() -> None:
        sent.append(session.queue.unsent)
        flush()

    monkeypatch.setattr(session.queue, "flush", counted)
    driver = TrioDriver(session)
    disk = TrioDisk(disk_of(session), driver)
    waiters: list[TrioWaiter] = []

    def client(number: int) -> TaskSlot:
        waiters.append(TrioWaiter())
        held = disk.begin_batch()
        slot = disk.begin_read(memoryview(bytearray(512)), number * 512, waiters[-1])
        disk.end_batch(held)
        assert isinstance(slot, TaskSlot)
        return slot

    def answer(heard: Heard) -> None:
        if heard.opcode == bhs.LOGOUT_REQUEST:
            peer.goodbye(heard)
        else:
            peer.respond(heard)

    with trio.fail_after(WAIT_S):
        async with trio.open_nursery() as nursery:
            await nursery.start(driver.run)
            await trio.testing.wait_all_tasks_blocked()
            sent.clear()
            slots = [client(number) for number in range(GATHER_BESIDE)]
            assert sent == [1] * GATHER_BESIDE
            slots += [client(GATHER_BESIDE + number) for number in range(3)]
            assert sent == [1] * GATHER_BESIDE
            await trio.testing.wait_all_tasks_blocked()
            assert sent == [*[1] * GATHER_BESIDE, 3]
            nursery.start_soon(peer.run, answer)
            for waiter in waiters:
                await waiter.wait()
            assert [disk.end_read(slot) for slot in slots] == [None] * len(slots)
            await driver.log_out()
            peer.close()
            nursery.cancel_scope.cancel()


@pytest.mark.logs("may have failed a flush that was given up")
@pytest.mark.parametrize("waits_for", ["a block", "the journal"])
async def test_strands_that_wait_for_each_other_are_closed(waits_for: str) -> None:
    """A strand waits for a block or for room in the journal, which another strand gives back only
    when it ends."""
    session, peer = linked(depth=8)
    driver = TrioDriver(session)
    core = disk_of(session)
    disk = TrioDisk(core, driver)
    silent = False

    def answer(heard: Heard) -> None:
        if heard.opcode == bhs.TASK_MANAGEMENT_REQUEST:
            peer.complete(heard)
        elif heard.opcode == bhs.LOGOUT_REQUEST:
            peer.goodbye(heard)
        elif not silent:
            peer.respond(heard)

    with trio.fail_after(WAIT_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(peer.run, answer)
            await nursery.start(driver.run)
            if waits_for == "the journal":
                core.keep_journal(4096)
                await disk.write(memoryview(bytes(4096)), 0)  # full: further writes need a flush
                writes = [(memoryview(bytes(1024)), 8192 + number * 1024) for number in range(3)]
            else:
                writes = [(memoryview(bytes(100)), 10 + number * 200) for number in range(3)]
            silent = True
            with trio.CancelScope() as scope:
                async with open_strands() as group:
                    for data, offset in writes:
                        group.start_soon(disk.write, data, offset)
                    await trio.testing.wait_all_tasks_blocked(0.05)
                    scope.cancel()
            assert session.error is None and session.queue.in_flight == 0
            silent = False
            await driver.log_out()
            peer.close()
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize("comes", ["meanwhile", "afterwards"])
async def test_a_loop_that_was_blocked(
    comes: str, mock_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For longer than io-timeout: the answer counts, whether it came meanwhile or comes then. No
    command is aborted, and the connection is kept."""
    clocks.give(monkeypatch, mock_clock.current_time)
    session, peer = linked()
    driver = TrioDriver(session)
    disk = TrioDisk(disk_of(session), driver)
    async with trio.open_nursery() as nursery:
        await nursery.start(driver.run)
        for turn in range(6):  # trio takes the tasks of a turn in any order
            async with trio.open_nursery() as reading:
                reading.start_soon(disk.read_into, memoryview(bytearray(512)), 0)
                await trio.testing.wait_all_tasks_blocked()
                peer.poll()
                mock_clock.jump(0.7)
                await trio.testing.wait_all_tasks_blocked()
                if comes == "meanwhile":
                    peer.respond(peer.heard[turn])
                mock_clock.jump(session.io_timeout + 5)
                await trio.testing.wait_all_tasks_blocked()
                if comes == "afterwards":
                    peer.respond(peer.heard[turn])
        peer.poll()
        assert {heard.opcode for heard in peer.heard} == {bhs.SCSI_COMMAND}
        assert session.error is None and not driver.ladder.aborted
        nursery.cancel_scope.cancel()
    session.fail(ConnectionLost("closing"))
    peer.close()


async def test_an_answer_that_is_there_is_in_time(
    mock_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A deadline that passes in the same turn of the loop aborts nothing, whichever comes first."""
    clocks.give(monkeypatch, mock_clock.current_time)
    session, peer = linked()
    driver = TrioDriver(session)
    disk = TrioDisk(disk_of(session), driver)
    async with trio.open_nursery() as nursery:
        await nursery.start(driver.run)
        for turn in range(6):  # trio takes the tasks of a turn in any order
            async with trio.open_nursery() as reading:
                reading.start_soon(disk.read_into, memoryview(bytearray(512)), 0)
                await trio.testing.wait_all_tasks_blocked()
                peer.poll()
                (slot,) = [slot for slot in session.queue.tasks if slot.state == SENT]
                slot.deadline = mock_clock.current_time() + 1.2
                peer.respond(peer.heard[turn])
                mock_clock.jump(1.5)
                await trio.testing.wait_all_tasks_blocked()
        assert not driver.ladder.aborted
        nursery.cancel_scope.cancel()
    session.fail(ConnectionLost("closing"))
    peer.close()


async def test_what_is_left_for_another_turn_is_taken_in_without_a_descriptor() -> None:
    """The datamover of a session whose target keeps it busy."""
    session, peer = linked()
    datamover = session.queue.connection.datamover
    assert isinstance(datamover, IserInitiator)
    busy = Restless(datamover.qp, 2 * ROUNDS + 1)
    datamover.qp = cast("QueuePair", busy)
    driver = TrioDriver(session)
    with trio.fail_after(WAIT_S):
        async with trio.open_nursery() as nursery:
            await nursery.start(driver.run)
            peer.say(pdu.NopIn(itt=bhs.NO_TAG, stat_sn=101, exp_cmd_sn=1, max_cmd_sn=32))
            await until(lambda: busy.turns == 2 * ROUNDS + 1)
            nursery.cancel_scope.cancel()
    peer.close()
