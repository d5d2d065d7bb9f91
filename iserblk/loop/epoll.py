"""A loop of our own: one epoll instance, with nothing else between the kernel and what it calls.

``run`` is its body, ``guest.run`` has trio as its guest. Everything but ``wake`` belongs to one
thread.
"""

from __future__ import annotations

import os
import select
from collections import deque
from math import inf
from threading import RLock
from typing import Any, Final

from iserblk.loop.busy_polling import Turns
from iserblk.loop.clock import monotonic
from iserblk.loop.renewing import renewed
from iserblk.loop.timers import Timer, Timers
from iserblk.loop.work import Ended, Function, Limit, nothing
from iserblk.loop.workers import IDLE_S, Workers

_MOST_DESCRIPTORS: Final = 64  # descriptors that one turn looks at
_MOST_FOREIGN: Final = 1024  # calls of ``wake`` that one turn serves
_IN: Final = select.EPOLLIN
_OUT: Final = select.EPOLLOUT
_NEITHER: Final = select.EPOLLET  # the end and errors, which always count, are told once
_FOR_EVER: Final = 3600.0


class EpollWatch:
    """See ``seam.Watch``. ``made``: the number of the turn. ``mask``: what the kernel reports."""

    __slots__ = ("_loop", "fd", "made", "mask", "ready")

    def __init__(self, loop: EpollLoop, fd: int, ready: Function, made: int) -> None:
        self._loop = loop
        self.mask = _IN
        self.made = made
        self.fd = fd
        self.ready = ready

    def want(self, readable: bool, writable: bool) -> None:
        mask = (_IN if readable else 0) | (_OUT if writable else 0) or _NEITHER
        if mask != self.mask and self.fd >= 0:
            self.mask = mask
            self._loop.change(self)

    def expect(self, until: float) -> None:
        self._loop.stay_awake(until)

    def close(self) -> None:
        if self.fd >= 0:
            self._loop.forget(self.drop())

    def drop(self) -> int:
        """Closed, as far as this object goes; returns the number of the descriptor."""
        fd, self.fd = self.fd, -1
        self.ready = nothing  # it refers to the owner of this watch: no circle is left
        return fd


