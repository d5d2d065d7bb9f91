"""Threads that wait for requests: interrupts, the end, forks, and the end of the interpreter."""

from __future__ import annotations

import errno
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import trio

from iserblk.commands.command import SENT, Command, Waiter
from iserblk.disk.aio import TrioDiskSet
from iserblk.disk.blocking import ThreadClient, ThreadDiskSet
from iserblk.disk.disk_thread import READ, WRITE, DiskThread, HandedRequest
from iserblk.disk.seam import Rest
from iserblk.errors import (
    CommandError,
    ConnectionLost,
    IserblkError,
    LocalProtocolError,
    OutOfRange,
    WritesLost,
)
from iserblk.iscsi import bhs
from iserblk.loop.strands import elsewhere, here, park, pause
from tests.initiator.peer import Heard, answering, disk_of, linked
from tests.nbd.serving import Again, DirectFake
from tests.support import logs
from tests.support.disk_threads import disks_of, opened, thread_disk
from tests.support.target import running_target
from tests.support.until import until_blocking

pytestmark = pytest.mark.logs(logs.DEADLINES, logs.RECONNECTED)
NAME = "iserblk-disks"


def _bells() -> int:
    """How many descriptors there are by which threads, and loops, wait."""
    count = 0
    for each in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            count += os.readlink(f"/proc/self/fd/{each}").startswith("anon_inode:")
    return count


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Counted: gRPC, where another test of this process has used it, has another one in place of
    each of its own behind each fork."""
    gc.collect()  # of other tests
    before = _bells()
    yield
    gc.collect()  # exceptions, which refer to much
    assert not [each for each in threading.enumerate() if each.name == NAME]
    assert _bells() <= before


def interrupt() -> None:
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def is_interrupted(call: Callable[..., object], *arguments: object) -> bool:
    """Nothing of the exception is left, which refers to buffers."""
    try:
        call(*arguments)
    except KeyboardInterrupt:
        return True
    return False


class Target:
    """The other end of a session. ``act``: what it does with a PDU that is no task management and
    no logout, which it answers; at first it answers all."""

    def __init__(self, depth: int = 8) -> None:
        self.session, self.peer = linked(depth=depth)
        self.core = disk_of(self.session)
        self.act: Callable[[Heard], object] = self.peer.respond
        self.manages = True
        self._thread = answering(self.peer, self._take)

    def _take(self, heard: Heard) -> None:
        if heard.opcode == bhs.LOGOUT_REQUEST:
            self.peer.goodbye(heard)
        elif heard.opcode == bhs.TASK_MANAGEMENT_REQUEST and self.manages:
            self.peer.complete(heard)
        else:
            self.act(heard)

    @property
    def heard(self) -> list[Heard]:
        return self.peer.heard

    def end(self) -> None:
        self._thread.join(60)
        self.peer.close()
        assert not self._thread.is_alive()


@pytest.fixture
def target() -> Iterator[Target]:
    made = Target()
    yield made
    made.end()


@pytest.mark.parametrize("length", [4096, 700, 1 << 19])  # one command, an edge, several
def test_an_interrupt_gives_the_buffer_back_first(target: Target, length: int) -> None:
    """A read raises KeyboardInterrupt only after its commands were aborted. The session serves this
    thread and all others afterwards."""
    commands = -(-length // (1 << 18))

    def act(heard: Heard) -> None:
        if len(target.heard) >= commands:
            target.act = target.peer.respond
            interrupt()

    target.act = act
    with thread_disk(target.core) as disk:
        buffer = bytearray(length)
        assert is_interrupted(disk.read_into, memoryview(buffer), 0)
        assert not any(slot.state == SENT for slot in target.session.queue.tasks)
        assert target.session.error is None
        buffer.clear()  # BufferError while a view of it exists
        opcodes = [heard.opcode for heard in target.heard]
        assert bhs.TASK_MANAGEMENT_REQUEST in opcodes
        for _ in range(3):
            disk.read_into(memoryview(bytearray(4096)), 0)
            disk.read_into(memoryview(bytearray(100)), 100)
    assert target.session.queue.busy == 0


def test_a_second_interrupt_does_not_wait_for_the_target(target: Target) -> None:
    """The target answers neither the write nor its abort, each of which brings an interrupt."""
    target.manages = False
    target.act = lambda _heard: interrupt()
    with thread_disk(target.core) as disk:
        with pytest.raises(KeyboardInterrupt):
            disk.write(memoryview(bytes(9000)), 0)
        assert isinstance(target.session.error, ConnectionLost)
        assert target.session.queue.busy == 0
        with pytest.raises(ConnectionLost):
            disk.write(memoryview(bytes(4096)), 0)


@pytest.mark.plain("calls inside of the compiled form cannot be interrupted")
def test_a_second_interrupt_comes_before_the_first_is_dealt_with(target: Target) -> None:
    """It is raised where the function begins that takes the request back."""
    target.act = lambda heard: interrupt() if len(target.heard) == 1 else target.peer.respond(heard)
    taken_back: list[str] = []

    def trace(frame: FrameType, _event: str, _argument: object) -> None:
        if frame.f_code.co_name == "_take_back":
            sys.settrace(before)
            taken_back.append(frame.f_code.co_name)
            raise KeyboardInterrupt

    with thread_disk(target.core) as disk:
        buffer = bytearray(4096)
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            assert is_interrupted(disk.read_into, memoryview(buffer), 0)
        finally:
            sys.settrace(before)
        assert taken_back
        assert not any(slot.state >= SENT for slot in target.session.queue.tasks)
        buffer.clear()  # BufferError while a view of it exists
        disk.read_into(memoryview(bytearray(4096)), 0)


def test_no_descriptor_for_a_thread_that_waits(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    def eventfd(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with thread_disk(target.core) as disk:
        with monkeypatch.context() as patched:
            patched.setattr(os, "eventfd", eventfd)
            with pytest.raises(IserblkError, match=r"Too many open files; .* \(ulimit -n"):
                disk.read_into(memoryview(bytearray(4096)), 0)
        disk.read_into(memoryview(bytearray(4096)), 0)


@pytest.mark.plain("calls inside of the compiled form cannot be interrupted")
@pytest.mark.parametrize("change", ["write", "read_into", "flush"])
def test_an_interrupt_before_any_call_leaves_nothing_taken(change: str) -> None:
    """Python raises KeyboardInterrupt where a function begins. What was never sent is in no
    journal; the session goes on."""
    outcomes = set()
    for moment in count(1):
        target = Target()
        target.core.keep_journal(1 << 20)
        with thread_disk(target.core) as disk:
            arguments = () if change == "flush" else (memoryview(bytearray(4096)), 0)
            interrupted = _interrupt_at(moment, partial(getattr(disk, change), *arguments))
            journal = target.core.durability.journal
            assert journal is not None
            kept = journal.size
            sent = any(heard.opcode == bhs.SCSI_COMMAND for heard in target.heard)
            assert (sent and change == "write") or not kept
            outcomes.add(sent)
            assert target.session.queue.busy == 0 and target.session.error is None
            disk.write(memoryview(bytes(4096)), 0)
        target.end()
        if not interrupted:
            break
    assert moment > 5 and outcomes == {False, True}


def _interrupt_at(moment: int, work: Callable[[], None]) -> bool:
    """Interrupt ``work`` where its function call of this number begins, of those in this thread.
    False: it has no more."""
    left = moment

    def trace(_frame: FrameType, _event: str, _argument: object) -> None:
        nonlocal left
        left -= 1
        if not left:
            sys.settrace(None)
            raise KeyboardInterrupt

    before = sys.gettrace()
    gc.disable()  # hypothesis is called when it collects; an interrupt there would be lost
    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
        gc.enable()
    return False


def test_an_interrupt_while_there_is_no_connection() -> None:
    """No command is at the target: the buffer is given back at once, and the session stays
    suspended."""
    target = Target()
    target.act = lambda _heard: target.peer.pair.disconnect()
    with thread_disk(target.core, reconnects=True) as disk:
        buffer = bytearray(1 << 19)

        def then() -> None:
            until_blocking(lambda: target.session.suspended is not None)
            interrupt()

        thread = threading.Thread(target=then)
        thread.start()
        assert is_interrupted(disk.read_into, memoryview(buffer), 0)
        thread.join(60)
        assert target.session.error is None and target.session.suspended is not None
        assert target.session.queue.busy == 0
        buffer.clear()
    target.end()


def test_all_threads_go_on_with_another_connection() -> None:
    """Eight writers wait when the connection is lost."""
    target = Target()
    errors: list[BaseException] = []

    def act(_heard: Heard) -> None:
        if sum(heard.opcode == bhs.SCSI_COMMAND for heard in target.heard) == 8:
            target.peer.pair.disconnect()

    target.act = act
    with thread_disk(target.core, reconnects=True) as disk:

        def client(number: int) -> None:
            try:
                disk.write(memoryview(bytes([number]) * 4096), number * 4096)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=client, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        until_blocking(lambda: target.session.suspended is not None)
        other = Target()

        async def offer() -> None:
            target.session.offer(other.session)
            disk.disk.driver.kick()  # type: ignore[attr-defined]

        disk.places.call(disk.disk, offer)
        for thread in threads:
            thread.join(60)
        assert not errors and not any(thread.is_alive() for thread in threads)
        assert target.session.counts.replayed == 8 and target.session.counts.reconnects == 1
        written = [heard for heard in other.heard if heard.opcode == bhs.SCSI_COMMAND]
        assert sorted(heard.operation for heard in written) == [0x8A] * 8
    other.end()
    target.end()


@pytest.mark.parametrize("interrupted", [True, False])
def test_a_thread_that_was_interrupted_has_heard_of_no_loss(
    target: Target, interrupted: bool
) -> None:
    """The flush has failed, and its thread is interrupted before it knows."""
    told: list[int] = []

    async def flush(client: object = None) -> None:
        if interrupted:
            interrupt()
        error = WritesLost("lun0: writes were lost")
        error.losses = 3
        if client is None:  # see ``BlockingDisk.flush``
            told.append(error.losses)
        raise error

    with thread_disk(target.core) as disk:
        disk.disk = failing = Failing(flush, told.append)  # type: ignore[assignment]
        disk.client = ThreadClient(failing.client, disk.disk, disk.places)
        with pytest.raises(KeyboardInterrupt if interrupted else WritesLost):
            disk.flush()
    assert told == ([] if interrupted else [3])


def test_an_interrupt_while_a_loss_is_told_leaves_it_untold(target: Target) -> None:
    """It is raised in place of the error that tells of the loss."""
    known: list[int] = []

    async def flush(_client: object) -> None:
        error = WritesLost("lun0: writes were lost")
        error.losses = 3
        raise error

    def told(losses: int) -> None:
        known.append(losses)
        interrupt()

    with thread_disk(target.core) as disk:
        disk.disk = failing = Failing(flush, told, known.clear)  # type: ignore[assignment]
        disk.client = ThreadClient(failing.client, disk.disk, disk.places)
        with pytest.raises(KeyboardInterrupt):
            disk.flush()
    assert not known


class Failing:
    """A disk with a flush of its own."""

    def __init__(
        self,
        flush: Callable[..., object],
        told: Callable[[int], None],
        unheard: Callable[[], None] = lambda: None,
    ) -> None:
        self.flush = flush
        self.client = SimpleNamespace(told=told, unheard=unheard)

    def begin_batch(self) -> bool:
        return False

    def end_batch(self, _held: bool) -> None:
        pass


def test_closed_while_threads_wait(target: Target) -> None:
    """Each is told, when its buffer is free: one command, several, and a flush."""
    heard = threading.Event()

    def act(_heard: Heard) -> None:
        if len(target.heard) >= 4:
            heard.set()

    target.act = act
    buffers = [bytearray(4096), bytearray(1 << 19)]
    errors: list[BaseException] = []
    with thread_disk(target.core) as disk:

        def wait(call: Callable[[], object]) -> None:
            try:
                call()
            except BaseException as error:
                errors.append(error)

        calls = [partial(disk.read_into, memoryview(buffer), 0) for buffer in buffers]
        threads = [
            threading.Thread(target=wait, args=(call,)) for call in [*calls, partial(disk.flush)]
        ]
        for thread in threads:
            thread.start()
        del calls
        assert heard.wait(60)
    for thread in threads:
        thread.join(60)
    assert [type(error) for error in errors] == [ConnectionLost] * 3
    with pytest.raises(ConnectionLost, match="the disks are closed"):
        disk.read_into(memoryview(buffers[0]), 0)
    errors.clear()
    threads.clear()
    gc.collect()
    for buffer in buffers:
        buffer.clear()


def test_closed_while_a_thread_waits_for_one_lun_of_two(target: Target) -> None:
    """Both LUNs belong to one session, which aborts the command once."""
    heard, ready, over = threading.Event(), threading.Event(), threading.Event()
    target.act = lambda _heard: heard.set()

    @asynccontextmanager
    async def both() -> Any:
        async with opened(target.core) as disks:
            disks.disks["lun1"] = disks.disks["lun0"]
            yield disks

    thread = DiskThread(both, ready.set, lambda _error: over.set())
    thread.start()
    assert ready.wait(60)
    ended = threading.Event()
    request = HandedRequest(thread, thread.disks["lun0"], ended.set)
    request.read(request.disk, memoryview(bytearray(4096)), 0)
    thread.send(request)
    assert heard.wait(60)
    thread.close()
    assert over.wait(60)
    assert ended.is_set() and isinstance(request.error, ConnectionLost)


def test_an_argument_that_is_none_harms_no_other_thread(target: Target) -> None:
    with thread_disk(target.core) as disk:
        for wrong in (bytearray(4096), "data", None, 7):
            name = type(wrong).__name__
            with pytest.raises(LocalProtocolError, match=rf"give memoryview\(.*, not a {name}$"):
                disk.read_into(wrong, 0)  # type: ignore[arg-type]
            with pytest.raises(LocalProtocolError, match="must be a memoryview: give "):
                disk.write(wrong, 0)  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            disk.read_into(memoryview(bytearray(4096)), "0")  # type: ignore[arg-type]
        with pytest.raises(OutOfRange):
            disk.write(memoryview(bytes(512)), 1 << 40)
        disk.read_into(memoryview(bytearray(4096)), 0)


def test_many_threads_are_answered_apart(target: Target) -> None:
    """Each gets its own answer; what fails, fails for its own thread."""
    unreadable = bytes.fromhex("7000030000000a00000000110000")

    def act(heard: Heard) -> None:
        lba = int.from_bytes(heard.bhs[bhs.CDB_OFFSET + 2 : bhs.CDB_OFFSET + 10], "big")
        if lba % 16:
            target.peer.respond(heard, status=2, sense=unreadable)
        else:
            target.peer.respond(heard)

    target.act = act
    failed = Counter[int]()
    with thread_disk(target.core) as disk:

        def client(number: int) -> None:
            for _ in range(20):
                try:
                    disk.read_into(memoryview(bytearray(4096)), number * 4096)
                except CommandError:
                    failed[number] += 1

        threads = [threading.Thread(target=client, args=(number,)) for number in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
    assert failed == {number: 20 for number in range(1, 12, 2)}


@pytest.mark.parametrize("length", [4096, 1 << 19])  # one command, a strand
def test_a_request_is_taken_back_in_each_state(target: Target, length: int) -> None:
    """Before it is handed over, under way, twice, and when it has ended: the letter ends behind the
    request, and the request once, when the target has aborted its commands."""
    ready, over, asked = threading.Event(), threading.Event(), threading.Event()
    aborts: list[Heard] = []
    target.manages = False

    def act(heard: Heard) -> None:
        if heard.opcode == bhs.TASK_MANAGEMENT_REQUEST:
            aborts.append(heard)
        else:
            asked.set()

    target.act = act
    thread = DiskThread(partial(opened, target.core), ready.set, lambda _error: over.set())
    thread.start()
    assert ready.wait(60)
    disk = thread.disks["lun0"]
    ends: list[str] = []

    def letter(name: str) -> None:
        done = threading.Event()

        def end() -> None:
            ends.append(name)
            done.set()

        thread.take_back(HandedRequest(thread, disk, end), request)
        letters.append(done)

    letters: list[threading.Event] = []
    request = HandedRequest(thread, disk, lambda: ends.append("request"))
    request.read(disk, memoryview(bytearray(length)), 0)
    letter("never")
    assert letters[0].wait(60)
    request = HandedRequest(thread, disk, lambda: ends.append("request"))
    request.read(disk, memoryview(bytearray(length)), 0)
    thread.send(request)
    assert asked.wait(60)
    letter("first")
    letter("second")
    until_blocking(lambda: aborts)
    done = threading.Event()
    thread.call(done.set)
    assert done.wait(60) and ends == ["never"]
    target.manages = True
    target.peer.complete(aborts[0])
    assert letters[1].wait(60) and letters[2].wait(60)
    assert isinstance(request.error, IserblkError)
    letter("late")
    assert letters[3].wait(60)
    assert ends == ["never", "request", "first", "second", "late"]
    thread.close()
    thread.join()
    assert over.is_set()
    letter("closed")
    with pytest.raises(ConnectionLost):
        thread.send(request)


def test_a_request_that_is_taken_back_at_once_is_not_sent(target: Target) -> None:
    """The loop finds the request and the letter together."""
    gate, done = threading.Event(), threading.Event()
    with thread_disk(target.core) as disk:
        thread = disk.places.thread
        thread.call(lambda: gate.wait(20))
        request = HandedRequest(thread, disk.disk, lambda: None)
        request.read(request.disk, memoryview(bytearray(4096)), 0)
        thread.send(request)
        thread.take_back(HandedRequest(thread, disk.disk, done.set), request)
        gate.set()
        assert done.wait(60) and isinstance(request.error, IserblkError)
    assert not any(heard.opcode == bhs.SCSI_COMMAND for heard in target.heard)


def test_a_request_that_is_taken_back_is_not_tried_again(target: Target) -> None:
    """The target answers BUSY while the command is being aborted."""
    asked, done = threading.Event(), threading.Event()
    commands: list[Heard] = []
    target.manages = False

    def act(heard: Heard) -> None:
        if heard.opcode == bhs.TASK_MANAGEMENT_REQUEST:
            target.peer.respond(commands[0], status=8)
            target.peer.complete(heard)
        else:
            commands.append(heard)
            asked.set()

    target.act = act
    with thread_disk(target.core) as disk:
        thread = disk.places.thread
        request = HandedRequest(thread, disk.disk, lambda: None)
        request.read(request.disk, memoryview(bytearray(4096)), 0)
        thread.send(request)
        assert asked.wait(60)
        thread.take_back(HandedRequest(thread, disk.disk, done.set), request)
        assert done.wait(60) and len(commands) == 1


def test_behind_a_fork(target: Target) -> None:
    with thread_disk(target.core) as disk:
        disk.read_into(memoryview(bytearray(4096)), 0)
        read_end, write_end = os.pipe()
        child = os.fork()
        if not child:
            signal.alarm(60)  # it may wait for a thread that it does not have
            try:
                disk.new_client().ended()
                disk.read_into(memoryview(bytearray(4096)), 0)
            except ConnectionLost as error:
                os.write(write_end, str(error).encode())
            finally:
                os._exit(0)
        os.close(write_end)
        with os.fdopen(read_end) as said:
            assert said.read().endswith("open disks behind the fork")
        os.waitpid(child, 0)
        disk.read_into(memoryview(bytearray(4096)), 0)


def test_a_fork_while_a_thread_wakes_the_thread_of_the_disks(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds a lock then, which nobody gives back in the child."""
    ring, rings, forked = os.eventfd_write, threading.Event(), threading.Event()

    def slow(fd: int, value: int) -> None:
        if threading.current_thread() is reader:
            rings.set()
            assert forked.wait(60)
        ring(fd, value)

    def read() -> None:
        while not rings.is_set():
            disk.read_into(memoryview(bytearray(4096)), 0)

    reader = threading.Thread(target=read)
    disks = disks_of(target.core)
    disk = disks.disks["lun0"]
    monkeypatch.setattr(os, "eventfd_write", slow)
    reader.start()
    assert rings.wait(60)
    child = os.fork()
    if not child:
        signal.alarm(10)
        try:
            disks.close()
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    forked.set()
    reader.join(60)
    disks.close()
    assert status == 0


