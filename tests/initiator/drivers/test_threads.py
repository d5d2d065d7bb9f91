"""The blocking driver: which thread is woken, and by what."""

from __future__ import annotations

import gc
import os
import select
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count
from time import sleep
from types import FrameType
from typing import Any

import pytest

from iserblk.disk.blocking import ThreadDisk
from iserblk.disk.lun.operations import DiskCore
from iserblk.errors import ConnectionLost
from iserblk.initiator.commands import fill_read, release_ended
from iserblk.initiator.drivers.threads import BlockingDriver, ThreadWaiter
from iserblk.initiator.session.session import Session
from iserblk.initiator.session.slots import TAKEN, Operation, TaskSlot
from iserblk.iscsi import bhs
from iserblk.loop import busy_polling
from iserblk.loop.busy_polling import HITS
from tests.initiator import fake
from tests.initiator.peer import Heard, Peer, answering, answering_slowly, disk_of, linked
from tests.support import logs
from tests.support.until import until_blocking

pytestmark = pytest.mark.logs(logs.DEADLINES, logs.RECONNECTED)

REAL_POLL = select.poll


class _Poll:
    """A poll object that records: ``results`` is what each call returned, each sets ``entered``."""

    def __init__(self) -> None:
        self._poll = REAL_POLL()
        self.register, self.unregister = self._poll.register, self._poll.unregister
        self.modify = self._poll.modify
        self.entered = threading.Event()
        self.results: list[list[tuple[int, int]]] = []

    def poll(self, timeout: float) -> list[tuple[int, int]]:
        self.entered.set()
        found = self._poll.poll(20 * timeout)
        self.results.append(found)
        return found


def _polling(session: Session, poll: object) -> BlockingDriver:
    """A driver of ``session`` that uses ``poll`` instead of a new poll object."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(select, "poll", lambda: poll)
        return BlockingDriver(session)


def _driver() -> tuple[BlockingDriver, _Poll, int]:
    """A driver whose session's descriptor never becomes readable, its poll object, and the other
    end of the descriptor's pipe."""
    session, datamover = fake.session()
    quiet, other = os.pipe()
    datamover.fileno = lambda: quiet  # type: ignore[method-assign]
    poll = _Poll()
    return _polling(session, poll), poll, other


def test_a_leader_that_waits_for_another_thread_is_woken() -> None:
    """The leader polls the connection; another thread gives it what it waits for (a slot, a range
    lock)."""
    driver, poll, _ = _driver()
    waiters: list[ThreadWaiter] = []
    made = threading.Event()

    def lead() -> None:
        waiter = driver.new_waiter()
        waiter.pending = 1
        waiters.append(waiter)
        made.set()
        driver.wait(waiter)

    thread = threading.Thread(target=lead)
    thread.start()
    assert made.wait(20) and poll.entered.wait(20)
    waiters[0].task_done()
    thread.join(60)
    assert not thread.is_alive()
    # Every poll returned because of an event, none by its timeout.
    assert [[kind for _, kind in found] for found in poll.results] == [[select.POLLIN]]


