"""How a task of trio waits: it sleeps, or waits for one descriptor.

Deadlines of trio's cancel scopes are times of trio's own clock, ``task_time``, which has nothing to
do with ``clock.monotonic``. ``patience`` has time-outs that count only while this process runs.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Protocol

import trio


class HasFileno(Protocol):
    """A socket, or what has one."""

    def fileno(self) -> int: ...


class Wait(Protocol):
    """See ``until_readable``."""

    def __call__(self, fd: int | HasFileno, /) -> Awaitable[None]: ...


readable: Wait = trio.lowlevel.wait_readable
"""What ``until_readable`` asks. A simulated world, whose descriptors the system does not know, sets
it."""
writable: Wait = trio.lowlevel.wait_writable
"""The same for ``until_writable``."""


def sleep(seconds: float) -> Awaitable[None]:
    """Let other tasks run for so long. May be cancelled."""
    return trio.sleep(seconds)  # noqa: ASYNC105


def sleep_until(when: float) -> Awaitable[None]:
    """Let other tasks run until ``task_time`` is ``when``. May be cancelled."""
    return trio.sleep_until(when)


def until_readable(fd: int | HasFileno) -> Awaitable[None]:
    """Wait until ``fd`` can be read from without waiting, or has ended. May be cancelled. Raises
    trio.ClosedResourceError when its owner calls trio.lowlevel.notify_closing, and
    trio.BusyResourceError when another task waits for the same."""
    return readable(fd)


def until_writable(fd: int | HasFileno) -> Awaitable[None]:
    """The same for writing."""
    return writable(fd)


def task_time() -> float:
    """Seconds, of the clock by which deadlines of cancel scopes are meant."""
    return trio.current_time()
