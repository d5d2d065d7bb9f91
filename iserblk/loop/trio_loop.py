"""A loop inside a trio loop of the user's: one task waits for one descriptor.

A task that waits by itself costs, for each message, two passes through trio's loop, and a system
call that has the kernel watch its descriptor once more. Here descriptors stay registered with an
epoll instance: what has come on any of them is handled by plain calls, all in one turn.
"""

from __future__ import annotations

import select
from collections import deque
from contextlib import suppress
from typing import Final

import trio

from iserblk.loop.blocking import Poller
from iserblk.loop.busy_polling import Turns
from iserblk.loop.clock import monotonic
from iserblk.loop.nap import Nap
from iserblk.loop.renewing import renewed
from iserblk.loop.tasks import task_time, until_readable
from iserblk.loop.timers import Timer, Timers
from iserblk.loop.work import Ended, Function, Limit, nothing
from iserblk.loop.workers import IDLE_S, Workers

_MOST_DESCRIPTORS: Final = 64  # descriptors, after which trio has a turn
_IN: Final = select.EPOLLIN
_OUT: Final = select.EPOLLOUT
_NEITHER: Final = select.EPOLLET  # the end and errors, which always count, are told once


class TrioWatch:
    """See ``seam.Watch``. ``made``: the number of the turn. ``mask``: what the kernel reports."""

    __slots__ = ("_loop", "fd", "made", "mask", "ready")

    def __init__(self, loop: TrioLoop, fd: int, ready: Function, made: int) -> None:
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