class EpollLoop:
    """Implements Loop.

    A turn: what is ready, then timers, then what threads have sent, then what was to be called
    soon. Each takes only what was there at its beginning, or a bounded number: so none keeps the
    others waiting."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._watches: dict[int, EpollWatch] = {}
        self._soon: deque[Function] = deque()
        self._foreign: deque[Function] = deque()
        self._timers = Timers()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._bell, _IN)
        # While a thread rings, nobody closes the bell: its number may be that of a file then. A
        # handler of a signal may ring in the middle of either.
        self._ringing = RLock()
        self._asleep = False
        self._awake = 0.0
        self._turns = Turns()
        self._number = 0  # of the turn
        self._forgot = 0  # the number of the turn in which a watch was closed last
        self._workers = Workers(self.wake)
        self._retiring: Timer | None = None
        self.stopped = False

    # -- Loop -------------------------------------------------------------------------------------

    def now(self) -> float:
        return monotonic()

    def call_soon(self, function: Function) -> None:
        self._soon.append(function)

    def call_at(self, when: float, function: Function) -> Timer:
        return self._timers.add(when, function)

    def watch(self, fd: int, ready: Function) -> EpollWatch:
        self._epoll.register(fd, _IN)
        before = self._watches.get(fd)
        made = self._watches[fd] = EpollWatch(self, fd, ready, self._number)
        if before is not None:  # its descriptor was closed, or ``register`` would have failed
            before.drop()
            self._renew()
        return made

    def wake(self, function: Function) -> None:
        self._foreign.append(function)
        if self._asleep:  # set before the last look at ``_foreign``
            self._ring()

    def offload(self, work: Function, ended: Ended, limit: Limit) -> None:
        self._workers.begin(work, ended, limit)
        if self._retiring is None:
            self._retiring = self._timers.add(monotonic() + IDLE_S, self._retire)

    # -- of its watches ---------------------------------------------------------------------------

    def change(self, watch: EpollWatch) -> None:
        try:
            self._epoll.modify(watch.fd, watch.mask)
        except OSError:  # its descriptor was closed
            watch.close()

    def forget(self, fd: int) -> None:
        del self._watches[fd]
        self._forgot = self._number
        try:
            self._epoll.unregister(fd)
        except OSError:  # it was closed, and a copy may be left
            self._renew()

    def stay_awake(self, until: float) -> None:
        self._awake = max(self._awake, until)

    # -- turns ------------------------------------------------------------------------------------

    def run(self) -> None:
        """Turns, until ``stopped`` is set. Raises what a function raises; what that turn has not
        called yet is called in the next one, if ``run`` is called again."""
        while not self.stopped:
            self._turn()

    def _turn(self) -> None:
        """One turn, which waits until there is something to do."""
        self._number = number = self._number + 1
        foreign, soon = self._foreign, self._soon
        waits = not (soon or foreign)
        watches = self._watches
        for fd, _ in self._wait() if waits else self._epoll.poll(0, _MOST_DESCRIPTORS):
            watch = watches.get(fd)
            if watch is not None:
                # One that was made in this turn has the number of a descriptor that was closed.
                if watch.made != number:
                    try:
                        watch.ready()
                    except BaseException:
                        watch.close()  # else no turn would come to an end any more
                        raise
            elif fd == self._bell:
                os.eventfd_read(self._bell)
            elif self._forgot != number:  # else its watch may have been closed in this turn
                self._renew()
        timers = self._timers
        if timers.first < inf and timers.first <= (now := monotonic()):
            timers.run(now)
        for _ in range(min(len(foreign), _MOST_FOREIGN)):
            foreign.popleft()()
        for _ in range(len(soon)):
            soon.popleft()()

    def close(self) -> None:
        """Let go of the descriptors. Functions that wait are not called. ``wake`` does nothing from
        now on."""
        for watch in list(self._watches.values()):
            watch.close()
        self._workers.close()
        self._epoll.close()
        with self._ringing:
            bell, self._bell = self._bell, -1
            os.close(bell)

    def _wait(self) -> list[tuple[Any, Any]]:  # (as int, each number would be taken apart)
        """What is ready. Waits for that, and no longer than until the first timer is due."""
        epoll, end = self._epoll, self._timers.first
        seconds = _FOR_EVER
        if end < inf or self._awake:
            now = monotonic()
            turns = self._turns
            while now < self._awake and now < end and not turns.crowded(now):
                found = epoll.poll(0, _MOST_DESCRIPTORS)
                if found or self._foreign:
                    return found
                now = turns.give_way()
            seconds = min(max(end - now, 0.0), _FOR_EVER)
            self._awake = 0.0
        self._asleep = True
        try:
            return epoll.poll(0.0 if self._foreign else seconds, _MOST_DESCRIPTORS)
        finally:
            self._asleep = False

    def _ring(self) -> None:
        with self._ringing:
            if self._bell >= 0:
                os.eventfd_write(self._bell, 1)

    def _renew(self) -> None:
        """A descriptor was closed behind the loop, and the kernel may go on to report it."""
        masks = {fd: watch.mask for fd, watch in self._watches.items()}
        masks[self._bell] = _IN
        try:
            new, gone = renewed(self._epoll, masks)
        except OSError:
            return  # no room: the turn that hears of that descriptor tries again
        self._epoll.close()
        self._epoll = new
        for fd in gone:
            self._watches.pop(fd).drop()

    def _retire(self) -> None:
        self._workers.retire()
        self._retiring = None
        if self._workers.idle or self._workers.busy:
            self._retiring = self._timers.add(monotonic() + IDLE_S, self._retire)