@pytest.mark.parametrize("length", [4096, 700, 1 << 19])  # one command, an edge, several
def test_interrupt_gives_the_buffer_back_first(length: int) -> None:
    """A read raises KeyboardInterrupt only after its commands were aborted. The session serves this
    thread and all others afterwards."""
    session, peer = linked()
    driver = BlockingDriver(session)
    disk = ThreadDisk(disk_of(session), driver)
    interrupted = False
    seen: list[int] = []

    def act(heard: Heard) -> None:
        nonlocal interrupted
        seen.append(heard.opcode)
        if heard.opcode == bhs.TASK_MANAGEMENT_REQUEST:
            peer.complete(heard)
        elif heard.opcode == bhs.LOGOUT_REQUEST:
            peer.goodbye(heard)
        elif interrupted:
            peer.respond(heard)
        elif len(seen) == -(-length // (1 << 18)):
            interrupted = True
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    thread = answering(peer, act)
    buffer = bytearray(length)
    try:
        disk.read_into(memoryview(buffer), 0)
    except KeyboardInterrupt:
        pass
    else:
        pytest.fail("not interrupted")
    until_blocking(lambda: session.queue.in_flight == session.queue.busy == 0)  # no look either
    assert session.error is None
    buffer.clear()  # BufferError while a view of it exists
    assert bhs.TASK_MANAGEMENT_REQUEST in seen
    for _ in range(3):
        disk.read_into(memoryview(bytearray(4096)), 0)
        disk.read_into(memoryview(bytearray(100)), 100)
    driver.log_out()
    thread.join(60)
    peer.close()
    assert not thread.is_alive()


def test_second_interrupt_does_not_wait_for_the_target() -> None:
    session, peer = linked()
    driver = BlockingDriver(session)
    disk = ThreadDisk(disk_of(session), driver)

    def act(_heard: Heard) -> None:
        """Interrupts the writer at its command and again at the abort; answers neither."""
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    thread = answering(peer, act)
    with pytest.raises(KeyboardInterrupt):
        disk.write(memoryview(bytes(9000)), 0)
    assert isinstance(session.error, ConnectionLost) and session.queue.busy == 0
    with pytest.raises(ConnectionLost):
        disk.write(memoryview(bytes(4096)), 0)
    driver.log_out()
    thread.join(60)
    peer.close()
    assert not thread.is_alive()


def _serving(peer: Peer) -> threading.Thread:
    """A target that does whatever it is asked."""

    def act(heard: Heard) -> None:
        if heard.opcode == bhs.TASK_MANAGEMENT_REQUEST:
            peer.complete(heard)
        elif heard.opcode == bhs.LOGOUT_REQUEST:
            peer.goodbye(heard)
        else:
            peer.respond(heard)

    return answering(peer, act)


class _Core:
    """A LUN with an interrupt right behind a command that has ended: before its caller has its
    slot, or before the caller gives that back."""

    def __init__(self, core: DiskCore, when: str) -> None:
        self.core, self.when = core, when
        self.info, self.dropped = core.info, core.dropped

    def _begin(self, slot: TaskSlot | None) -> TaskSlot | None:
        assert slot is not None
        if self.when == "behind":
            self.driver.wait(self.driver.new_waiter())
            assert slot.state == TAKEN
            raise KeyboardInterrupt
        return slot

    def begin_read(self, *arguments: Any) -> TaskSlot | None:
        return self._begin(self.core.begin_read(*arguments))

    def begin_write(self, *arguments: Any) -> TaskSlot | None:
        return self._begin(self.core.begin_write(*arguments))

    def ended(self, slot: TaskSlot) -> float:
        raise KeyboardInterrupt

    ended_write = ended
    driver: BlockingDriver


@pytest.mark.parametrize("when", ["behind", "before its end"])
@pytest.mark.parametrize("change", [True, False], ids=["write", "read"])
def test_an_interrupt_leaves_no_slot_taken_for_good(when: str, change: bool) -> None:
    """Another thread may have taken in the answer before this one has its slot."""
    session, peer = linked()
    driver = BlockingDriver(session)
    core = disk_of(session)
    core.keep_journal(1 << 20)
    odd: Any = _Core(core, when)
    odd.driver = driver
    disk = ThreadDisk(odd, driver)
    buffer = bytearray(4096)
    thread = _serving(peer)
    with pytest.raises(KeyboardInterrupt):
        (disk.write if change else disk.read_into)(memoryview(buffer), 0)
    until_blocking(lambda: session.queue.busy == 0)
    assert session.error is None
    assert core.durability.wants_flush() == change
    buffer.clear()  # BufferError while a view of it exists
    ThreadDisk(core, driver).write(memoryview(bytes(4096)), 0)
    driver.log_out()
    thread.join(60)
    peer.close()
    assert not thread.is_alive()


@pytest.mark.plain("calls inside of the compiled form cannot be interrupted")
@pytest.mark.parametrize("change", [True, False], ids=["write", "read"])
def test_an_interrupt_before_any_call_leaves_nothing_taken(change: bool) -> None:
    """Python raises KeyboardInterrupt where a function begins. What was never sent is in no
    journal; the session goes on, or has ended."""
    outcomes = set()
    for moment in count(1):
        session, peer = linked()
        driver = BlockingDriver(session)
        core = disk_of(session)
        core.keep_journal(1 << 20)
        disk = ThreadDisk(core, driver)
        thread = _serving(peer)
        buffer = memoryview(bytearray(4096))
        interrupted = _interrupt_at(
            moment, partial(disk.write if change else disk.read_into, buffer, 0)
        )
        assert session.queue.busy == 0 and session.queue.in_flight == 0
        kept = core.durability.journal is not None and core.durability.journal.size
        sent = any(heard.opcode == bhs.SCSI_COMMAND for heard in peer.heard)
        assert sent or not kept
        outcomes.add((sent, session.error is None))
        if session.error is None:
            with suppress(ConnectionLost):  # the interrupt has cut it
                disk.write(memoryview(bytes(4096)), 0)
        session.fail(ConnectionLost("end of test"))
        thread.join(60)
        peer.close()
        assert not thread.is_alive()
        if not interrupted:
            break
    assert outcomes >= {(False, True), (True, True), (True, False)}


def _interrupt_at(moment: int, work: Callable[[], None], within: Any = None) -> bool:
    """Interrupt ``work`` where its function call of this number begins, of those ``within`` a
    function. False: it has no more."""
    left = moment

    def trace(frame: FrameType | None, _event: str, _argument: object) -> None:
        nonlocal left
        while within is not None and frame is not None and frame.f_code is not within.__code__:
            frame = frame.f_back
        if frame is None:
            return
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


@pytest.mark.parametrize("reconnects", [True, False], ids=["suspended", "ended"])
@pytest.mark.parametrize("at", ["task_done", "wake"])
def test_an_interrupt_before_another_thread_is_told(at: str, reconnects: bool) -> None:
    """The leader has taken in an answer for it, and was interrupted where a function begins: that
    thread finds out by itself, as no other answer will come."""
    session, peer = linked()
    driver = BlockingDriver(session)
    if reconnects:
        driver.reconnect = lambda: None
    disk = ThreadDisk(disk_of(session), driver)
    asked: list[Heard] = []

    def act(heard: Heard) -> None:
        asked.append(heard)
        if len(asked) == 2:  # the answer for the other thread comes first
            for each in reversed(asked):
                peer.respond(each)

    def follow() -> None:
        while not (asked and driver._led):
            os.sched_yield()
        disk.read_into(memoryview(bytearray(4096)), 4096)
        ended.append(True)

    ended: list[bool] = []
    serving = answering(peer, act)
    follower = threading.Thread(target=follow, daemon=True)
    follower.start()
    own = driver.new_waiter()

    def trace(frame: FrameType, _event: str, _argument: object) -> None:
        waiter = frame.f_locals.get("self")
        if frame.f_code.co_name == at and isinstance(waiter, ThreadWaiter) and waiter is not own:
            sys.settrace(None)
            raise KeyboardInterrupt

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with pytest.raises(KeyboardInterrupt):
            disk.read_into(memoryview(bytearray(4096)), 0)
    finally:
        sys.settrace(before)
    follower.join(20)
    assert ended == [True] and session.queue.busy == 0
    session.fail(ConnectionLost("end of test"))
    peer.close()
    serving.join(60)


@pytest.mark.plain("calls inside of the compiled form cannot be interrupted")
def test_an_interrupt_while_the_session_ends_leaves_no_thread_waiting() -> None:
    """The leader finds that the connection is lost for good, and is interrupted where a function
    begins: other threads, which wait for a command, and for a slot, end nevertheless; and so does
    its own request, where there are none."""
    for others in (3, 0):
        for moment in count(1):
            if not _ended_at(moment, others):
                break
        assert moment > 5


def _ended_at(moment: int, followers: int) -> bool:
    """End a session that the main thread and ``followers`` others wait for, interrupted at the
    function call of this number. False: there are not so many."""
    session, peer = linked(depth=3)
    driver = BlockingDriver(session)
    disk = ThreadDisk(disk_of(session), driver)
    begun: list[int] = []
    ended: list[Exception] = []

    def follow(number: int) -> None:
        while not driver._led:
            os.sched_yield()
        begun.append(number)
        try:
            disk.read_into(memoryview(bytearray(4096)), number * 4096)
        except ConnectionLost as error:
            ended.append(error)

    def lose() -> None:
        while len(begun) < followers or session.queue.in_flight < min(followers + 1, 3):
            os.sched_yield()
        sleep(0.002)  # the third may wait for a slot by now
        peer.close()

    others = [threading.Thread(target=lose)]
    for number in range(followers):
        others.append(threading.Thread(target=follow, args=(number,), daemon=True))

    def read() -> None:
        for thread in others:
            thread.start()
        with suppress(ConnectionLost):
            disk.read_into(memoryview(bytearray(4096)), 0)

    interrupted = _interrupt_at(moment, read, Session.fail)
    for thread in others:
        thread.join(20)
        assert not thread.is_alive(), f"interrupted at call {moment}"
    assert len(ended) == followers and session.error is not None
    assert session.queue.busy == session.queue.in_flight == 0
    return interrupted


def test_an_interrupted_heir_wakes_the_next() -> None:
    """It was woken to lead, and has nothing in flight any more."""
    session, _ = fake.session()
    driver = BlockingDriver(session)
    second = _Woken()
    second.pending = 1
    driver._followers[second] = None
    driver._heir = driver.new_waiter()
    assert driver.abandon() == []
    assert second.woken.is_set()


class _Interrupted:
    """An operation behind whose first step an interrupt comes, before the driver has the step."""

    def __init__(self, operation: Operation[None]) -> None:
        self._operation = operation
        self.close = operation.close

    def __next__(self) -> None:
        next(self._operation)
        raise KeyboardInterrupt


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "behind"])
def test_an_interrupted_operation_gives_its_slot_back_once(inside: bool) -> None:
    """By itself if it is suspended, otherwise the driver does."""
    session, peer = linked()
    driver = BlockingDriver(session)
    core = disk_of(session)
    buffer = memoryview(bytearray(4096))

    def read() -> Operation[None]:
        slot = session.queue.take_now()
        assert slot is not None
        fill_read(slot, core.lun, buffer)
        core.pack_read(slot.cdb, 0, 8, 0)
        slot.waiter = session.new_waiter()
        slot.waiter.pending = 1
        session.queue.submit(slot)
        try:
            if inside:
                raise KeyboardInterrupt
            yield slot.waiter
        finally:
            release_ended(session, [slot])

    def act(heard: Heard) -> None:
        if heard.opcode == bhs.TASK_MANAGEMENT_REQUEST:
            peer.complete(heard)
        elif heard.opcode == bhs.LOGOUT_REQUEST:
            peer.goodbye(heard)

    thread = answering(peer, act)
    dropped: list[TaskSlot] = []

    def drop(slot: TaskSlot) -> None:
        dropped.append(slot)
        core.dropped(slot)

    operation: Any = read() if inside else _Interrupted(read())
    with pytest.raises(KeyboardInterrupt):
        driver.run(operation, drop)
    assert len(dropped) == inside
    until_blocking(lambda: session.queue.in_flight == session.queue.busy == 0)  # no look either
    assert session.error is None
    driver.log_out()
    thread.join(60)
    peer.close()
    assert not thread.is_alive()


