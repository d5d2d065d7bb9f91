"""The blocking driver: threads that wait for a session, leader and followers.

The thread that waits when nobody else does becomes the leader: it polls the descriptor and runs
``Session.progress`` for all, so that at depth 1 there is no hop between threads. The one that is
done goes on at once; a leader that is done hands on to a follower that is not.
"""

from __future__ import annotations

import inspect
import os
import select
import threading
from collections.abc import Callable
from contextlib import suppress
from time import monotonic, sleep
from typing import TypeVar

from iserblk.errors import ConnectionLost
from iserblk.initiator.session.deadlines import Ladder
from iserblk.initiator.session.driving import LOGOUT_S, TICK_S
from iserblk.initiator.session.logout import PARTING_S, fill_logout
from iserblk.initiator.session.session import Session
from iserblk.initiator.session.slots import QUEUED, Operation, TaskSlot
from iserblk.waiting.busy_polling import FEW, BusyPoll, Pace

T = TypeVar("T")
ABANDON_S = 0.005  # how often an interrupted thread looks whether its commands are aborted


class ThreadWaiter:
    """Implements Waiter for the one thread that made it. ``polling``: that thread is the leader,
    and asleep in poll or about to be; only ``ring`` reaches it there."""

    __slots__ = ("_ring", "_wake", "pending", "polling", "sleep")

    def __init__(self, ring: Callable[[], None]) -> None:
        self.pending = 0
        self.polling = False
        self._ring = ring
        lock = threading.Lock()
        lock.acquire()
        self.sleep = lock.acquire
        self._wake = lock.release

    def task_done(self) -> None:
        self.pending -= 1
        if not self.pending:
            self.wake()

    def wake(self) -> None:
        """Wake its thread; a wake that nobody waits for is kept, two are one."""
        if self.polling:  # done by another thread: it gave back a slot, or unlocked a range
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
        self._heir: ThreadWaiter | None = None  # the last that was woken to lead
        self._rung = False
        self._local = threading.local()
        self._next_tick = 0.0
        self._awake = BusyPoll(session.busy_poll_us)
        self._pace = Pace(self._awake)
        self._answered = 0
        self._poll = select.poll()
        self._fd = session.fileno()
        self._events = select.POLLIN
        self._poll.register(self._fd, self._events)
        # Rung when the leader is to look up from its poll: a sender finds the socket full while it
        # polls for input only, or what it waits for is done by another thread.
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll.register(self._bell, select.POLLIN)
        self.reconnect: Callable[[], None] | None = None
        self.flush_soon = session.queue.flush
        self.blocked = self._ring
        session.drive(self)

    def closing(self, _fd: int) -> None:
        """See SessionDriver: until there is another descriptor, the bell alone is polled."""
        if self._fd >= 0:
            self._poll.unregister(self._fd)
            self._fd = -1

    def changed(self) -> None:
        """See SessionDriver; the thread that runs ``progress`` calls it."""
        fd = self.session.fileno()
        if fd >= 0 and self.session.error is None:
            self._fd = fd
            self._events = select.POLLIN
            self._poll.register(fd, self._events)

    @property
    def ladder(self) -> Ladder:
        return self._ladder

    def new_waiter(self) -> ThreadWaiter:
        """This thread's waiter; a thread waits for one thing at a time, so it has just one."""
        try:
            waiter: ThreadWaiter = self._local.waiter
        except AttributeError:
            waiter = self._local.waiter = ThreadWaiter(self._ring)
        return waiter

    def run(self, operation: Operation[T], dropped: Callable[[TaskSlot], None]) -> T:
        """Run an operation to its end. ``dropped`` is called for slots that it leaves behind when
        it is interrupted."""
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
            if self.new_waiter().pending:
                # One that is suspended gives back its slots when it is closed.
                suspended = inspect.getgeneratorstate(operation) == inspect.GEN_SUSPENDED
                for slot in self.abandon():
                    if not suspended:
                        dropped(slot)
            raise
        finally:
            operation.close()

    def abandon(self) -> list[TaskSlot]:
        """After an exception, most likely KeyboardInterrupt: take back what this thread has in
        flight. On return nothing of it is, and its buffers are free; the slots are the caller's.

        Takes as long as the target needs to abort the commands; a second interrupt cuts the
        connection instead.
        """
        session = self.session
        waiter = self.new_waiter()
        del self._local.waiter  # what may still count on it shall not disturb the next wait
        session.queue.forget(waiter)
        with self._mutex:
            self._followers.pop(waiter, None)
        mine = [
            slot for slot in session.queue.tasks if slot.waiter is waiter and slot.state >= QUEUED
        ]
        while True:
            try:
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
        """Return when ``waiter.pending`` is 0. The GIL is free while nothing happens."""
        if not waiter.pending:
            return
        while True:
            with self._mutex:
                if not waiter.pending:
                    break
                if self._led:
                    self._followers[waiter] = None
                    leader = False
                else:
                    self._led = leader = True
                    self._followers.pop(waiter, None)
            if not leader:
                waiter.sleep()
                if not waiter.pending:
                    break
                continue
            try:
                self._lead(waiter)
            except BaseException:
                if not waiter.polling:
                    self.session.disconnect()  # interrupted in ``progress``: answers may be lost
                raise
            finally:
                waiter.polling = False  # poll may have been interrupted
                self._hand_on()
            if not waiter.pending:
                return
        if self._heir is waiter:
            self._wake_next()  # it was woken to lead, but is done

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
            self._answered += session.progress(now)
            if now >= self._next_tick:
                self._next_tick = now + TICK_S
                self._ladder.tick(now)
            if self._rung:
                with suppress(BlockingIOError):  # being rung: read it next time
                    os.eventfd_read(self._bell)
                    self._rung = False
            events = select.POLLIN | select.POLLOUT if session.wants_write() else select.POLLIN
            if events != self._events and self._fd >= 0:
                self._events = events
                self._poll.modify(self._fd, events)

    def _sleep(self) -> None:
        """Until there is something to read, or the bell rings: with open eyes first."""
        poll = self._poll.poll
        until = self._awake.until
        while monotonic() < until:
            if poll(0):
                return
            os.sched_yield()  # what waits for this processor goes first
        poll(1000)

    def _hand_on(self) -> None:
        """Step down as leader; wake a follower that still waits, to lead."""
        self._led = False
        self._wake_next()

    def _wake_next(self) -> None:
        with self._mutex:
            followers = self._followers
            self._heir = None
            while followers and not self._led:
                follower = next(iter(followers))
                del followers[follower]
                # In this order: one that is done just now sees that it is the heir, or is seen.
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
        """Lead for a moment if nobody does: so that pings are answered, deadlines are kept and a
        lost connection is noticed while no thread waits. To be called about once a second."""
        with self._mutex:
            if self._led or self.session.error is not None:
                return
            self._led = True
        try:
            now = monotonic()
            self.session.progress(now)
            self._next_tick = now + TICK_S
            self._ladder.tick(now)
        finally:
            self._hand_on()

    def kick(self) -> None:
        """See ``iserblk.initiator.reconnecting``: a leader that sleeps is woken for it."""
        self._ring()
        self.idle()

    def log_out(self) -> None:
        """Say goodbye if the target still listens, and end the session either way. No operation
        may be running; later ones raise ConnectionLost."""
        session = self.session
        control = session.queue.take_control()
        if control is not None:
            waiter = self.new_waiter()
            waiter.pending = 1
            fill_logout(control)
            cut = threading.Timer(LOGOUT_S, session.disconnect)
            cut.start()
            session.queue.send_immediate(control, waiter)
            self.wait(waiter)
            cut.cancel()
            cut.join()
            if session.error is None:  # or the connection was lost, and its descriptor with it
                self._part()
        session.fail(ConnectionLost(f"{session.portal}: logged out"))
        os.close(self._bell)

    def _part(self) -> None:
        """Let the target close the connection, for a moment."""
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        end = monotonic() + PARTING_S
        while self.session.error is None and (left := end - monotonic()) > 0:
            poll.poll(left * 1000)
            self.idle()
