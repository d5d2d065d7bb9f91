"""The clocks. Nothing else in iserblk reads one, so a test or a simulated world has but one place
where time is made up.

All functions may be called from any thread, and do not wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final


class Sources:
    """What the functions of the same names ask. A test or a simulation sets them, so that a made-up
    time is never compared with the real one. (Compiled code reads an attribute in a tenth of the
    instructions that a variable of a module takes.)"""

    __slots__ = ("monotonic", "nanoseconds")

    def __init__(self) -> None:
        self.monotonic: Callable[[], float] = time.monotonic
        self.nanoseconds: Callable[[], int] = time.monotonic_ns


sources: Final = Sources()


def monotonic() -> float:
    """Seconds since some moment in the past; they never go back. For deadlines and durations."""
    return sources.monotonic()


def nanoseconds() -> int:
    """The same clock in whole nanoseconds: what the metrics count in."""
    return sources.nanoseconds()


def since_epoch() -> float:
    """Seconds since 1970, as the machine has them: they may jump. For people, and for files."""
    return time.time()


def since_epoch_ns() -> int:
    """The same in nanoseconds."""
    return time.time_ns()


def since_boot() -> float:
    """Seconds since the machine was started, those in which it was suspended included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def processor_seconds() -> float:
    """Seconds of processor time that this process has used."""
    return time.process_time()