@pytest.mark.parametrize("told", ["this thread", "another thread"])
def test_opening_is_interrupted(told: str) -> None:
    """Nothing is left running. A signal of which another thread is told does not wake this one."""
    cancelled = threading.Event()
    numbers = {signal.SIGINT} if told == "another thread" else set()

    @asynccontextmanager
    async def never() -> Any:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
        os.kill(os.getpid(), signal.SIGINT)
        try:
            await trio.sleep_forever()
            yield
        finally:
            cancelled.set()

    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        with pytest.raises(KeyboardInterrupt):
            ThreadDiskSet(never)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert cancelled.wait(60)
    until_blocking(lambda: all(each.name != NAME for each in threading.enumerate()))


def test_what_opening_raises_is_raised() -> None:
    @asynccontextmanager
    async def refused() -> Any:
        raise OSError("no descriptors")
        yield

    with pytest.raises(OSError, match="no descriptors"):
        ThreadDiskSet(refused)


def test_what_takes_more_than_one_command_goes_on_with_the_rest() -> None:
    """With its deadline: it has no other one."""
    disk = _Again()
    with _thread_of(disk) as thread:
        for kind in (READ, WRITE):
            request, done = _handed(thread, disk, kind)
            until_blocking(lambda: disk.begun)
            thread.call(disk.end)
            assert done.wait(60) and request.error is None
    assert disk.rests == [disk.LEFT] * 2