class TrioLoop:
    """Implements Loop. As long as nothing is watched, it has no descriptor of its own; and no task,
    if no timer waits either."""

    def __init__(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._epoll: select.epoll | None = None
        self._watches: dict[int, TrioWatch] = {}
        self._soon: deque[Function] = deque()
        self._in_turn = False  # whose end looks at ``_soon``
        self._caller: Nap | None = None  # of the task that looks at it else
        self._number = 0  # of the turn
        self._forgot = 0  # the number of the turn in which a watch was closed last
        self._awake = 0.0
        self._turns = Turns()
        self._timers = Timers()
        self._timing: trio.CancelScope | None = None  # of the task that waits for the first timer
        self._workers = Workers(self.wake)
        self._retiring: Timer | None = None

    # -- Loop -------------------------------------------------------------------------------------

    def now(self) -> float:
        return monotonic()

    def call_soon(self, function: Function) -> None:
        self._soon.append(function)
        if not self._in_turn:
            self._rouse()

    def call_at(self, when: float, function: Function) -> Timer:
        timer = self._timers.add(when, function)
        if self._timing is None:
            self._timing = trio.CancelScope()
            trio.lowlevel.spawn_system_task(self._keep_time, name="wait for timers")
        elif (deadline := self._deadline()) < self._timing.deadline:
            self._timing.deadline = deadline
        return timer

    def watch(self, fd: int, ready: Function) -> TrioWatch:
        epoll = self._epoll
        if epoll is None:
            epoll = select.epoll()
            self._begin(epoll)
        try:
            epoll.register(fd, _IN)
        except OSError:
            self._close_unused()
            raise
        before = self._watches.get(fd)
        made = self._watches[fd] = TrioWatch(self, fd, ready, self._number)
        if before is not None:  # its descriptor was closed, or ``register`` would have failed
            before.drop()
            self._renew()
        return made

    def wake(self, function: Function) -> None:
        with suppress(trio.RunFinishedError):
            self._token.run_sync_soon(function)

    def offload(self, work: Function, ended: Ended, limit: Limit) -> None:
        self._workers.begin(work, ended, limit)
        if self._retiring is None:
            self._retiring = self.call_at(monotonic() + IDLE_S, self._retire)

    # -- of its watches ---------------------------------------------------------------------------

    def change(self, watch: TrioWatch) -> None:
        if self._epoll is not None:
            try:
                self._epoll.modify(watch.fd, watch.mask)
            except OSError:  # its descriptor was closed
                watch.close()

    def forget(self, fd: int) -> None:
        del self._watches[fd]
        self._forgot = self._number
        if self._epoll is not None:
            try:
                self._epoll.unregister(fd)
            except OSError:  # it was closed, and a copy may be left
                self._renew()
            self._close_unused()

    def stay_awake(self, until: float) -> None:
        self._awake = max(self._awake, until)

    def _begin(self, epoll: select.epoll) -> None:
        """Wait for what ``epoll`` has."""
        self._epoll = epoll
        poller = Poller()
        poller.add(epoll.fileno())
        trio.lowlevel.spawn_system_task(self._run, epoll, poller, name="wait for connections")

    def _renew(self) -> None:
        """A descriptor was closed behind the loop, and the kernel may go on to report it."""
        old = self._epoll
        if old is None:
            return
        try:
            new, gone = renewed(old, {fd: watch.mask for fd, watch in self._watches.items()})
        except OSError:
            return  # no room: the turn that hears of that descriptor tries again
        self._begin(new)
        self._end(old)
        for fd in gone:
            self._watches.pop(fd).drop()

    def _end(self, epoll: select.epoll) -> None:
        """Its task ends, too."""
        trio.lowlevel.notify_closing(epoll.fileno())
        epoll.close()

    def _close_unused(self) -> None:
        epoll = self._epoll
        if epoll is not None and not self._watches:
            self._epoll = None
            self._end(epoll)
            if self._caller is not None:
                self._caller.wake()  # it ends

    # -- turns ------------------------------------------------------------------------------------

    async def _run(self, epoll: select.epoll, poller: Poller) -> None:
        """Body of a task. (trio raises KeyboardInterrupt in none of its system tasks.)"""
        try:
            while not epoll.closed:
                if not self._awake or not await self._look_on(epoll, poller):
                    await until_readable(epoll.fileno())
                if epoll.closed:
                    return
                self._in_turn = True
                while not epoll.closed:
                    self._look(epoll)
                    if not self._soon:
                        break
                    # Tasks that were woken have their turn. Not to be cancelled: what was submitted
                    # meanwhile waits to be sent.
                    await trio.lowlevel.cancel_shielded_checkpoint()
                    self._call()
                    if not self._soon:
                        break
                    # These functions may go on for ever: descriptors have their turn, too.
                self._in_turn = False
        except trio.ClosedResourceError:
            pass
        finally:
            self._in_turn = False
            epoll.close()
            if self._epoll is epoll:  # trio's loop ends
                self._epoll = None
                for watch in list(self._watches.values()):
                    watch.close()
            if self._soon:
                self._rouse()

    async def _look_on(self, epoll: select.epoll, poller: Poller) -> bool:
        """Do not sleep, as ``stay_awake`` says, but let all tasks of trio run meanwhile. Returns
        whether something has come."""
        turns = self._turns
        now = monotonic()
        while now < self._awake and not turns.crowded(now):
            await trio.lowlevel.checkpoint()
            if epoll.closed or poller.wait(0):
                return True
            now = turns.give_way()
        self._awake = 0.0
        return False

    def _look(self, epoll: select.epoll) -> None:
        """Call the functions of the descriptors that are ready."""
        self._number += 1
        for fd, _ in epoll.poll(0, _MOST_DESCRIPTORS):
            watch = self._watches.get(fd)
            if watch is None:
                if self._forgot != self._number:  # else it may have been closed in this turn
                    self._renew()
            # Else one before it has closed it, and given its number to another one.
            elif watch.made != self._number:
                watch.ready()

    def _rouse(self) -> None:
        if self._caller is None:
            nap = Nap()
            with suppress(RuntimeError):  # trio's loop is over: nothing is called any more
                trio.lowlevel.spawn_system_task(self._call_later, nap, name="call soon")
                self._caller = nap
        else:
            self._caller.wake()

    async def _call_later(self, nap: Nap) -> None:
        """Body of a task: call what was given outside of a turn."""
        try:
            while True:
                while self._soon:
                    self._call()
                    await trio.lowlevel.cancel_shielded_checkpoint()
                if self._epoll is None:
                    return
                await nap.sleep()
        finally:
            self._caller = None
            if self._soon:  # a function has raised
                self._rouse()

    def _call(self) -> None:
        for _ in range(len(self._soon)):
            self._soon.popleft()()

    def _deadline(self) -> float:
        return task_time() + max(0.0, self._timers.first - monotonic())

    async def _keep_time(self) -> None:
        """Body of a task, as long as there are timers."""
        scope = self._timing
        assert scope is not None
        try:
            while self._timers:
                scope.deadline = self._deadline()
                with scope:
                    await trio.sleep_forever()
                self._timers.run(monotonic())
                scope = self._timing = trio.CancelScope()
        except trio.Cancelled:
            self._workers.close()  # trio's loop ends
            raise
        finally:
            self._timing = None

    def _retire(self) -> None:
        self._workers.retire()
        self._retiring = None
        if self._workers.idle or self._workers.busy:
            self._retiring = self.call_at(monotonic() + IDLE_S, self._retire)
