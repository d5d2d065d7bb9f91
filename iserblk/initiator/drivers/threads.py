"""The blocking driver: threads that wait for a session, as leader and followers.

A thread that waits while there is no leader becomes the leader. It polls the descriptor and runs
``Session.progress`` for all threads, so that at depth 1 there is no hop between threads. A follower
whose commands are done goes on at once. A leader whose commands are done hands the lead to a
follower that still waits.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from iserblk.errors import ConnectionLost, IserblkError
from iserblk.initiator.session.deadlines import Ladder
from iserblk.initiator.session.driving import LOGOUT_S, STALLED_S, TICK_S
from iserblk.initiator.session.logout import PARTING_S, fill_logout
from iserblk.initiator.session.session import Session
from iserblk.initiator.session.slots import QUEUED, TAKEN, Operation, TaskSlot
from iserblk.loop.blocking import Poller, readable, sleep
from iserblk.loop.busy_polling import FEW, Pace, Turns
from iserblk.loop.clock import monotonic

T = TypeVar("T")
ABANDON_S = 0.005  # between two looks of an interrupted thread whether its commands are aborted


class ThreadWaiter:
    """Implements Waiter for the thread that made it. ``polling``: that thread is the leader, and
    asleep in poll or about to be; only ``ring`` reaches it there. ``interrupts``: of its driver,
    when ``pending`` was last set right."""

    __slots__ = ("_ring", "_wake", "interrupts", "pending", "polling", "sleep")

    def __init__(self, ring: Callable[[], None]) -> None:
        self.pending = 0
        self.polling = False
        self.interrupts = 0
        self._ring = ring
        lock = threading.Lock()
        lock.acquire()
        self.sleep = lock.acquire
        self._wake = lock.release

    def task_done(self) -> None:
        if self.pending <= 0:
            return  # ``_recount`` has found that it waits for nothing any more
        self.pending -= 1
        if not self.pending:
            self.wake()

    def wake(self) -> None:
        """Wake its thread. A wake is kept until the thread sleeps next; two wakes count as one."""
        if self.polling:  # another thread gave back a slot, or unlocked a range
            self._ring()
        try:  # noqa: SIM105 (a context manager costs more than the wake)
            self._wake()
        except RuntimeError:
            pass  # not asleep, and woken before: it will look again anyway


class BlockingDriver:
    """Waits for one session on behalf of any number of threads. Implements SessionDriver, and
    Driver of the reconnector."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._ladder = Ladder(session)
        self._mutex = threading.Lock()
        self._followers: dict[ThreadWaiter, None] = {}
        self._led = False
        self._heir: ThreadWaiter | None = None  # the follower that was last woken to lead
        self._rung = False
        # How often ``progress`` was interrupted: perhaps where it was about to tell another thread
        # that a command has ended.
        self._interrupts = 0
        self._local = threading.local()
        self._next_tick = 0.0
        self._pace = Pace(session.busy_poll_us)
        self._turns = Turns()
        self._answered = 0
        self._poller = Poller()
        self._fd = session.fileno()
        self._full = False  # the socket takes no more: output waits
        self._poller.add(self._fd)
        # Ends the leader's poll. Rung when a sender finds the socket full while the leader polls
        # for input only, or when another thread has done what the leader waits for.
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller.add(self._bell)
        self.reconnect: Callable[[], None] | None = None
        self.flush_soon = session.queue.flush
        self.blocked = self.again = self._ring
        session.drive(self)

    def closing(self, _fd: int) -> None:
        """See SessionDriver: until there is another descriptor, only the bell is polled."""
        if self._fd >= 0:
            with suppress(KeyError):  # interrupted before the next line
                self._poller.remove(self._fd)
            self._fd = -1

    def changed(self) -> None:
        """See SessionDriver; the thread that runs ``progress`` calls it."""
        fd = self.session.fileno()
        if fd >= 0 and self.session.error is None:
            self._fd = fd
            self._full = False
            self._poller.add(fd)

    @property
    def ladder(self) -> Ladder:
        return self._ladder

    def new_waiter(self) -> ThreadWaiter:
        """The calling thread's waiter. A thread waits for one thing at a time, so it has just one
        waiter."""
        try:
            waiter: ThreadWaiter = self._local.waiter
        except AttributeError:
            waiter = self._local.waiter = ThreadWaiter(self._ring)
        return waiter

    def run(self, operation: Operation[T], dropped: Callable[[TaskSlot], None]) -> T:
        """Run ``operation`` to its end; returns its result. ``dropped`` is called for slots that it
        leaves behind when it is interrupted."""
        try:
            while True:
                step = next(operation)
                if isinstance(step, float):
                    sleep(step)
                else:
                    assert isinstance(step, ThreadWaiter)  # ``new_waiter`` made it
                    self.wait(step)
        except StopIteration as stop:
            result: T = stop.value
            return result
        except BaseException:
            waiter = self.new_waiter()
            left = self.abandon()
            # An operation that was interrupted while it waited gives back its slots now. One that
            # was interrupted itself has ended, and may have left some.
            operation.close()
            for slot in left:
                if slot.waiter is waiter:
                    dropped(slot)
            raise
        finally:
            operation.close()

    def abandon(self) -> list[TaskSlot]:
        """After an exception: take back what this thread has taken, if anything: that is so where
        it was an interrupt (KeyboardInterrupt), at whatever moment. On return none of it is in
        flight, its buffers are free, and its slots belong to the caller.

        Takes as long as the target needs to abort the commands; a second interrupt cuts the
        connection instead.
        """
        session = self.session
        waiter = self.new_waiter()
        if self._heir is waiter:
            self._wake_next()  # this thread was woken to lead, and does not
        mine = [slot for slot in session.queue.tasks if slot.waiter is waiter]
        if not mine and not waiter.pending:
            return mine
        del self._local.waiter  # late calls of its ``task_done`` must not disturb the next wait
        session.queue.forget(waiter)
        with self._mutex:
            self._followers.pop(waiter, None)
        for slot in mine:
            if slot.state == TAKEN and (waiter.pending or not slot.deadline):
                # Perhaps it was not sent. What is in the slot is the result of the one before.
                slot.error = IserblkError("interrupted")
        while True:
            try:
                while any(slot.state >= QUEUED for slot in mine):
                    for slot in mine:
                        slot.deadline = 0.0  # the next tick aborts it
                    self._next_tick = 0.0
                    self.idle()
                    while any(slot.state >= QUEUED for slot in mine):
                        sleep(ABANDON_S)
                        self.idle()
                return mine
            except BaseException:
                session.disconnect()

    def wait(self, waiter: ThreadWaiter) -> None:
        """Wait until ``waiter.pending`` is 0. The GIL is free while nothing happens."""
        leader = False
        while waiter.pending:
            try:
                with self._mutex:
                    if not waiter.pending:
                        break
                    if self._led:
                        self._followers[waiter] = None
                    else:
                        self._followers.pop(waiter, None)
                        self._led = leader = True
                if leader:
                    if waiter.interrupts != self._interrupts:
                        self._recount(waiter)
                    self._lead(waiter)
                else:
                    waiter.sleep()
            except BaseException:
                if leader and not waiter.polling:
                    self.session.disconnect()  # interrupted in ``progress``: answers may be lost
                    self._interrupted()
                raise
            finally:
                if leader:
                    waiter.polling = False  # poll may have been interrupted
                    # Not in a method: an interrupt may come before each call, and then no thread
                    # would ever lead again.
                    self._led = leader = False
                    self._wake_next()
        if self._heir is waiter:
            self._wake_next()  # this thread was woken to lead, but is done

    def _interrupted(self) -> None:
        """As the leader, after an interrupt in ``progress``: have all threads look, and each set
        its ``pending`` right when it leads."""
        self._interrupts += 1
        with self._mutex:
            followers = list(self._followers)
        for each in followers:
            each.wake()

    def _recount(self, waiter: ThreadWaiter) -> None:
        """As the leader, for its own ``waiter``: what was not told to it does not count any more.
        (Its thread waits: it has submitted all its slots, and waits for them alone, if it has
        any.)"""
        session = self.session
        queue = session.queue
        while True:
            if session.error is not None and not session.finish():
                sleep(ABANDON_S)  # another thread is ending the tasks
                continue
            with queue.lock:  # the session does not end meanwhile; only the leader ends other tasks
                mine = [slot for slot in queue.tasks if slot.waiter is waiter]
                left = sum(slot.state >= QUEUED for slot in mine)
                if left and session.error is not None:
                    continue
                waiter.interrupts = self._interrupts
                if mine:
                    waiter.pending = left
                elif session.error is not None:
                    waiter.pending = 0  # what it waits for, a slot or a lock, is of no use any more
                return

    def _lead(self, waiter: ThreadWaiter) -> None:
        """Poll and progress until ``waiter`` is done, or the session has failed."""
        session = self.session
        while waiter.pending:
            if session.queue.busy <= FEW:
                self._pace.rest(self._answered)
            waiter.polling = True
            if waiter.pending:  # looked at after the flag was set: a wake before it shows here
                self._sleep()
            waiter.polling = False
            now = self._pace.work()
            due = now >= self._next_tick
            if due:
                self._look_back(now)
            self._answered += session.progress(now)
            if due:
                self._next_tick = now + TICK_S
                self._ladder.tick(now)
            if self._rung:
                with suppress(BlockingIOError):  # being rung: read it next time
                    os.eventfd_read(self._bell)
                    self._rung = False
            full = session.wants_write()
            if full is not self._full and self._fd >= 0:
                self._full = full
                self._poller.watch_output(self._fd, full)

    def _sleep(self) -> None:
        """Return when there is something to read, the bell rings, or a second has passed.
        Busy-polls first."""
        wait = self._poller.wait
        until = self._pace.until
        now = monotonic()
        while now < until and not self._turns.crowded(now):
            if wait(0.0):
                return
            now = self._turns.give_way()
        wait(1.0)

    def _wake_next(self) -> None:
        """Wake a follower that still waits, to lead, where no thread leads any more."""
        with self._mutex:
            followers = self._followers
            self._heir = None
            while followers and not self._led:
                follower = next(iter(followers))
                del followers[follower]
                # In this order: a follower that is done just now sees that it is the heir, or its
                # ``pending`` shows it here.
                self._heir = follower
                if follower.pending:
                    follower.wake()
                    return

    def _ring(self) -> None:
        with self._mutex:
            if not self._rung:
                self._rung = True
                os.eventfd_write(self._bell, 1)

    def idle(self) -> None:
        """Lead for a moment if no thread leads, so that pings are answered, deadlines are kept and
        a lost connection is noticed while no thread waits. Call it about once a second."""
        leader = False
        if self.session.error is not None:
            self.session.finish()  # its end may have been interrupted
            return
        try:
            with self._mutex:
                if self._led:
                    return
                self._led = leader = True
            now = monotonic()
            self._look_back(now)
            self.session.progress(now)
            self._next_tick = now + TICK_S
            self._ladder.tick(now)
        except BaseException:
            if leader:
                self._interrupted()
            raise
        finally:
            if leader:
                self._led = False  # as in ``wait``
                self._wake_next()

    def _look_back(self, now: float) -> None:
        """Before answers are taken in: whether this process has run lately."""
        late = now - self._next_tick
        if late > STALLED_S and self._next_tick:  # 0: a tick is wanted now
            self._ladder.stalled(late, now)

    def kick(self) -> None:
        """See ``iserblk.initiator.reconnecting``: it also wakes a leader that sleeps."""
        self._ring()
        self.idle()

    def log_out(self) -> None:
        """Log out if the target still answers, and end the session in any case. No operation may be
        running; later ones raise ConnectionLost."""
        session = self.session
        control = session.queue.take_control()
        if control is not None:
            waiter = self.new_waiter()
            waiter.pending = 1
            fill_logout(control)
            session.logging_out = True
            cut = threading.Timer(LOGOUT_S, session.disconnect)
            cut.start()
            session.queue.send_immediate(control, waiter)
            self.wait(waiter)
            cut.cancel()
            cut.join()
            if session.error is None:  # else the connection was lost, and its descriptor with it
                self._part()
        session.fail(ConnectionLost(f"{session.portal}: logged out"))
        os.close(self._bell)

    def _part(self) -> None:
        """Wait a moment for the target to close the connection."""
        end = monotonic() + PARTING_S
        while self.session.error is None and monotonic() < end:
            readable(self._fd, end)
            self.idle()