@pytest.mark.parametrize("kind", [READ, WRITE])
@pytest.mark.parametrize("how", ["taken back", "closed"])
def test_what_has_yet_to_go_on_is_not_begun_any_more(how: str, kind: int) -> None:
    """Nor is it taken for done."""
    disk = _Again()
    with _thread_of(disk) as thread:
        request, done = _handed(thread, disk, kind)
        until_blocking(lambda: disk.begun)
        if how == "taken back":
            told = threading.Event()
            thread.take_back(HandedRequest(thread, request.disk, told.set), request)
            assert told.wait(60)
    assert done.wait(60) and isinstance(request.error, ConnectionLost) and not disk.rests


def test_closed_between_an_answer_and_its_turn() -> None:
    """Nothing is begun any more in that turn: nobody would abort it, nor settle it."""
    for _ in range(20):  # which strand is closed first is chance
        _close_between_an_answer_and_its_turn()


def _close_between_an_answer_and_its_turn() -> None:
    disk: Any = DirectFake()
    late: list[tuple[HandedRequest, threading.Event]] = []

    async def answer(_waiter: object) -> None:
        disk.end()
        late.append(_handed(thread, disk, READ))

    async def wait() -> None:
        strand = here().running
        assert strand is not None
        strand.abandon = answer
        waits.set()
        await park()

    waits = threading.Event()
    with _thread_of(disk) as thread:
        request, done = _handed(thread, disk, READ)
        other = HandedRequest(thread, disk, lambda: None)
        other.call(disk, wait)
        thread.send(other)
        assert waits.wait(60)
    assert done.wait(60) and request.error is None
    request, done = late[0]
    assert done.wait(60) and isinstance(request.error, ConnectionLost) and not disk.begun


