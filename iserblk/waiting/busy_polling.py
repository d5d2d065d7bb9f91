"""Busy polling: a driver polls for the next command or answer, instead of sleeping until it comes.

With one command in flight, each side sleeps while the other works. The processor then goes idle,
and leaving the idle state takes 25 µs and more in a virtual machine, of a round trip of 80 µs. So
while single messages follow each other closely, the driver stays awake for the next message, up to
a limit. With more commands in flight no side waits for wake-ups, and the processor is needed.
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable
from time import monotonic

import trio

from iserblk.waiting.descriptors import Nap

HITS = 8  # after so many messages that came singly and in time, stay awake
FEW = 2  # commands in flight up to which an initiator stays awake
ENOUGH = 2 * HITS  # hits counted at most; an exception halves the count: the first changes nothing
LOOKS = 16  # at the descriptors, in about 25 µs, between two turns of trio's tasks,
LOOK_S = 50e-6  # or in this time
_AT_ONCE = 16  # descriptors
CROWDED_S = 200e-6  # of waiting for the processor: a peer of the conversation takes less
SOBER_S = 0.1  # asleep between messages after that


class Pace:
    """Measures how closely the messages of one connection follow each other: its driver stays awake
    when single messages do so closely.

    With a single processor it never does, because the sender of the next message needs the
    processor.
    """

    __slots__ = ("_answered", "_hits", "_idle", "_limit", "until")

    def __init__(self, limit_us: int) -> None:
        """``limit_us``: how long to stay awake after a message, in microseconds; 0: never."""
        self._limit = limit_us * 1e-6 if len(os.sched_getaffinity(0)) > 1 else 0.0
        self._hits = 0
        self._idle = 0.0
        self._answered = 0
        self.until = 0.0  # monotonic seconds: stay awake

    def rest(self, answered: int) -> bool:
        """To be called before the driver waits. ``answered``: commands of the connection that were
        answered so far. Returns whether it shall stay awake meanwhile, ``until``."""
        if answered - self._answered > 1:
            self._hits //= 2
        self._answered = answered
        self._idle = monotonic()
        if self._hits < HITS or not self._limit:
            return False
        self.until = self._idle + self._limit
        return True

    def work(self) -> float:
        """To be called when a message has come. Returns the time (monotonic seconds)."""
        now = monotonic()
        if now - self._idle < self._limit:
            self._hits = min(self._hits + 1, ENOUGH)
        else:
            self._hits //= 2
        return now


class Turns:
    """Gives way to other threads while a driver stays awake.

    A thread that has looked on for long gets the processor later than one that has slept. So where
    other work keeps all processors busy, staying awake makes each message slower: then the driver
    is to sleep for a while."""

    __slots__ = ("_sober",)

    def __init__(self) -> None:
        self._sober = 0.0

    def give_way(self) -> float:
        """Threads that wait for this processor go first. Returns the time (monotonic seconds)."""
        before = monotonic()
        os.sched_yield()
        now = monotonic()
        if now - before > CROWDED_S:
            self._sober = now + SOBER_S
        return now

    def crowded(self, now: float) -> bool:
        """Sleep now."""
        return now < self._sober


class Watch:
    """A descriptor that is looked at directly while its trio loop is kept awake.

    For a single message, two passes through trio's loop cost as much as all that is done with it.
    This way trio has its turn while the peer works on what ``ready`` has sent.
    """

    __slots__ = ("_loop", "fd")

    def __init__(self) -> None:
        self._loop: _AwakeLoop | None = None
        self.fd = -1  # which is looked at; -1: none

    def stay_awake(self, fd: int, until: float, ready: Callable[[], None]) -> None:
        """Keep the loop awake until the monotonic time ``until``, and look at ``fd`` meanwhile.

        ``ready`` is called when something has come. It takes that, or leaves it to the task that
        waits for the descriptor in trio. It must not wait, nor raise anything. It is kept only as
        long as ``fd`` is looked at: it refers to the owner of this watch, and thousands of those
        may come and go before Python finds such circles.
        """
        loop = self._loop
        if loop is None:
            loop = self._loop = _awake_loop()
        if self.fd != fd:
            loop.add(self, fd, ready)
        loop.stay_awake(until)

    def close(self) -> None:
        """Look no more. To be called before the descriptor is closed."""
        if self._loop is not None:
            self._loop.remove(self)


class _AwakeLoop:
    """What is looked at in one trio loop."""

    def __init__(self) -> None:
        self._epoll: select.epoll | None = None  # open while something is watched
        self._watched: dict[int, tuple[Watch, Callable[[], None]]] = {}
        self._until = 0.0
        self._nap = Nap()
        self._turns = Turns()

    def add(self, watch: Watch, fd: int, ready: Callable[[], None]) -> None:
        self.remove(watch)
        if self._epoll is None:
            self._epoll = select.epoll()
        self._epoll.register(fd, select.EPOLLIN)
        self._watched[fd] = (watch, ready)
        watch.fd = fd

    def remove(self, watch: Watch) -> None:
        if watch.fd >= 0 and self._epoll is not None:
            self._epoll.unregister(watch.fd)
            del self._watched[watch.fd]
            watch.fd = -1
            if not self._watched:
                self._epoll.close()
                self._epoll = None

    def stay_awake(self, until: float) -> None:
        self._until = max(self._until, until)
        self._nap.wake()

    def _awake(self, now: float) -> bool:
        return now < self._until and not self._turns.crowded(now)

    async def run(self) -> None:
        """The body of a system task."""
        try:
            while True:
                if self._awake(monotonic()):
                    await trio.lowlevel.checkpoint()  # trio does not sleep while a task can run
                    self._look()
                else:
                    self._forget()
                    await self._nap.sleep()
        finally:
            self._forget()

    def _forget(self) -> None:
        """With many messages under way each would have to be reported twice."""
        for watch, _ in list(self._watched.values()):
            self.remove(watch)

    def _look(self) -> None:
        if self._epoll is None:
            return
        poll = self._epoll.poll
        until = monotonic() + LOOK_S
        for _ in range(LOOKS):
            found = poll(0, _AT_ONCE)
            if found:
                for fd, _ in found:
                    if fd in self._watched:  # no other ``ready`` has closed it
                        self._watched[fd][1]()
                return
            now = self._turns.give_way()
            if now >= until or not self._awake(now):
                return


_here: trio.lowlevel.RunVar[_AwakeLoop] = trio.lowlevel.RunVar("awake loop")


def _awake_loop() -> _AwakeLoop:
    """All connections of a trio loop share one: while it looks at some, no other could."""
    try:
        return _here.get()
    except LookupError:
        loop = _AwakeLoop()
        _here.set(loop)
        trio.lowlevel.spawn_system_task(loop.run, name="busy polling")
        return loop