def test_connection_lost_during_the_logout() -> None:
    """The connection ends instead of a Logout Response: the logout succeeds all the same."""
    session, peer = linked()
    driver = BlockingDriver(session)
    thread = answering(peer, lambda _heard: peer.pair.disconnect())
    driver.log_out()
    assert isinstance(session.error, ConnectionLost)
    thread.join(60)
    peer.close()
    assert not thread.is_alive()


@pytest.mark.plain("replaces a method")
def test_interrupt_while_answers_are_taken_in() -> None:
    """Answers may be lost then: the connection ends, and every command with it."""
    session, peer = linked()
    driver = BlockingDriver(session)
    disk = ThreadDisk(disk_of(session), driver)
    take = session.queue.connection.datamover.user.control_notify

    def control_notify(message: memoryview, at: int, invalidated: int) -> None:
        session.queue.connection.datamover.user.control_notify = take  # type: ignore[method-assign]
        raise KeyboardInterrupt

    session.queue.connection.datamover.user.control_notify = control_notify  # type: ignore[method-assign]
    thread = answering(peer, peer.respond)
    with pytest.raises(KeyboardInterrupt):
        disk.read_into(memoryview(bytearray(4096)), 0)
    assert isinstance(session.error, ConnectionLost) and session.queue.busy == 0
    driver.log_out()
    thread.join(60)
    peer.close()
    assert not thread.is_alive()


