"""Busy polling: a driver polls for the next command or answer, instead of sleeping until it comes.

With one command in flight, each side sleeps while the other works. The processor then goes idle,
and leaving the idle state takes 25 µs and more in a virtual machine, of a round trip of 80 µs. So
while single messages follow each other closely, the driver stays awake for the next message, up to
a limit. With more commands in flight no side waits for wake-ups, and the processor is needed.
"""

from __future__ import annotations

import os
from time import monotonic

import trio

from iserblk.waiting.descriptors import Nap

HITS = 8  # after so many messages that came singly and in time, stay awake
FEW = 2  # commands in flight up to which an initiator stays awake
ENOUGH = 2 * HITS  # hits counted at most; an exception halves the count: the first changes nothing


class BusyPoll:
    """Keeps the trio loop in which ``run`` runs awake, until the monotonic time ``until``.

    With a single processor it never does, because the sender of the next message needs the
    processor.
    """

    def __init__(self, limit_us: int) -> None:
        """``limit_us``: how long to stay awake after a message, in microseconds; 0: never."""
        self.limit = limit_us * 1e-6 if len(os.sched_getaffinity(0)) > 1 else 0.0
        self.until = 0.0
        self._nap = Nap()

    def stay_awake(self, now: float) -> None:
        """Stay awake until ``limit`` seconds after ``now``."""
        self.until = now + self.limit
        self._nap.wake()

    @trio.lowlevel.enable_ki_protection  # KeyboardInterrupt is for the user of the loop
    async def run(self) -> None:
        """The body of a task; runs until it is cancelled."""
        while True:
            while monotonic() < self.until:
                os.sched_yield()  # threads that wait for this processor go first
                await trio.lowlevel.checkpoint()  # trio polls without sleep while a task can run
            await self._nap.sleep()


class Pace:
    """Measures how closely the messages of one connection follow each other, and keeps the loop
    awake when single messages do so closely."""

    __slots__ = ("_answered", "_hits", "_idle", "_poll")

    def __init__(self, poll: BusyPoll) -> None:
        self._poll = poll
        self._hits = 0
        self._idle = 0.0
        self._answered = 0

    def rest(self, answered: int) -> None:
        """To be called before the driver waits. ``answered``: commands of the connection that were
        answered so far."""
        if answered - self._answered > 1:
            self._hits //= 2
        self._answered = answered
        self._idle = monotonic()
        if self._hits >= HITS and self._poll.limit:
            self._poll.stay_awake(self._idle)

    def work(self) -> float:
        """To be called when a message has come. Returns the time (monotonic seconds)."""
        now = monotonic()
        if now - self._idle < self._poll.limit:
            self._hits = min(self._hits + 1, ENOUGH)
        else:
            self._hits //= 2
        return now
