"""Sessions in one trio loop: the loop does their turns, and no task of theirs waits for them."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import pytest
import trio
import trio.testing

from iserblk.disk.aio import TrioDisk
from iserblk.errors import ConnectionLost
from iserblk.initiator.drivers.tasks import MOST_BATCHES, TrioDriver
from iserblk.iscsi import bhs
from iserblk.loop.here import loop_here
from iserblk.loop.strands import open_strands
from tests.initiator.peer import Heard, disk_of, linked
from tests.support import logs
from tests.support.descriptors import descriptors, descriptors_to_begin_with
from tests.support.until import until

WAIT_S = 30
BLOCK = 512


class End:
    """A session with a driver, and its far end. ``silent``: this answers nothing."""

    def __init__(self, depth: int = 4) -> None:
        self.session, self.peer = linked(depth=depth)
        self.driver = TrioDriver(self.session)
        self.disk = TrioDisk(disk_of(self.session), self.driver)
        self.silent = False

    def answer(self, heard: Heard) -> None:
        if heard.opcode == bhs.LOGOUT_REQUEST:
            self.peer.goodbye(heard)
        elif heard.opcode == bhs.TASK_MANAGEMENT_REQUEST:
            self.peer.complete(heard)
        elif not self.silent:
            self.peer.respond(heard)

    def cut(self) -> None:
        """The far end closes the connection."""
        trio.lowlevel.notify_closing(self.peer.pair.fileno())
        self.peer.close()

    async def read(self) -> None:
        await self.disk.read_into(memoryview(bytearray(BLOCK)), 0)


@asynccontextmanager
async def driven(*ends: End) -> AsyncIterator[trio.Nursery]:
    """Drivers and far ends run until they are logged out here."""
    with trio.fail_after(WAIT_S):
        async with trio.open_nursery() as nursery:
            for end in ends:
                nursery.start_soon(end.peer.run, end.answer)
            async with trio.open_nursery() as drivers:  # left when all have ended
                for end in ends:
                    await drivers.start(end.driver.run)
                yield nursery
                for end in ends:
                    with suppress(ConnectionLost):
                        await end.driver.log_out()
            nursery.cancel_scope.cancel()
    for end in ends:
        end.peer.close()


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The descriptors that tasks wait for by themselves from now on."""
    found: list[int] = []
    wait = trio.lowlevel.wait_readable

    async def noted(fd: int) -> None:
        found.append(fd)
        await wait(fd)

    monkeypatch.setattr(trio.lowlevel, "wait_readable", noted)
    return found


async def test_one_task_waits_for_all(waits: list[int]) -> None:
    ends = [End() for _ in range(20)]
    async with driven(*ends):
        for end in ends:
            await end.read()
        waits.clear()
        async with trio.open_nursery() as reads:
            for end in ends:
                for _ in range(3):
                    reads.start_soon(end.read)
        mine = {end.session.fileno() for end in ends}
        assert not mine.intersection(waits)
        assert [len(end.peer.heard) for end in ends] == [4] * len(ends)


async def test_commands_that_a_batch_of_answers_woke_leave_together() -> None:
    """Those of tasks, and those of strands."""
    ends = [End(depth=8), End(depth=8)]
    end = ends[0]

    async def reads() -> None:
        for _ in range(3):
            await end.read()

    async with driven(*ends):
        for each in ends:
            await each.read()
        end.silent = True
        sent = end.peer.heard
        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(reads)
            for count in (5, 9, 13):
                await end.peer.hears(count)
                for heard in sent[count - 4 : count]:
                    end.peer.respond(heard)
        assert len(sent) == 13
        async with open_strands() as group:
            for _ in range(4):
                group.start_soon(reads)
            for count in (17, 21, 25):
                await end.peer.hears(count)
                for heard in sent[count - 4 : count]:
                    end.peer.respond(heard)
        assert len(sent) == 25 and end.session.queue.in_flight == 0


