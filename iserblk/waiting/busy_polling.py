"""Busy polling: one looks for the next command, or its answer, instead of going to sleep before it.

With one command in flight each side sleeps while the other works, which costs an idle processor and
the way back out of it: in a virtual machine 25 µs and more, of a round trip of 80. While single
messages follow each other closely one therefore stays awake for the next, up to a limit. With more
in flight nobody waits for wake-ups, and the processor is needed.
"""

from __future__ import annotations

import os
from time import monotonic

import trio

from iserblk.waiting.descriptors import Nap

HITS = 8  # single messages after short gaps, from which on one stays awake
FEW = 2  # commands in flight, up to which an initiator stays awake
ENOUGH = 2 * HITS  # that many are counted: one exception, which halves them, changes nothing yet


class BusyPoll:
    """Keeps one trio loop awake, where ``run`` runs. ``limit_us``: how long after a message; 0:
    never. ``until``: monotonic time.

    It never does so where there is just one processor: the sender of the next message needs it.
    """

    def __init__(self, limit_us: int) -> None:
        self.limit = limit_us * 1e-6 if len(os.sched_getaffinity(0)) > 1 else 0.0
        self.until = 0.0
        self._nap = Nap()

    def stay_awake(self, now: float) -> None:
        """Until ``limit`` seconds from now."""
        self.until = now + self.limit
        self._nap.wake()

    @trio.lowlevel.enable_ki_protection  # an interrupt is for the user of the loop
    async def run(self) -> None:
        """Body of a task; runs until it is cancelled."""
        while True:
            while monotonic() < self.until:
                os.sched_yield()  # what waits for this processor goes first
                await trio.lowlevel.checkpoint()  # its poll does not sleep while a task can run
            await self._nap.sleep()


class Pace:
    """How closely the messages of one connection follow each other."""

    __slots__ = ("_answered", "_hits", "_idle", "_poll")

    def __init__(self, poll: BusyPoll) -> None:
        self._poll = poll
        self._hits = 0
        self._idle = 0.0
        self._answered = 0

    def rest(self, answered: int) -> None:
        """There is nothing to do; ``answered``: commands of the connection so far that were."""
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