def test_closed_right_before_an_answer_is_settled() -> None:
    """What is left of its request is not begun any more: its strand would never run, nor be
    closed."""
    disk: Any = _Again()
    waits = threading.Event()

    async def end() -> None:
        waits.set()
        try:
            await trio.sleep_forever()
        finally:
            disk.end()  # in the turn of trio in which the strands begin to be closed

    with _thread_of(disk) as thread:
        request, done = _handed(thread, disk, READ)
        until_blocking(lambda: disk.begun)
        other = HandedRequest(thread, disk, lambda: None)
        other.call(disk, partial(elsewhere, end))
        thread.send(other)
        assert waits.wait(60)
    assert done.wait(60) and isinstance(request.error, ConnectionLost) and not disk.rests


@pytest.mark.parametrize("how", ["taken back", "closed"])
def test_what_ends_before_its_strand_has_begun(how: str) -> None:
    """Nothing of the strand runs then. The thread that waits is told all the same."""
    disk: Any = DirectFake()
    begun: list[str] = []
    told, done = threading.Event(), threading.Event()

    async def end() -> None:
        if how == "closed":
            thread.close()
        else:
            thread.take_back(HandedRequest(thread, disk, told.set), last)

    async def give_way() -> None:
        if not done.is_set():
            time.sleep(0.01)  # noqa: ASYNC251 (trio's thread is to find out what is wanted)
            await pause()  # so no strand behind it begins in this turn

    async def begin() -> None:
        begun.append("last")

    def hand_over() -> None:
        for operation in [end, *[give_way] * 100]:
            request = HandedRequest(thread, disk, lambda: None)
            request.call(disk, operation)
            thread.send(request)
        thread.send(last)

    with _thread_of(disk) as thread:
        last = HandedRequest(thread, disk, done.set)
        last.call(disk, begin)
        thread.call(hand_over)
        assert done.wait(60) and (how == "closed" or told.wait(60))
    assert isinstance(last.error, ConnectionLost) and not begun


