"""A loop whose time is made up: nothing sleeps, and a seed decides what comes first.

Descriptors are numbers that the system does not know: those of ``network``. What runs trio with it
is ``running``.
"""

from __future__ import annotations

import errno
import os
from collections import deque
from functools import partial
from random import Random
from typing import Final, Protocol

import trio

from iserblk.loop.tasks import HasFileno
from iserblk.loop.timers import Timer, Timers
from iserblk.loop.work import Ended, Function, Job, Limit, nothing

FIRST_S: Final = 1000.0  # the time at which all begins
FIRST_NUMBER: Final = 1_000_000  # of descriptors: no system gives such
TURN_S: Final = 1e-6  # what a turn takes, at least; at most twice as much
WORK_S: Final = (5e-6, 1e-3)  # how long offloaded work waits for a thread, and its end for the loop
AGAIN_S: Final = 0.01  # work that waits looks again


class Waits(Exception):
    """Offloaded work waits for other work, which this thread does as well: it begins anew later."""


class SimulatedSemaphore:
    """In place of threading.Semaphore, for offloaded work that waits. Work that begins anew takes
    again what it has taken before."""

    def __init__(self, loop: SimulatedLoop, value: int = 1) -> None:
        self._loop = loop
        self._value = value
        self._taken = 0
        self._until: float | None = None

    def acquire(self, *, timeout: float) -> bool:
        """Raises Waits; ``timeout``, in seconds of made-up time, is that of all of the work."""
        if self._value:
            self._value -= 1
            self._taken += 1
            return True
        now = self._loop.now()
        if self._until is None:
            self._until = now + timeout
        if now >= self._until:
            return False
        self._value, self._taken = self._taken, 0
        raise Waits

    def release(self) -> None:
        self._value += 1


class Descriptor(Protocol):
    """What a number of ``SimulatedLoop`` stands for."""

    def readable(self) -> bool: ...

    def writable(self) -> bool: ...


class SimulatedWatch:
    """See ``seam.Watch``."""

    __slots__ = ("_loop", "fd", "reads", "ready", "writes")

    def __init__(self, loop: SimulatedLoop, fd: int, ready: Function) -> None:
        self._loop = loop
        self.reads = True
        self.writes = False
        self.fd = fd
        self.ready = ready

    def want(self, readable: bool, writable: bool) -> None:
        self.reads, self.writes = readable, writable
        if self.fd >= 0:
            self._loop.touch(self.fd)

    def expect(self, until: float) -> None:
        """It never sleeps."""

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            self.ready = nothing
            self._loop.forget(fd)


