"""Busy polling: a driver polls for the next command or answer, instead of sleeping until it comes.

With one command in flight, each side sleeps while the other works. The processor then goes idle,
and leaving the idle state takes 25 µs and more in a virtual machine, of a round trip of 80 µs. So
while single messages follow each other closely, the driver stays awake for the next message, up to
a limit. With more commands in flight no side waits for wake-ups, and the processor is needed.
"""

from __future__ import annotations

import os
from typing import Final

from iserblk.loop.clock import monotonic

HITS: Final = 8  # after so many messages that came singly and in time, stay awake
FEW: Final = 2  # commands in flight up to which an initiator stays awake
# Hits counted at most; an exception halves the count: the first changes nothing.
ENOUGH: Final = 2 * HITS
CROWDED_S = 200e-6  # of waiting for the processor: a peer of the conversation takes less
SOBER_S: Final = 0.1  # asleep between messages after that
ROOM: Final = 4  # times what it usually takes: stay awake for so long at most
_USUAL: Final = 0.125  # the weight of one message in what it usually takes


class Pace:
    """Measures how closely the messages of one connection follow each other: its driver stays awake
    when single messages do so closely.

    It does so for ROOM times the time that a message usually takes, and within a limit. So a fast
    network does not pay for a limit that allows for slow ones. ``pace_of`` makes it, where a driver
    may stay awake at all.
    """

    __slots__ = (
        "_answered",
        "_hits",
        "_idle",
        "_limit",
        "_usual",
        "until",
    )

    def __init__(self, limit_us: int) -> None:
        """``limit_us``: stay awake after a message no longer; in microseconds, not 0."""
        self._limit = limit_us * 1e-6
        self._usual = self._limit
        self._hits = 0
        self._idle = 0.0
        self._answered = 0
        self.until = 0.0  # monotonic seconds: stay awake; 0: sleep at once

    def rest(self, answered: int) -> bool:
        """To be called before the driver waits. ``answered``: commands of the connection that were
        answered so far. Returns whether it shall stay awake meanwhile, ``until``."""
        if answered - self._answered > 1:
            self._hits //= 2
        self._answered = answered
        self._idle = now = monotonic()
        if self._hits < HITS:
            self.until = 0.0
            return False
        self.until = now + min(self._limit, ROOM * self._usual)
        return True

    def work(self) -> float:
        """To be called when a message has come. Returns the time (monotonic seconds)."""
        now = monotonic()
        gap = now - self._idle
        if gap < self._limit:
            self._usual += (gap - self._usual) * _USUAL
            if self._hits < ENOUGH:
                self._hits += 1
        else:
            self._hits //= 2
        return now


def pace_of(limit_us: int) -> Pace | None:
    """For one connection. None: its driver never stays awake. ``limit_us`` is 0 then; or there is a
    single processor, which the sender of the next message needs."""
    return Pace(limit_us) if limit_us and len(os.sched_getaffinity(0)) > 1 else None


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