@pytest.mark.plain("replaces a method")
@pytest.mark.parametrize("tasks", [2, 3, 5])
@pytest.mark.parametrize("sessions", [1, 2])
async def test_they_leave_together_in_whatever_order_trio_runs_them(
    monkeypatch: pytest.MonkeyPatch, sessions: int, tasks: int
) -> None:
    """It runs those of a turn in their order or in reverse, so the pump comes last or first."""
    rounds = 12
    ends = [End(depth=8) for _ in range(sessions)]
    end = ends[0]
    queue = end.session.queue
    flush = queue.flush
    sent: list[int] = []

    def counted() -> None:
        if queue.unsent:
            sent.append(queue.unsent)
        flush()

    async def reads() -> None:
        for _ in range(rounds):
            await end.read()

    async with driven(*ends):
        for each in ends:
            await each.read()
        end.silent = True
        monkeypatch.setattr(queue, "flush", counted)
        heard = end.peer.heard
        async with trio.open_nursery() as nursery:
            for _ in range(tasks):
                nursery.start_soon(reads)
            for number in range(rounds):
                count = 1 + (number + 1) * tasks
                await end.peer.hears(count)
                for each_heard in heard[count - tasks : count]:
                    end.peer.respond(each_heard)
        assert sent[-(rounds - 1) :] == [tasks] * (rounds - 1)
        assert sum(sent) == rounds * tasks


async def test_the_number_of_a_command_may_begin_anew() -> None:
    """CmdSN is a serial number: behind the largest comes 0. The batch around that is sent, too, and
    so is what comes for the other session."""
    ends = [End(depth=8), End()]
    end, other = ends
    first = (1 << 32) - 6
    end.session.queue.start(first, first, 1 << 20)

    async def reads() -> None:
        for _ in range(4):
            await end.read()

    async with driven(*ends):
        for each in ends:
            await each.read()
        end.silent = True
        heard = end.peer.heard
        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(reads)
            for count in (5, 9, 13, 17):
                await end.peer.hears(count)
                for each_heard in heard[count - 4 : count]:
                    end.peer.respond(each_heard)
        numbers = sorted((each_heard.cmd_sn - first) & 0xFFFFFFFF for each_heard in heard)
        assert numbers == list(range(17)) and 0 in (each_heard.cmd_sn for each_heard in heard)
        await other.read()


async def test_strands_that_always_have_more_hold_up_no_other_session() -> None:
    """As long as its answers are there at once, a session goes on; but not for ever."""
    busy, other = End(depth=8), End()
    most = 20 * MOST_BATCHES
    done = 0
    over = False

    async def strand() -> None:
        nonlocal done
        while not over and done < most:
            await busy.read()
            done += 1

    async with driven(busy, other):
        await busy.read()
        async with open_strands() as group:
            for _ in range(4):
                group.start_soon(strand)
            await other.read()
            over = True
        assert done < most


@pytest.mark.parametrize("how", ["task", "strand"])
async def test_a_cancelled_read_gives_the_buffer_back_first(how: str) -> None:
    ends = [End(), End()]
    end = ends[0]
    buffer = bytearray(BLOCK)
    async with driven(*ends):
        for each in ends:
            await each.read()
        end.silent = True
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery, open_strands() as group:
                starts: Callable[..., object] = (
                    group.start_soon if how == "strand" else nursery.start_soon
                )
                starts(end.disk.read_into, memoryview(buffer), 0)
                await end.peer.hears(2)
                scope.cancel()
        del group, nursery
        assert [heard.opcode for heard in end.peer.heard[1:]] == [
            bhs.SCSI_COMMAND,
            bhs.TASK_MANAGEMENT_REQUEST,
        ]
        assert end.session.error is None and end.session.queue.in_flight == 0
        buffer.clear()  # BufferError while a view of it exists
        await ends[1].read()


@pytest.mark.logs(logs.RECONNECTED)
async def test_a_session_goes_on_with_another_descriptor() -> None:
    """Its connection is lost while commands are in flight; the other session goes on."""
    ends = [End(), End()]
    end = ends[0]
    lost: list[None] = []
    end.driver.reconnect = lambda: lost.append(None)
    async with driven(*ends) as nursery:
        for each in ends:
            await each.read()
        end.silent = True
        read = trio.Event()

        async def once() -> None:
            await end.read()
            read.set()

        nursery.start_soon(once)
        await end.peer.hears(2)
        count = descriptors_to_begin_with()
        end.cut()
        await until(lambda: lost)
        await ends[1].read()
        assert end.session.suspended is not None and descriptors() == count - 2
        fresh, end.peer = linked()
        end.silent = False
        nursery.start_soon(end.peer.run, end.answer)
        end.session.offer(fresh)
        end.driver.kick()
        await read.wait()
        for each in ends:
            await each.read()
        assert descriptors() == count
        assert end.session.counts.reconnects == 1