class _Woken(ThreadWaiter):
    """A follower without a thread: a wake sets ``woken``."""

    def __init__(self) -> None:
        super().__init__(lambda: None)
        self.woken = threading.Event()

    def wake(self) -> None:
        self.woken.set()


def test_follower_that_is_done_before_it_can_lead_wakes_the_next() -> None:
    driver, _, _ = _driver()
    first, second = ThreadWaiter(lambda: None), _Woken()
    first.pending = second.pending = 1
    driver._led = True

    def follow() -> None:
        driver.wait(first)

    thread = threading.Thread(target=follow)
    thread.start()
    while first not in driver._followers:
        os.sched_yield()
    driver._followers[second] = None
    del driver._followers[first]  # the leader has gone and woken ``first``, which is done just now
    driver._heir = first
    driver._led = False
    first.task_done()
    assert second.woken.wait(20)
    thread.join(20)


@pytest.mark.parametrize("when", ["before the lock", "as it is chosen"])
def test_an_heir_that_is_done_at_any_moment_wakes_the_next(when: str) -> None:
    """Another thread ends the heir's wait (it unlocks a range, say) just before the heir would
    lead, or while the old leader looks at it. ``second`` waits for an answer: it must be woken, or
    no thread polls for that answer."""
    driver, _, _ = _driver()
    mutex = driver._mutex

    class Heir(ThreadWaiter):
        """The chosen follower: its wait ends right after the old leader read ``pending``."""

        __slots__ = ("count", "looked_at")

        @property
        def pending(self) -> int:
            count = self.count  # type: ignore[has-type]
            if self.looked_at and threading.current_thread() is not thread:  # type: ignore[has-type]
                self.looked_at = False
                self.count = 0
                self._wake()
                # The heir's thread runs before this one goes on.
                seen.wait(20)  # type: ignore[has-type]
            elif not self.count:
                seen.set()  # type: ignore[has-type]
            return count  # type: ignore[no-any-return]

        @pending.setter
        def pending(self, value: int) -> None:
            self.count = value

    class Mutex:
        """A lock: ``first``'s wait ends just before its thread takes the lock the second time."""

        entered = 0

        def __enter__(self) -> None:
            if threading.current_thread() is thread:  # type: ignore[has-type]
                self.entered += 1
                if self.entered == 2 and when == "before the lock":
                    first.pending = 0
            mutex.acquire()

        def __exit__(self, *_: object) -> None:
            mutex.release()

    first = Heir(lambda: None)
    first.looked_at = False
    first.pending = 1
    second = _Woken()
    second.pending = 1
    done, seen = threading.Event(), threading.Event()
    driver._mutex = Mutex()  # type: ignore[assignment]
    driver._led = True

    def follow() -> None:
        driver.wait(first)
        done.set()

    thread = threading.Thread(target=follow)
    thread.start()
    while first not in driver._followers:
        os.sched_yield()
    driver._followers[second] = None
    first.looked_at = when == "as it is chosen"
    driver._led = False
    driver._wake_next()
    assert second.woken.wait(20)
    assert done.wait(20)
    thread.join(20)