class SimulatedLoop:
    """Implements Loop. ``chance``: decides on the order. ``work_s``: see WORK_S; may be changed.

    A turn does one thing of those that are due: it calls what was to be called soon, timers, what
    comes by ``wake``, one descriptor that is ready, or what the world around does (``later``)."""

    def __init__(self, chance: Random) -> None:
        self.chance = chance
        self._draw = chance.random
        self.work_s = WORK_S
        self._now = FIRST_S
        self._soon: deque[Function] = deque()
        self._foreign: deque[Function] = deque()
        self._timers = Timers()
        self._world = Timers()
        self._descriptors: dict[int, Descriptor] = {}
        self._watches: dict[int, SimulatedWatch] = {}
        self._waits: dict[tuple[int, bool], trio.lowlevel.Task] = {}
        self._touched: dict[int, None] = {}  # perhaps ready
        self._gatherings: dict[int, SimulatedGathering] = {}
        self._over = False

    # -- Loop -------------------------------------------------------------------------------------

    def now(self) -> float:
        return self._now

    def call_soon(self, function: Function) -> None:
        self._soon.append(function)

    def call_at(self, when: float, function: Function) -> Timer:
        return self._timers.add(when, function)

    def watch(self, fd: int, ready: Function) -> SimulatedWatch:
        self.check(fd)
        if fd in self._watches:
            raise OSError(errno.EEXIST, os.strerror(errno.EEXIST))
        made = self._watches[fd] = SimulatedWatch(self, fd, ready)
        self.touch(fd)
        return made

    def stay_awake(self, until: float) -> None:
        """Nothing sleeps here."""

    def wake(self, function: Function) -> None:
        if not self._over:
            self._foreign.append(function)

    def offload(self, work: Function, ended: Ended, limit: Limit) -> None:
        """All in this thread; how long it waits, and its end, is drawn."""
        if limit.busy >= limit.most:
            limit.queue.append((work, ended, limit))
        else:
            self._begin((work, ended, limit))

    def _begin(self, job: Job) -> None:
        job[2].busy += 1
        self.later(self.chance.uniform(*self.work_s), partial(self._work, job))

    def _work(self, job: Job) -> None:
        error: BaseException | None = None
        try:
            job[0]()
        except Waits:
            self.later(AGAIN_S, partial(self._work, job))
            return
        except BaseException as problem:
            error = problem
        self.later(self.chance.uniform(*self.work_s), partial(self._end, job, error))

    def _end(self, job: Job, error: BaseException | None) -> None:
        _, ended, limit = job
        limit.busy -= 1
        if limit.queue:
            self._begin(limit.queue.popleft())
        ended(error)

    # -- of its watches, and of the world around --------------------------------------------------

    def forget(self, fd: int) -> None:
        del self._watches[fd]

    def touch(self, fd: int) -> None:
        """The descriptor may be ready."""
        self._touched[fd] = None
        if self._gatherings:
            for number, gathering in self._gatherings.items():
                if gathering.has(fd):
                    self._touched[number] = None

    def gathering(self) -> SimulatedGathering:
        """Instead of ``iserblk.loop.gathering.Gathering``."""
        made = SimulatedGathering(self)
        number = made.number = self.add(made)
        self._gatherings[number] = made
        return made

    def is_ready(self, fd: int, writable: bool) -> bool:
        """Of what a gathering waits for."""
        descriptor = self._descriptors[fd]
        return descriptor.readable() or (writable and descriptor.writable())

    def later(self, seconds: float, function: Function) -> Timer:
        """The world does something, in so many seconds."""
        return self._world.add(self._now + seconds, function)

    def add(self, descriptor: Descriptor) -> int:
        """Returns its number: the lowest that is free, as the system has it."""
        number = FIRST_NUMBER
        while number in self._descriptors:
            number += 1
        self._descriptors[number] = descriptor
        return number

    def remove(self, number: int) -> None:
        """A descriptor is closed. As with a real one, nobody is told; but what waits for it must
        not wait any more."""
        assert not any((number, way) in self._waits for way in (True, False)), "it is waited for"
        assert number not in self._watches, "it is watched: a watch is to be closed before that"
        del self._descriptors[number]
        self._touched.pop(number, None)
        self._gatherings.pop(number, None)
        for gathering in self._gatherings.values():
            gathering.forget(number)  # as the kernel does

    @property
    def open(self) -> int:
        """Descriptors that are not closed."""
        return len(self._descriptors)

    def describe(self) -> str:
        """The descriptors that are not closed."""
        return ", ".join(f"{number}: {each}" for number, each in self._descriptors.items())

    @property
    def watched(self) -> int:
        return len(self._watches)

    def check(self, fd: int) -> None:
        """Raises OSError unless it is open."""
        if fd not in self._descriptors:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    async def until_readable(self, fd: int | HasFileno) -> None:
        await self._until(fd, False)

    async def until_writable(self, fd: int | HasFileno) -> None:
        await self._until(fd, True)

    async def _until(self, fd: int | HasFileno, writable: bool) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()
        number = fd if isinstance(fd, int) else fd.fileno()
        self.check(number)
        key = number, writable
        if key in self._waits:
            raise trio.BusyResourceError("another task waits for it")

        def abort(_raise_cancel: object) -> trio.lowlevel.Abort:
            del self._waits[key]
            return trio.lowlevel.Abort.SUCCEEDED

        self._waits[key] = trio.lowlevel.current_task()
        self.touch(number)
        await trio.lowlevel.wait_task_rescheduled(abort)

    # -- turns ------------------------------------------------------------------------------------

    def turn(self) -> bool:
        """Returns whether there was anything to do. Raises what a function raises."""
        draw = self._draw
        now = self._now = self._now + TURN_S * (1.0 + draw())
        due: list[Function] = []
        if self._soon:
            due.append(self._call)
        if self._foreign:
            due.append(self._call_foreign)
        if self._timers.first <= now:
            due.append(self._ring)
        if self._world.first <= now:
            due.append(self._change)
        if self._touched:
            due.append(self._look)
        if not due:
            return False
        (due[0] if len(due) == 1 else due[int(draw() * len(due))])()
        return True

    def _call(self) -> None:
        soon = self._soon
        for _ in range(len(soon)):
            soon.popleft()()

    def _call_foreign(self) -> None:
        self._foreign.popleft()()

    def _ring(self) -> None:
        self._timers.run(self._now)

    def _change(self) -> None:
        self._world.run(self._now)

    def _look(self) -> None:
        touched = self._touched
        number = int(self._draw() * len(touched))
        fd = next(iter(touched)) if not number else list(touched)[number]
        descriptor = self._descriptors.get(fd)
        found = False
        if descriptor is not None:
            readable, writable = descriptor.readable(), descriptor.writable()
            if self._waits:
                self._end_waits(fd, readable, writable)
            watch = self._watches.get(fd)
            if watch is not None and ((watch.reads and readable) or (watch.writes and writable)):
                try:
                    watch.ready()
                except BaseException:
                    watch.close()
                    raise
                found = (watch.reads and descriptor.readable()) or (
                    watch.writes and descriptor.writable()
                )
        if not found:
            touched.pop(fd, None)

    def _end_waits(self, fd: int, readable: bool, writable: bool) -> None:
        for way, ready in ((False, readable), (True, writable)):
            if ready and (task := self._waits.pop((fd, way), None)) is not None:
                trio.lowlevel.reschedule(task)

    def due(self) -> float:
        """When the next thing happens that is known here."""
        return min(self._timers.first, self._world.first)

    def advance(self, when: float) -> None:
        self._now = max(self._now, when)

    def close(self) -> None:
        self._over = True
        for watch in list(self._watches.values()):
            watch.close()


class SimulatedGathering:
    """See ``iserblk.loop.gathering.Gathering``: a descriptor that is ready when one of those that
    were added is."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self._loop = loop
        self._writing: dict[int, bool] = {}  # by descriptor
        self.number = -1

    @property
    def closed(self) -> bool:
        return self.number < 0

    def fileno(self) -> int:
        return self.number

    def readable(self) -> bool:
        return any(self._loop.is_ready(fd, wanted) for fd, wanted in self._writing.items())

    def writable(self) -> bool:
        return False

    def has(self, fd: int) -> bool:
        return fd in self._writing

    def forget(self, fd: int) -> None:
        self._writing.pop(fd, None)

    def add(self, fd: int) -> None:
        self._loop.check(fd)
        self._writing[fd] = False
        self._loop.touch(fd)

    def watch_output(self, fd: int, wanted: bool) -> None:
        if fd not in self._writing:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
        self._writing[fd] = wanted
        self._loop.touch(fd)

    def remove(self, fd: int) -> None:
        if self._writing.pop(fd, None) is None:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))

    def close(self) -> None:
        number, self.number = self.number, -1
        if number >= 0:
            self._loop.remove(number)