@pytest.mark.parametrize("kind", ["request", "letter"])
def test_the_thread_ends_while_something_is_handed_over(kind: str) -> None:
    """It has looked for what is left before it comes, and does not look again."""

    class Late(deque[HandedRequest]):
        def append(self, request: HandedRequest) -> None:
            thread.close()
            thread.join()
            super().append(request)

    disk: Any = DirectFake()
    done = threading.Event()
    with _thread_of(disk) as thread:
        request = HandedRequest(thread, disk, done.set)
        request.read(disk, memoryview(bytearray(4096)), 0)
        thread._inbox = Late()
        if kind == "request":
            thread.send(request)
        else:
            thread.take_back(request, HandedRequest(thread, disk, lambda: None))
        assert done.is_set() and isinstance(request.error, ConnectionLost)


def test_a_write_with_fua_of_a_thread_is_one() -> None:
    disk = _Again()
    with _thread_of(disk) as thread:
        _, done = _handed(thread, disk, WRITE, fua=True)
        assert done.wait(60)
    assert disk.through == [True] and disk.rests == [None]


class _Again(Again):
    """``through``: of each write that was not begun as one command, whether it is one with FUA."""

    def __init__(self) -> None:
        super().__init__()
        self.through: list[bool] = []

    async def write(
        self, buffer: memoryview, offset: int, fua: bool = False, rest: Rest | None = None
    ) -> None:
        self.through.append(fua)
        await super().write(buffer, offset, fua, rest)


