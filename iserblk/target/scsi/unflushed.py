"""Who has to hear of a flush that failed.

The system tells of data that it could not write back once, to whichever flush of the file comes
next, whichever session wrote that data; the flush behind it succeeds. A target has one file for
all of its sessions: so that no I_T nexus takes a flush for good that has lost its writes, each that
has written meanwhile meets the error once, too.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from threading import Lock

from iserblk.target.seam import Nexus, NexusName

MOST_NAMES = 4096  # nexuses that have written since a flush succeeded; later ones are not kept


class Unflushed:
    """Of one LUN. Thread-safe."""

    __slots__ = ("_errno", "_failures", "_last", "_lock", "_untold", "_writers")

    def __init__(self) -> None:
        self._lock = Lock()
        self._writers: set[NexusName] = set()  # since the last flush that succeeded began
        # Who is among them for certain; not the nexus itself, which would keep its connection.
        self._last: NexusName | None = None
        self._untold: set[NexusName] = set()
        self._failures = 0
        self._errno = errno.EIO

    def wrote(self, nexus: Nexus) -> None:
        """To be called when something has been written that a flush has to follow, and before the
        initiator hears of it."""
        if nexus.name is not self._last:
            with self._lock:
                if len(self._writers) < MOST_NAMES:
                    self._writers.add(nexus.name)
                    self._last = nexus.name

    def flush(self, nexus: Nexus, flush: Callable[[], None]) -> None:
        """Call ``flush`` for ``nexus``. Raises its OSError, or one like that which another flush
        has met: now, or since ``nexus`` flushed last."""
        with self._lock:
            # Those who write from here on are kept anew; those before are covered by this flush.
            writers, self._writers = self._writers, set()
            self._last = None
            failures = self._failures
        try:
            flush()
        except OSError as error:
            with self._lock:
                self._writers |= writers
            self.failed(nexus, error)
            raise
        with self._lock:
            if failures == self._failures and nexus.name not in self._untold:
                return
            self._untold.discard(nexus.name)
            raise OSError(self._errno, "another session's flush has failed meanwhile")

    def failed(self, nexus: Nexus, error: OSError) -> None:
        """``nexus`` is told that writing back has failed."""
        with self._lock:
            self._failures += 1
            self._errno = error.errno or errno.EIO
            self._untold |= self._writers
            self._untold.discard(nexus.name)