@pytest.mark.logs(logs.RECONNECTED)
@pytest.mark.parametrize("held", [False, True])
async def test_what_was_put_off_when_the_connection_was_lost_is_sent_on_the_next(
    held: bool,
) -> None:
    """Commands that wait for others to be sent with, and the rest of what had come. ``held``: by a
    front-end, which lets go only when the session goes on."""
    end = End(depth=16)
    lost: list[None] = []
    end.driver.reconnect = lambda: lost.append(None)
    done: list[int] = []

    async def once(number: int) -> None:
        await end.read()
        done.append(number)

    async with driven(end) as nursery:
        await end.read()
        end.silent = True
        for number in range(5):
            nursery.start_soon(once, number)
        await end.peer.hears(6)
        before = end.driver.begin_batch() if held else False
        for number in range(5, 8):
            nursery.start_soon(once, number)
        while end.session.queue.busy < 8:
            await trio.lowlevel.checkpoint()
        end.driver.again()
        end.session.disconnect()
        end.driver.kick()
        assert lost and end.session.suspended is not None
        fresh, end.peer = linked(depth=16)
        end.silent = False
        nursery.start_soon(end.peer.run, end.answer)
        end.session.offer(fresh)
        end.driver.kick()
        if held:
            end.driver.end_batch(before)
        await until(lambda: len(done) == 8)
        await end.read()  # and nothing is left of the batch
        assert end.session.queue.in_flight == 0


async def test_a_connection_that_is_lost_ends_its_session_alone() -> None:
    """No driver reconnects: the commands of that session end, and its pump."""
    ends = [End(), End()]
    end = ends[0]
    errors: list[ConnectionLost] = []
    async with driven(*ends) as nursery:
        for each in ends:
            await each.read()
        end.silent = True

        async def fails() -> None:
            try:
                await end.read()
            except ConnectionLost as error:
                errors.append(error)

        nursery.start_soon(fails)
        await end.peer.hears(2)
        end.cut()
        await until(lambda: errors)
        await ends[1].read()