@contextmanager
def _thread_of(disk: Any) -> Iterator[DiskThread]:
    ready = threading.Event()

    @asynccontextmanager
    async def opener() -> AsyncIterator[TrioDiskSet]:
        yield TrioDiskSet({"lun0": disk}, lambda: None)

    thread = DiskThread(opener, ready.set, lambda _error: None)
    thread.start()
    assert ready.wait(60)
    yield thread
    thread.close()
    thread.join()


def _handed(
    thread: DiskThread, disk: Any, kind: int, fua: bool = False
) -> tuple[HandedRequest, threading.Event]:
    done = threading.Event()
    request = HandedRequest(thread, disk, done.set)
    if kind == READ:
        request.read(disk, memoryview(bytearray(4096)), 0)
    else:
        request.write(disk, memoryview(bytearray(4096)), 0, fua)
    thread.send(request)
    return request, done


def test_closed_twice(target: Target) -> None:
    disks = disks_of(target.core)
    disks.close()
    disks.close()


def test_a_bug_is_raised_at_the_end(target: Target, caplog: pytest.LogCaptureFixture) -> None:
    """Every thread is told before that."""

    async def broken() -> None:
        raise BaseExceptionGroup("", [RuntimeError("broken"), GeneratorExit()])

    disks = disks_of(target.core)
    disk: Any = disks.disks["lun0"]
    with pytest.raises(ConnectionLost):
        disk.places.call(disk.disk, broken)
    said = ""
    try:
        disks.close()
    except BaseException as error:
        said = repr(error)
    assert "broken" in said
    disks.close()
    caplog.clear()  # records refer to errors, and those to much


