"""Reports a failed flush to every I_T nexus whose writes may be lost.

The kernel reports data that it could not write back only once: to the next flush of the file,
whichever session wrote the data. The flush after that succeeds. All sessions of the target share
one file. So each I_T nexus that has written since the last good flush gets the error once, too;
otherwise its own flush would succeed although its writes are lost. A gateway, which is one client
of a LUN of another target, hands on losses of that LUN in the same way.

A nexus is told when the status of its flush was sent, and by no other status. (Not when it is
acknowledged: an initiator may answer such a status by a new session, at once.) Where the session
ends before, or the flush was aborted, the nexus is not told: it is the same one when the initiator
logs in again. If it does not, every nexus that logs in later gets the error, until one of these
has.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from threading import Lock

from iserblk.scsi.reservations import TransportId
from iserblk.target.seam import Nexus, NexusName
from iserblk.target.store.status import LostError

# Of nexuses that have written since the last good flush. Beyond that, the names of those that have
# no session give way to OTHERS: there are always fewer that have one.
MOST_NAMES = 4096
OTHERS = NexusName(TransportId("", b""))  # the name of no nexus: it never has a session


Begun = tuple[set[NexusName], int]  # what a flush covers; for the end of the flush


def always() -> bool:
    return True


class Unflushed:
    """The nexuses of one LUN that have written since the last good flush. Thread-safe."""

    __slots__ = (
        "_attached",
        "_away",
        "_errno",
        "_failures",
        "_heirs",
        "_last",
        "_lock",
        "_telling",
        "_untold",
        "_writers",
    )

    def __init__(self) -> None:
        self._lock = Lock()
        self._writers: set[NexusName] = set()  # since the last good flush began
        # A name that is certainly in ``_writers``. Not the Nexus, which would keep its connection.
        self._last: NexusName | None = None
        self._untold: set[NexusName] = set()
        # What each is told of, while the status that tells of it has not been sent yet.
        self._telling: dict[NexusName, list[OSError]] = {}
        self._attached: set[NexusName] = set()  # those that have a session
        self._away: set[NexusName] = set()  # untold, and without one
        self._heirs: set[NexusName] = set()  # who hears in place of these
        self._failures = 0
        self._errno = errno.EIO

    def wrote(self, nexus: Nexus) -> None:
        """Note a write of ``nexus`` that only a flush makes durable. Call this after the write, and
        before the initiator gets the response."""
        if nexus.name is not self._last:
            with self._lock:
                self._writers.add(nexus.name)
                self._last = nexus.name
                self._bound(self._writers)

    def flush(
        self, nexus: Nexus, flush: Callable[[], None], wanted: Callable[[], bool] = always
    ) -> None:
        """Call ``flush`` for ``nexus``. Raises its OSError; or an OSError with the errno of another
        session's flush that has failed meanwhile, or since the last flush of ``nexus``. ``wanted``:
        whether ``nexus`` still waits for the answer."""
        begun = self.begin()
        error: OSError | None = None
        try:
            flush()
        except OSError as problem:
            error = problem
        error = self.end(nexus, begun, error, wanted())
        if error is not None:
            raise error

    def begin(self) -> Begun:
        """A flush begins. The result is for ``end``."""
        with self._lock:
            # This flush covers the writes up to now. Later writers go into a new set.
            writers, self._writers = self._writers, set()
            self._last = None
            return writers, self._failures

    def end(
        self, nexus: Nexus, begun: Begun, error: OSError | None, wanted: bool = True
    ) -> OSError | None:
        """A flush for ``nexus`` has ended, with ``error`` or None. Returns the error of which
        ``nexus`` has to be told, as it will be if it is ``wanted``. EBUSY: it was not carried out,
        and nothing is lost."""
        writers, failures = begun
        name = nexus.name
        with self._lock:
            if error is not None:
                self._writers |= writers
                if error.errno == errno.EBUSY:
                    return error
                self._fail(error)
                if isinstance(error, LostError) and name not in self._untold:
                    # What others have written was lost; the flush was carried out.
                    if not self._away:
                        return None
                    self._heirs.add(name)
            elif failures == self._failures and name not in self._untold:
                return None
            else:
                if failures != self._failures:
                    self._expect(writers)  # the flush that has failed did not know of them
                error = OSError(
                    self._errno, "a flush of another session has failed meanwhile; data may be lost"
                )
            if wanted:
                self._untold.discard(name)
                self._telling.setdefault(name, []).append(error)
            else:
                self._expect({name})
            return error

    def failed(self, error: OSError) -> None:
        """Note that writing back has failed at a write with FUA. The next flush of every writer
        raises, of the one whose write it was, too: the status of a write tells of that write
        alone."""
        with self._lock:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        self._failures += 1
        self._errno = error.errno or errno.EIO
        self._expect(self._writers)

    def _expect(self, names: set[NexusName]) -> None:
        self._untold |= names
        self._away |= names - self._attached
        if len(self._untold) > MOST_NAMES:
            self._bound(self._untold)
            self._away = self._untold - self._attached

    def _bound(self, names: set[NexusName]) -> None:
        """Where there are too many names, keep those that have a session, and one for all others:
        nexuses that come and go do not take the place of one that stays. For the others a nexus
        that logs in later is told."""
        if len(names) > MOST_NAMES:
            names &= self._attached
            names.add(OTHERS)

    # -- who has heard ----------------------------------------------------------------------------

    def answered(self, nexus: Nexus, error: OSError) -> None:
        """A command of ``nexus`` was answered with the status that tells of ``error``."""
        if nexus.name not in self._telling:
            return
        with self._lock:
            telling = self._telling.get(nexus.name, [])
            left = [each for each in telling if each is not error]
            if len(left) < len(telling):
                self._telling[nexus.name] = left
                if not left:
                    del self._telling[nexus.name]
                if nexus.name in self._heirs:
                    self._heirs.clear()
                    self._away.clear()

    def attach(self, nexus: Nexus) -> None:
        """A session has begun."""
        with self._lock:
            self._attached.add(nexus.name)
            if nexus.name in self._away:
                self._away.discard(nexus.name)
            elif self._away:
                self._heirs.add(nexus.name)
                if len(self._heirs) > MOST_NAMES:
                    self._heirs &= self._attached
                self._expect({nexus.name})

    def detach(self, nexus: Nexus) -> None:
        """A session has ended."""
        name = nexus.name
        with self._lock:
            self._attached.discard(name)
            if name in self._telling:
                del self._telling[name]
                self._expect({name})
            if name in self._untold:
                self._away.add(name)

    @property
    def owed(self) -> bool:
        """A nexus whose session has ended was not told of a failure, nor a later one in its
        place."""
        return bool(self._away)
