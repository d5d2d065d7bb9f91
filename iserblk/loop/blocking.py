"""How a thread waits that has no loop: it sleeps, or waits for descriptors.

For threads of the command line, and of the faces that know no trio. In the thread of a loop these
functions would hold up all that the loop serves.
"""

from __future__ import annotations

import select
import time
from collections.abc import Sequence

from iserblk.loop.clock import monotonic

_LONGEST_S = 1e6  # what poll(2) takes, in whole milliseconds


def sleep(seconds: float) -> None:
    """Do nothing for so long."""
    time.sleep(seconds)


def readable(fd: int, until: float | None = 0.0) -> bool:
    """Wait until ``fd`` can be read from without waiting, or has ended, or is broken; but no longer
    than until the monotonic time ``until`` (0: look only; None: for ever). Returns whether that is
    so. A descriptor that is closed counts as one that can be read from."""
    return _ready(fd, select.POLLIN, until)


def writable(fd: int, until: float | None = 0.0) -> bool:
    """The same for writing."""
    return _ready(fd, select.POLLOUT, until)


def hung_up(fd: int) -> bool:
    """Whether the peer has closed its end of ``fd``, in both directions, or ``fd`` is broken."""
    return _ready(fd, 0, 0.0)


def any_readable(fds: Sequence[int]) -> list[int]:
    """Wait, for ever, until one of ``fds`` can be read from; returns all that can."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return [fd for fd, _ in poll.poll()]


def _ready(fd: int, event: int, until: float | None) -> bool:
    poll = select.poll()
    poll.register(fd, event)
    if until is None:
        return bool(poll.poll())
    left = max(0.0, until - monotonic()) if until else 0.0
    return bool(poll.poll(min(left, _LONGEST_S) * 1000))


class Poller:
    """Descriptors that one thread waits for again and again."""

    def __init__(self) -> None:
        self._poll = select.poll()

    def add(self, fd: int) -> None:
        """Wait until ``fd`` can be read from, too. It must be removed before it is closed."""
        self._poll.register(fd, select.POLLIN)

    def watch_output(self, fd: int, wanted: bool) -> None:
        """``wanted``: wait until ``fd`` can be written to, too."""
        self._poll.modify(fd, select.POLLIN | select.POLLOUT if wanted else select.POLLIN)

    def remove(self, fd: int) -> None:
        """Raises KeyError when ``fd`` was not added."""
        self._poll.unregister(fd)

    def wait(self, seconds: float) -> bool:
        """Wait for any of them, but no longer. Returns whether one is ready. The GIL is free
        meanwhile."""
        return bool(self._poll.poll(seconds * 1000))