@pytest.mark.plain("a method of the compiled form cannot be replaced")
@pytest.mark.parametrize("where", ["end", "begin"])
def test_a_bug_of_one_request_ends_the_others(
    target: Target, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    """In its end, or before it begins. Those of other threads are under way, and are aborted."""
    reads: list[Heard] = []
    target.act = reads.append
    disks = disks_of(target.core)
    disk: Any = disks.disks["lun0"]
    end_read = disk.disk.end_read

    def ended(slot: object) -> float:
        monkeypatch.undo()
        end_read(slot)
        raise RuntimeError("broken")

    def begun() -> bool:
        raise RuntimeError("broken")

    errors: list[str] = []

    def read() -> None:
        try:
            disk.read_into(memoryview(bytearray(4096)), 0)
        except IserblkError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=read, daemon=True) for _ in range(3)]
    for thread in threads[:2]:
        thread.start()
    until_blocking(lambda: len(reads) == 2)
    if where == "end":
        threads.pop()
        monkeypatch.setattr(disk.disk, "end_read", ended)
        target.peer.respond(reads[0])
    else:
        monkeypatch.setattr(disk.disk, "begin_batch", begun)
        threads[2].start()
    for thread in threads:
        thread.join(60)
    said = ""
    try:
        disks.close()
    except BaseException as error:
        said = repr(error)
    assert "broken" in said
    told = "the disks were closed while a request was under way"
    others = ["internal error"] if where == "end" else ["the disks are closed", told]
    assert sorted(errors) == sorted([*others, told])  # which thread is told first is chance
    caplog.clear()  # records refer to errors, and those to much