@pytest.mark.plain("replaces a method")
@pytest.mark.parametrize("where", ["progress", "flush"])
async def test_what_breaks_comes_out_of_its_pump(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug ends the operations of its session, and no other session."""
    ends = [End(), End()]
    end = ends[0]
    broken: list[BaseException] = []
    ended: list[ConnectionLost] = []

    def breaks(*_arguments: object) -> int:
        raise ZeroDivisionError

    async def run(task_status: trio.TaskStatus[None]) -> None:
        try:
            await end.driver.run(task_status)
        except* ZeroDivisionError as group:
            broken.append(group)

    async def fails() -> None:
        try:
            await end.read()
        except ConnectionLost as error:
            ended.append(error)

    async with driven(ends[1]) as nursery:
        nursery.start_soon(end.peer.run, end.answer)
        await nursery.start(run)
        for each in ends:
            await each.read()
        end.silent = True
        for _ in range(3):
            nursery.start_soon(fails)
        await end.peer.hears(4)
        monkeypatch.setattr(
            end.session if where == "progress" else end.session.queue, where, breaks
        )
        for heard in end.peer.heard[1:3]:  # two at once: their tasks run before what is sent
            end.peer.respond(heard)
        await until(lambda: broken)
        await until(lambda: len(ended) == (3 if where == "progress" else 1))
        assert isinstance(end.session.error, ConnectionLost)
        await ends[1].read()
    end.peer.close()


@pytest.mark.plain("replaces a method")
@pytest.mark.parametrize("where", ["a send that was put off", "the rest of what has come"])
async def test_what_breaks_between_answers_comes_out_of_its_pump(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a function that the loop calls, which is that of all sessions."""
    ends = [End(depth=8), End()]
    end = ends[0]
    broken: list[BaseException] = []
    ended: list[ConnectionLost] = []

    def breaks(*_arguments: object) -> int:
        raise ZeroDivisionError

    async def run(task_status: trio.TaskStatus[None]) -> None:
        try:
            await end.driver.run(task_status)
        except* ZeroDivisionError as group:
            broken.append(group)

    async def fails() -> None:
        try:
            await end.read()
        except ConnectionLost as error:
            ended.append(error)

    async with driven(ends[1]) as nursery:
        nursery.start_soon(end.peer.run, end.answer)
        await nursery.start(run)
        for each in ends:
            await each.read()
        end.silent = True
        for _ in range(5):
            nursery.start_soon(fails)
        await end.peer.hears(6)
        if where == "a send that was put off":
            monkeypatch.setattr(end.session.queue, "flush", breaks)
            nursery.start_soon(fails)
        else:
            monkeypatch.setattr(end.session, "progress", breaks)
            end.driver.again()
        await until(lambda: broken)
        await until(lambda: len(ended) >= 5)
        assert isinstance(end.session.error, ConnectionLost)
        await ends[1].read()
    end.peer.close()


async def test_pumps_that_are_cancelled_leave_nothing() -> None:
    """The descriptor that they shared is closed, and the sessions can be ended afterwards."""
    before = descriptors_to_begin_with()
    with trio.fail_after(WAIT_S):
        for _ in range(2):
            ends = [End() for _ in range(3)]
            opened = descriptors()
            async with trio.open_nursery() as nursery:
                for end in ends:
                    nursery.start_soon(end.peer.run, end.answer)
                    await nursery.start(end.driver.run)
                for _ in range(2):
                    for end in ends:
                        await end.read()
                assert descriptors() == opened + 1
                nursery.cancel_scope.cancel()
            assert descriptors() == opened
            for end in ends:
                end.session.fail(ConnectionLost("end of test"))
                end.peer.close()
            assert descriptors() == before


async def test_without_a_descriptor_to_wait_with_the_session_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And says why."""
    end = End()

    def refused(_fd: int, _ready: object) -> None:
        raise OSError(24, os.strerror(24))

    monkeypatch.setattr(loop_here(), "watch", refused)
    async with driven(end):
        with pytest.raises(ConnectionLost, match="cannot wait for it: Too many open files"):
            await end.read()


@pytest.mark.plain("replaces a method")
def test_an_interrupt_while_answers_are_taken_in_loses_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The main task hears of it where it waits; its command, and those of others, have ended."""
    done: list[int] = []

    async def main() -> None:
        ends = [End(), End()]
        end = ends[0]
        progress = end.session.progress
        calls = 0

        def interrupted(now: float) -> int:
            nonlocal calls
            calls += 1
            if calls == 3:
                signal.raise_signal(signal.SIGINT)
            return progress(now)

        async def others() -> None:
            for number in range(50):
                await ends[1].read()
                done.append(number)

        async with driven(*ends) as nursery:
            for each in ends:
                await each.read()
            monkeypatch.setattr(end.session, "progress", interrupted)
            nursery.start_soon(others)
            with pytest.raises(KeyboardInterrupt):
                while True:
                    await end.read()
            assert calls >= 3
            assert end.session.error is None and end.session.queue.in_flight == 0
            await end.read()
            await until(lambda: len(done) == 50)

    trio.run(main)


@pytest.mark.plain("replaces a method")
async def test_room_in_a_socket_is_waited_for_only_while_it_is_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the loop would turn for it without end."""
    wanted: list[bool] = []
    full = [True]

    class Noted:
        """Implements Watch."""

        fd = 0

        def want(self, readable: bool, writable: bool) -> None:
            assert readable
            wanted.append(writable)

        def expect(self, until: float) -> None: ...
        def close(self) -> None: ...

    end = End()
    monkeypatch.setattr(end.session, "wants_write", lambda: full[0])
    monkeypatch.setattr(loop_here(), "watch", lambda *_: Noted())
    async with trio.open_nursery() as nursery:
        await nursery.start(end.driver.run)
        await trio.testing.wait_all_tasks_blocked()
        end.driver.blocked()
        assert wanted == [True]
        full[0] = False
        end.driver.blocked()
        assert wanted == [True, False]
        nursery.cancel_scope.cancel()
    end.session.fail(ConnectionLost("end of test"))
    end.peer.close()
