"""Runs trio and the product in a simulated world.

trio's tasks run under ``trio.run``, with a clock of trio's own kind (``trio.abc.Clock``) that shows
the time of the loop, and not as a guest: a guest waits in a thread of its own. trio tells which
tasks are runnable (``trio.abc.Instrument``); a system task does the turns of the loop between them.
trio's scheduler, and ``random``, are seeded by hypothesis, with which trio registers its scheduler
(``hypothesis.register_random``, by trio's entry point for hypothesis), as pytest-trio does. Nothing
else of trio is touched.
"""

from __future__ import annotations

import fcntl
import math
import os
import secrets
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from random import Random
from typing import Final, TypeVar
from unittest import mock

import hypothesis  # noqa: F401 (trio's entry point comes with it)
import trio
from hypothesis.internal.entropy import deterministic_PRNG

from iserblk.initiator.connecting import login, reach
from iserblk.initiator.connecting.styles import Styles
from iserblk.initiator.session import descriptors
from iserblk.iscsi.login_initiator import LoginInitiator, LoginInitiatorConfig
from iserblk.loop import clock, tasks
from iserblk.loop.here import hosts
from iserblk.loop.work import nothing
from iserblk.sockets import plain
from tests.simulation.loop import SimulatedLoop, SimulatedSemaphore
from tests.simulation.network import Network, ioctl

T = TypeVar("T")

PASS: Final = 16  # turns, after which trio looks at its deadlines
MOST_IDLE: Final = 500_000  # turns in which nothing ends that is waited for
_TASK_OFFSET: Final = 5e5  # trio's time is another one, as it is in the product


class Stuck(AssertionError):
    """Nothing is left that could happen, or all goes on and nothing ends, and the body waits."""


class _Runnable(trio.abc.Instrument):
    """Counts tasks that have been scheduled, and have not run yet."""

    def __init__(self) -> None:
        self.count = 0

    def task_scheduled(self, task: trio.lowlevel.Task) -> None:
        self.count += 1

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.count -= 1


class _Clock(trio.abc.Clock):
    """trio's. It is never asked to sleep while the loop does its turns."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self._loop = loop

    def start_clock(self) -> None: ...

    def current_time(self) -> float:
        return self._loop.now() + _TASK_OFFSET

    def deadline_to_sleep_time(self, deadline: float) -> float:
        """The turns are over, or have not begun: nothing but a deadline can come any more."""
        if deadline == math.inf:
            return math.inf
        self._loop.advance(deadline - _TASK_OFFSET)
        return 0.0


def _raise(problem: BaseException) -> None:
    raise problem


class Simulation:
    """One ``run``, in which ``seed`` decides on everything. ``first_number``: CmdSN and StatSN of
    each session begin there."""

    def __init__(self, seed: object = 0, first_number: int = 1) -> None:
        self._seed = seed
        self._first_number = first_number
        self.loop = SimulatedLoop(Random(f"loop {seed}"))
        self.network = Network(self.loop, Random(f"network {seed}"))
        self._problem: BaseException | None = None
        self._runnable = _Runnable()
        self._idle = 0  # turns since ``progress``

    def progress(self) -> None:
        """Something has ended that is waited for."""
        self._idle = 0

    def fail(self, problem: BaseException) -> None:
        """``run`` raises it, whoever takes it for something else before."""
        self.loop.call_soon(partial(_raise, problem))

    def run(self, body: Callable[[], Awaitable[T]]) -> T:
        """As ``trio.run``. What a function of the loop raises cancels ``body``, and is raised here
        when that has ended. Raises Stuck, too where ``progress`` is not called for MOST_IDLE
        turns."""
        loop, scope = self.loop, trio.CancelScope()

        async def main() -> T:
            trio.lowlevel.spawn_system_task(self._turns, scope, name="simulated loop")
            self.network.start()
            with scope:
                return await body()
            assert self._problem is not None  # nothing else cancels the scope
            raise self._problem

        with made_up(self.network, self._seed, self._first_number):
            try:
                result = trio.run(main, clock=_Clock(loop), instruments=[self._runnable])
            finally:
                loop.close()
        if self._problem is not None:
            raise self._problem
        return result

    async def _turns(self, scope: trio.CancelScope) -> None:
        """Body of a task. trio gets its turn where a task of its is runnable, where one of its
        deadlines has come, and after PASS turns in any case."""
        loop, chance, runnable = self.loop, self.loop.chance, self._runnable
        turn, draw = loop.turn, chance.random
        left = PASS
        quiet = False  # trio has had its turn since the last thing that was done here
        while True:
            # ``count``: without this task, which runs.
            if left <= 0 or (runnable.count and draw() < 0.5):
                if self._idle > MOST_IDLE:
                    self._idle = 0
                    self._problem = self._problem or Stuck("all goes on, and nothing ends")
                    scope.cancel()
                left = PASS
                quiet = True
                await trio.lowlevel.checkpoint()
                continue
            left -= 1
            try:
                if turn():
                    quiet = False
                    self._idle += 1
                elif runnable.count or self._jump(quiet):
                    left = 0
            except BaseException as error:
                self._problem = self._problem or error
                scope.cancel()
                left = 0

    def _jump(self, quiet: bool) -> bool:
        """To the moment when something happens; returns whether in trio. Where nothing is left,
        trio may still have to end what was cancelled, unless it is ``quiet``."""
        loop = self.loop
        ours = loop.due()
        statistics = trio.lowlevel.current_statistics()
        if statistics.run_sync_soon_queue_size:
            return True
        theirs = loop.now() + statistics.seconds_to_next_deadline
        when = min(ours, theirs)
        if when == math.inf:
            if not quiet:
                return True
            raise Stuck("nothing is left that could happen: what waits, waits for ever")
        loop.advance(when)
        return when == theirs


@contextmanager
def made_up(network: Network, seed: object, first_number: int) -> Iterator[None]:
    """In the body time, and what is random, are those of a simulated world."""

    loop = network.loop

    def nanoseconds() -> int:
        return int(loop.now() * 1e9)

    def numbered(config: LoginInitiatorConfig) -> LoginInitiator:
        if config.leading is None:
            config = replace(config, cmd_sn=first_number)
        made = LoginInitiator(config)
        made.exp_stat_sn = first_number  # the target begins with what is expected
        return made

    random_bytes = Random(f"bytes {seed}").randbytes
    before, hosts.loop = hosts.loop, loop
    sources = clock.sources  # mock would delete an attribute, which is not possible where compiled
    real = sources.monotonic, sources.nanoseconds
    sources.monotonic, sources.nanoseconds = loop.now, nanoseconds
    try:
        with (
            deterministic_PRNG(Random(f"scheduler {seed}").getrandbits(32)),
            mock.patch.multiple(tasks, readable=loop.until_readable, writable=loop.until_writable),
            mock.patch.object(secrets, "token_bytes", random_bytes),
            mock.patch.object(threading, "Semaphore", partial(SimulatedSemaphore, loop)),
            mock.patch.object(os, "sched_yield", nothing),  # other processes do not count
            mock.patch.object(plain, "source", network.plain),
            mock.patch.object(fcntl, "ioctl", ioctl),
            mock.patch.object(descriptors, "Gathering", loop.gathering),
            mock.patch.object(login, "LoginInitiator", numbered),
            mock.patch.object(reach, "STYLES", Styles()),  # what a process knows of portals
        ):
            yield
    finally:
        sources.monotonic, sources.nanoseconds = real
        hosts.loop = before
