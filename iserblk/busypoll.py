"""Busy polling: the target looks for the next command instead of going to sleep before it.

Between two commands of a client that has one in flight, a sleeping target costs an idle processor
and the way back out of it: in a virtual machine 25 µs and more, of a round trip of 80. While such
commands follow each other closely the loop is therefore kept awake for the next one, up to a limit.
Clients with more in flight do not wait for wake-ups, and need the processor.
"""

from __future__ import annotations

import os
from time import monotonic

import trio

from iserblk.trio_io import Nap

DEFAULT_US = 300
HITS = 8  # single commands after short gaps, from which on the loop is kept awake
ENOUGH = 2 * HITS  # that many are counted: one exception, which halves them, changes nothing yet


class BusyPoll:
    """Keeps one trio loop awake. ``limit_us``: how long after a command; 0: never.

    It never does so where there is just one processor: whoever sends the next command needs it.
    """

    def __init__(self, limit_us: int) -> None:
        self.limit = limit_us * 1e-6 if len(os.sched_getaffinity(0)) > 1 else 0.0
        self._until = 0.0
        self._nap = Nap()

    def stay_awake(self, now: float) -> None:
        """Until ``limit`` seconds from now."""
        self._until = now + self.limit
        self._nap.wake()

    async def run(self) -> None:
        """Body of a task; runs until it is cancelled."""
        while True:
            while monotonic() < self._until:
                os.sched_yield()  # whoever waits for this processor goes first
                await trio.lowlevel.checkpoint()  # its poll does not sleep while a task can run
            await self._nap.sleep()


class Pace:
    """How closely the commands of one connection follow each other."""

    __slots__ = ("_answered", "_hits", "_idle", "_poll")

    def __init__(self, poll: BusyPoll) -> None:
        self._poll = poll
        self._hits = 0
        self._idle = 0.0
        self._answered = 0

    def rest(self, answered: int) -> None:
        """The connection has nothing to do; ``answered``: its responses so far."""
        if answered - self._answered > 1:
            self._hits //= 2
        self._answered = answered
        self._idle = monotonic()
        if self._hits >= HITS and self._poll.limit:
            self._poll.stay_awake(self._idle)

    def work(self) -> float:
        """Something has come. Returns the time."""
        now = monotonic()
        if now - self._idle < self._poll.limit:
            self._hits = min(self._hits + 1, ENOUGH)
        else:
            self._hits //= 2
        return now