def test_wait_for_a_lock_after_the_connection_has_ended_is_idle() -> None:
    """A closed descriptor does not make every poll return at once."""
    session, datamover = fake.session()
    readable, other = os.pipe()
    datamover.fileno = lambda: readable  # type: ignore[method-assign]
    poll = REAL_POLL()
    _polling(session, poll)
    session.fail(ConnectionLost("gone"))
    os.close(other)
    assert poll.poll(0) == []
    os.close(readable)


def test_interrupt_while_there_is_no_connection() -> None:
    """No command is at the target: the buffer is given back at once, and the session stays
    suspended."""
    session, peer = linked()
    lost = threading.Event()
    driver = BlockingDriver(session)
    driver.reconnect = lost.set
    disk = ThreadDisk(disk_of(session), driver)
    buffer = bytearray(1 << 19)

    def interrupt() -> None:
        assert lost.wait(20)
        while session.queue.in_flight < 2:
            os.sched_yield()
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    peer.close()
    with pytest.raises(KeyboardInterrupt):
        disk.read_into(memoryview(buffer), 0)
    thread.join(60)
    assert session.error is None and session.suspended is not None
    until_blocking(lambda: session.queue.in_flight == session.queue.busy == 0)
    buffer.clear()
    driver.reconnect = None
    driver.log_out()
    assert session.error is not None


