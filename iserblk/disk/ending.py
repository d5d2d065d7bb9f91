"""The end of the use of LUNs: how long their targets are waited for, and what is said of what was
not flushed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol

from iserblk.errors import ConnectionLost, IserblkError
from iserblk.initiator.session.session import Session
from iserblk.loop.clock import monotonic

SILENT_S = 2.0
"""After so long without a word, and with commands under way, a target counts as one that may be
away."""

LONGEST_S = 240.0
"""A process that is told to end waits no longer for a target that answers, but not to the point.
Units of systemd have 300 seconds (``TimeoutStopSec``)."""


Caller = Callable[[Callable[[], object]], None]
"""Calls a function in another thread."""


class EndOfUse:
    """The sessions of one process, whose end is asked for together. For their own thread; where
    ``call`` calls a function in that, for any."""

    def __init__(
        self,
        sessions: Sequence[Session] = (),
        call: Callable[[Callable[[], object]], None] | None = None,
    ) -> None:
        self._sessions = sessions
        self._call = call
        self._asked = False

    def by(self, call: Caller) -> EndOfUse:
        """The same for other threads."""
        return EndOfUse(self._sessions, call)

    def _each(self, do: Callable[[Session], object]) -> None:
        for session in self._sessions:
            if self._call is None:
                do(session)
            else:
                self._call(partial(do, session))

    def waits(self) -> bool:
        """Whether requests may be waiting for a target that is away, so that it matters whether the
        end is wished for; also while it was asked for, as the wish may be withdrawn when the target
        is there again."""
        if self._asked:
            return True
        now = monotonic()
        return any(_may_be_away(session, now) for session in self._sessions)

    def ask(self, wanted: bool = True) -> None:
        """The end is wanted: what waits for a target that is away fails after a while (module
        ``iserblk.initiator.session.ending``). ``wanted`` False: it is not wanted any more."""
        if wanted is self._asked:
            return
        self._asked = wanted
        now = monotonic()
        self._each(lambda session: session.ending.ask(now) if wanted else session.ending.withdraw())

    def given_up(self) -> bool:
        """Whether a target is not waited for any more, as the end was asked for."""
        return any(session.gives_up for session in self._sessions)

    def give_up(self) -> None:
        """End all sessions now: what is under way fails, and nothing is flushed any more."""
        self._each(
            lambda session: session.fail(ConnectionLost(f"{session.portal}: given up by force"))
        )

    def disconnect(self) -> None:
        """Cut all connections, which are made again, without another word to the targets."""
        self._each(lambda session: session.disconnect())


def _may_be_away(session: Session, now: float) -> bool:
    if session.error is not None:
        return False
    if session.suspended is not None:
        return True
    return session.queue.in_flight > 0 and now - session.last_heard > SILENT_S


class NotFlushed(IserblkError):
    """What was acknowledged may be lost, or a client has not heard that it is. ``unflushed``:
    bytes, where that is known."""

    def __init__(self, text: str, unflushed: int | None = None) -> None:
        super().__init__(text)
        self.unflushed = unflushed


class Unflushed(Protocol):
    """A disk, of either face."""

    @property
    def unflushed(self) -> int | None: ...


def all_unflushed(disks: Iterable[Unflushed]) -> int | None:
    """Bytes; None: not known of each."""
    counts = [disk.unflushed for disk in disks]
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def last_flush_failed(name: str, disk: Unflushed, error: IserblkError) -> str:
    """One line for the log, or for stderr. ``name``: of the LUN. No number where it is 0: what was
    trimmed, or a write that was not answered, is not counted."""
    count = disk.unflushed
    what = f"{count} unflushed bytes: " if count else ""
    return f"{name}: the last flush failed, data may be lost: {what}{error}"


def not_flushed(name: str, disk: Unflushed) -> str:
    """The same, where no flush was tried."""
    count = disk.unflushed
    what = f"{count} bytes" if count else "what was"
    return f"{name}: not flushed: {what} written since the last flush may be lost"
