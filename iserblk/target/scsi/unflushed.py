"""Reports a failed flush to every I_T nexus whose writes may be lost.

The kernel reports data that it could not write back only once: to the next flush of the file,
whichever session wrote the data. The flush after that succeeds. All sessions of the target share
one file. So each I_T nexus that has written since the last good flush gets the error once, too;
otherwise its own flush would succeed although its writes are lost.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from threading import Lock

from iserblk.target.seam import Nexus, NexusName

MOST_NAMES = 4096  # of nexuses that have written since the last good flush; more are not kept


Begun = tuple[set[NexusName], int]  # what a flush covers; for the end of the flush


class Unflushed:
    """The nexuses of one LUN that have written since the last good flush. Thread-safe."""

    __slots__ = ("_errno", "_failures", "_last", "_lock", "_untold", "_writers")

    def __init__(self) -> None:
        self._lock = Lock()
        self._writers: set[NexusName] = set()  # since the last good flush began
        # A name that is certainly in ``_writers``. Not the Nexus, which would keep its connection.
        self._last: NexusName | None = None
        self._untold: set[NexusName] = set()
        self._failures = 0
        self._errno = errno.EIO

    def wrote(self, nexus: Nexus) -> None:
        """Note a write of ``nexus`` that only a flush makes durable. Call this after the write, and
        before the initiator gets the response."""
        if nexus.name is not self._last:
            with self._lock:
                if len(self._writers) < MOST_NAMES:
                    self._writers.add(nexus.name)
                    self._last = nexus.name

    def flush(self, nexus: Nexus, flush: Callable[[], None]) -> None:
        """Call ``flush`` for ``nexus``. Raises its OSError; or an OSError with the errno of another
        session's flush that has failed meanwhile, or since the last flush of ``nexus``."""
        begun = self.begin()
        error: OSError | None = None
        try:
            flush()
        except OSError as problem:
            error = problem
        error = self.end(nexus, begun, error)
        if error is not None:
            raise error

    def begin(self) -> Begun:
        """A flush begins. The result is for ``end``."""
        with self._lock:
            # This flush covers the writes up to now. Later writers go into a new set.
            writers, self._writers = self._writers, set()
            self._last = None
            return writers, self._failures

    def end(self, nexus: Nexus, begun: Begun, error: OSError | None) -> OSError | None:
        """A flush for ``nexus`` has ended, with ``error`` or None. Returns the error of which
        ``nexus`` has to be told. EBUSY: it was not carried out, and nothing is lost."""
        writers, failures = begun
        if error is not None:
            with self._lock:
                self._writers |= writers
            if error.errno != errno.EBUSY:
                self.failed(nexus, error)
            return error
        with self._lock:
            if failures == self._failures and nexus.name not in self._untold:
                return None
            self._untold.discard(nexus.name)
            return OSError(
                self._errno, "a flush of another session has failed meanwhile; data may be lost"
            )

    def failed(self, nexus: Nexus, error: OSError) -> None:
        """Note that writing back has failed: the caller tells ``nexus``, and the next flush of
        every other writer raises."""
        with self._lock:
            self._failures += 1
            self._errno = error.errno or errno.EIO
            self._untold |= self._writers
            self._untold.discard(nexus.name)