def test_a_bug_in_each_end_of_a_command() -> None:
    """The first ends the use of the disks, and those behind it let no thread wait for ever."""

    class Broken(DirectFake):
        def end_read(self, slot: Command) -> Rest | None:
            raise RuntimeError("broken")

    disk: Any = Broken()
    with _thread_of(disk) as thread:
        handed = [_handed(thread, disk, READ) for _ in range(4)]
        until_blocking(lambda: len(disk.begun) == 4)
        thread.call(disk.end)
    assert all(done.is_set() for _, done in handed)
    assert [str(request.error) for request, _ in handed] == ["internal error"] * 4


def test_a_bug_behind_the_beginning_of_a_command() -> None:
    """Its command is under way: until it has ended its buffer is not free. An argument that is none
    is an error for its request alone."""

    class Broken(DirectFake):
        def begin_read(self, buffer: memoryview, offset: int, waiter: Waiter) -> Command | None:
            if offset:
                super().begin_read(buffer, offset, waiter)
            raise TypeError("broken")

    disk: Any = Broken()
    under_way: list[int] = []
    with _thread_of(disk) as thread:
        request, done = _handed(thread, disk, READ)
        assert done.wait(60) and isinstance(request.error, TypeError)
        request = HandedRequest(thread, disk, lambda: under_way.append(len(disk.begun)))
        request.read(disk, memoryview(bytearray(4096)), 4096)
        thread.send(request)
        until_blocking(lambda: under_way)
    assert under_way == [0] and str(request.error) == "internal error"


def test_a_set_that_nobody_closes(tmp_path: Path) -> None:
    """At the end of the interpreter a file writes what it has kept, and the disks log out."""
    with running_target([f"{tmp_path}/lun:size=1M"], tmp_path / "target.log") as running:
        program = (
            "import atexit, iserblk\n"
            "def last():\n"
            "    try:\n"
            "        disks.disks['lun0'].refresh()\n"
            "    except iserblk.ConnectionLost as error:\n"
            "        print(error)\n"
            "atexit.register(last)\n"  # it is called behind what is registered later
            f"disks = iserblk.open_disks(['{running.url}/0'])\n"
            "file = disks.disks['lun0'].open('r+b')\n"
            "file.write(b'kept' * 128)\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == "the disks are closed\n"
        assert (tmp_path / "lun").read_bytes()[:512] == b"kept" * 128