def test_all_threads_go_on_with_another_connection() -> None:
    """Eight writers wait when the connection is lost: a leader in poll(2) and its followers."""
    session, peer = linked(depth=8)
    lost = threading.Event()
    driver = BlockingDriver(session)
    driver.reconnect = lost.set
    disk = ThreadDisk(disk_of(session), driver)
    errors: list[BaseException] = []

    def client(number: int) -> None:
        try:
            disk.write(memoryview(bytes([number]) * 4096), number * 4096)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    while session.queue.in_flight < 8:
        os.sched_yield()
    peer.close()
    assert lost.wait(20)
    fresh, other = linked(depth=8)
    descriptor = fresh.fileno()
    session.offer(fresh)
    driver.kick()
    listener = answering(other, other.respond)
    for thread in threads:
        thread.join(60)
    assert not errors and not any(thread.is_alive() for thread in threads)
    assert session.replayed == 8 and session.reconnects == 1 and session.fileno() == descriptor
    assert sorted(heard.operation for heard in other.heard) == [0x8A] * 8
    driver.reconnect = None
    session.fail(ConnectionLost("end of test"))
    listener.join(60)
    other.close()


class _Timeouts:
    """A poll object that records: ``asked`` is the timeout of each call, in milliseconds."""

    def __init__(self) -> None:
        self._poll = REAL_POLL()
        self.register, self.unregister = self._poll.register, self._poll.unregister
        self.modify = self._poll.modify
        self.asked: list[float] = []

    def poll(self, timeout: float) -> list[tuple[int, int]]:
        self.asked.append(timeout)
        return self._poll.poll(timeout)


@pytest.mark.parametrize("busy_poll_us", [0, 60_000_000])
def test_one_read_after_the_other_keeps_the_leader_awake(
    busy_poll_us: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1})
    monkeypatch.setattr(busy_polling, "CROWDED_S", 3600.0)  # however busy this machine is
    session, peer = linked()
    session.busy_poll_us = busy_poll_us
    poll = _Timeouts()
    driver = _polling(session, poll)
    disk = ThreadDisk(disk_of(session), driver)

    thread = answering_slowly(peer)
    for _ in range(HITS + 1):
        disk.read_into(memoryview(bytearray(512)), 0)
    poll.asked.clear()
    for _ in range(5):
        disk.read_into(memoryview(bytearray(512)), 0)
    assert set(poll.asked) == ({0} if busy_poll_us else {1000})
    driver.log_out()
    thread.join(60)
    peer.close()


def test_what_is_left_for_another_turn_lets_no_leader_sleep() -> None:
    """A datamover has more that no descriptor shows."""
    driver, poll, other = _driver()
    assert not poll.poll(0)
    driver.session.queue.driver.again()
    assert poll.poll(0)
    driver.session.fail(ConnectionLost("end of test"))
    os.close(other)
