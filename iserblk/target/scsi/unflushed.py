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
from iserblk.target.store.status import LostError, StatusError, WritebackError

# Of nexuses that have written since the last good flush. Beyond that, the names of those that have
# no session give way to OTHERS: there are always fewer that have one.
MOST_NAMES = 4096
OTHERS = NexusName(TransportId("", b""))  # the name of no nexus: it never has a session


MEANWHILE = "a flush of another session has failed meanwhile; data may be lost"


class Begun:
    """A flush that is under way. ``writers``: whose writes it covers. ``failures``: how many there
    were when it began."""

    __slots__ = ("failures", "writers")

    def __init__(self, writers: set[NexusName], failures: int) -> None:
        self.writers = writers
        self.failures = failures


def always() -> bool:
    return True


def is_not_carried_out(error: OSError) -> bool:
    """Whether a flush was refused for now, by a store that is a LUN itself: nothing is lost."""
    return isinstance(error, StatusError) and error.errno == errno.EBUSY


class Unflushed:
    """The nexuses of one LUN that have written since the last good flush. Thread-safe.

    ``failures``: how often data may have been lost."""

    __slots__ = (
        "_attached",
        "_away",
        "_errno",
        "_heirs",
        "_last",
        "_lock",
        "_telling",
        "_under_way",
        "_untold",
        "_writers",
        "failures",
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
        self._under_way: list[Begun] = []
        self.failures = 0
        self._errno = errno.EIO

    def wrote(self, nexus: Nexus, since: int) -> None:
        """Note a write of ``nexus`` that only a flush makes durable. Call this after the write, and
        before the initiator gets the response. ``since``: ``failures`` before the write."""
        if nexus.name is not self._last:
            with self._lock:
                self._writers.add(nexus.name)
                self._last = nexus.name
                self._bound(self._writers)
        if since != self.failures:  # perhaps a failed flush has met what was not noted yet
            with self._lock:
                self._expect({nexus.name})

    def flush(
        self, nexus: Nexus, flush: Callable[[], None], wanted: Callable[[], bool] = always
    ) -> None:
        """Call ``flush`` for ``nexus``. Raises its OSError; or an OSError with the errno of another
        session's flush that has failed meanwhile, or since the last flush of ``nexus``. ``wanted``:
        whether ``nexus`` still waits for the answer."""
        begun = self.begin()
        error = self.end(nexus, begun, self._try(begun, flush), wanted())
        if error is not None:
            raise error

    def bring(self, flush: Callable[[], None], since: int) -> None:
        """Call ``flush`` for a command that is none: its status tells of the command alone, and
        whether a nexus was told stays as it is. Raises the OSError of ``flush``, or another where
        what was written since there were ``since`` failures may be lost."""
        begun = self.begin()
        error = self.brought(begun, self._try(begun, flush), since)
        if error is not None:
            raise error

    def bring_all(self, nexus: Nexus, flush: Callable[[], None]) -> None:
        """As ``bring``, for a command after which nothing that ``nexus`` has written may be
        missing on the medium. Raises OSError, also for an earlier loss of which it was not told."""
        self.bring(flush, self.failures)
        if nexus.name in self._untold:
            raise WritebackError(self._errno, "data may be lost, as the next flush will tell")

    def _try(self, begun: Begun, flush: Callable[[], None]) -> OSError | None:
        try:
            flush()
        except OSError as problem:
            return problem
        except BaseException:
            with self._lock:
                self._take_back(begun)
            raise
        return None

    def begin(self) -> Begun:
        """A flush begins. The result is for ``end`` or ``brought``."""
        with self._lock:
            # This flush covers the writes up to now. Later writers go into a new set.
            begun = Begun(self._writers, self.failures)
            self._writers = set()
            self._last = None
            self._under_way.append(begun)
            return begun

    def _take_back(self, begun: Begun) -> None:
        """A flush has brought nothing to stable storage for certain."""
        self._under_way.remove(begun)
        self._writers |= begun.writers
        self._bound(self._writers)

    def _note_end(self, begun: Begun, error: OSError | None) -> OSError | None:
        """A flush has ended. Returns its error, as it is to be told."""
        if error is None:
            self._under_way.remove(begun)
            return None
        self._take_back(begun)
        if not is_not_carried_out(error) and not isinstance(error, WritebackError):
            self._fail(error)  # of a WritebackError the store has told
            if not isinstance(error, StatusError):
                return WritebackError(error.errno, error.strerror)
        return error

    def brought(self, begun: Begun, error: OSError | None, since: int) -> OSError | None:
        """As ``end``, for ``bring``."""
        with self._lock:
            error = self._note_end(begun, error)
            if error is None and since != self.failures:
                return WritebackError(self._errno, MEANWHILE)
            return error

    def end(
        self, nexus: Nexus, begun: Begun, error: OSError | None, wanted: bool = True
    ) -> OSError | None:
        """A flush for ``nexus`` has ended, with ``error`` or None. Returns the error of which
        ``nexus`` has to be told, as it will be if it is ``wanted``. A StatusError with EBUSY: it
        was not carried out, and nothing is lost."""
        name = nexus.name
        with self._lock:
            error = self._note_end(begun, error)
            if error is not None:
                if is_not_carried_out(error):
                    return error
                if isinstance(error, LostError) and name not in self._untold:
                    # What others have written was lost; the flush was carried out.
                    if not self._away:
                        return None
                    self._heirs.add(name)
            elif begun.failures == self.failures and name not in self._untold:
                return None
            else:
                error = WritebackError(self._errno, MEANWHILE)
            if wanted:
                self._untold.discard(name)
                self._telling.setdefault(name, []).append(error)
            else:
                self._expect({name})
            return error

    def failed(self, error: OSError) -> None:
        """Note that writing back has failed, perhaps at a write with FUA. The next flush of every
        writer raises, of the one whose write it was, too: the status of a write tells of that write
        alone."""
        with self._lock:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        self.failures += 1
        self._errno = error.errno or errno.EIO
        self._expect(self._writers)
        for begun in self._under_way:
            self._expect(begun.writers)

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
