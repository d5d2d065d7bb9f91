"""The life of a session: its states and the events between them (RFC 7143 section 8).

``docs/states.md`` shows the table as a diagram. The comments name the standard's states and
transitions: Q and N of a session (section 8.3), S and T of its connection (section 8.1). The loss
of one of several connections is in ``recovery``. Q4 (FAILED) is three states here: what the
initiator does meanwhile differs.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from iserblk.errors import IserblkError
from iserblk.state_tables import step


class State(StrEnum):
    FREE = "free"  # Q1; S4 IN_LOGIN: the login is not over
    LOGGED_IN = "logged in"  # Q3; S5 LOGGED_IN: full feature phase
    # Q3; S7 LOGOUT_REQUESTED: nothing new is sent, commands end; then S6 IN_LOGOUT: the request
    LOGGING_OUT = "logging out"
    # Q4; S8 CLEANUP_WAIT: no connection is left; tasks wait at the target for another
    REINSTATING = "reinstating"
    CLEANING_UP = "cleaning up"  # Q4; S8: the connection is lost; its tasks are being put back
    SUSPENDED = "suspended"  # Q4: no connection; commands wait for the next one
    ENDED = "ended"  # Q1, for good: every task has an error


class Event(StrEnum):
    LOGIN = "login"  # the final Login Response
    LOG_OUT = "log out"  # the target asks for a logout, or the driver's owner does
    LAST = "last connection lost"  # at ErrorRecoveryLevel 2: it is to be reinstated
    REINSTATE = "reinstate"  # a connection has logged in to the session that the target has kept
    LOSS = "loss"  # the connection is over, and is to be replaced
    CLEAN = "clean"  # no buffer is touched any more; what was in flight is queued again
    ADOPT = "adopt"  # the connection of a fresh session takes the place of the lost one
    FAIL = "fail"  # the connection is over, and none will follow


TABLE: dict[tuple[State, Event], State] = {
    (State.FREE, Event.LOGIN): State.LOGGED_IN,  # N1, T5
    (State.LOGGED_IN, Event.LOG_OUT): State.LOGGING_OUT,  # T11, T10 as the target asks; else T9
    (State.LOGGED_IN, Event.LOSS): State.CLEANING_UP,  # N5, T15
    (State.LOGGING_OUT, Event.LOSS): State.CLEANING_UP,  # N3, T13 as answered; else N5, T16 or T17
    (State.LOGGED_IN, Event.LAST): State.REINSTATING,  # N5, T15
    (State.REINSTATING, Event.REINSTATE): State.LOGGED_IN,  # N4: session continuation
    (State.REINSTATING, Event.LOSS): State.CLEANING_UP,  # no continuation: session reinstatement
    (State.CLEANING_UP, Event.CLEAN): State.SUSPENDED,
    (State.SUSPENDED, Event.ADOPT): State.LOGGED_IN,  # N6 of the lost session, N1 of the fresh one
    # T7 in a login, N3 when a logout is answered. Otherwise the target has the session until its
    # own timeout, or until the initiator logs in again (N6).
    (State.FREE, Event.FAIL): State.ENDED,
    (State.LOGGED_IN, Event.FAIL): State.ENDED,
    (State.LOGGING_OUT, Event.FAIL): State.ENDED,
    (State.REINSTATING, Event.FAIL): State.ENDED,
    (State.CLEANING_UP, Event.FAIL): State.ENDED,
    (State.SUSPENDED, Event.FAIL): State.ENDED,
}


class Life:
    """The state of a session. Only the session changes ``state``, by ``enter``. ``portal``: where
    its last connection went; for logs.

    ``connected``: there is a connection, in full feature phase. ``error``: why it has ENDED; None
    before. ``absence``: while there is no connection, the latest known reason; otherwise without
    meaning.

    What the end of a connection means is decided by these: ``leaving``: a logout of the whole
    session was sent, and connections that end are no loss. ``over``: the target has ended the
    session, with all connections. Both last until CLEAN. ``spent``: only a fresh session will do.
    """

    __slots__ = ("_absence", "connected", "error", "leaving", "over", "portal", "spent", "state")

    def __init__(self, portal: str) -> None:
        self.portal = portal
        self.state = State.FREE
        self.connected = False
        self.leaving = False
        self.over = False
        self.spent = False
        self.error: IserblkError | None = None
        # At most one, which is replaced in place: what dies with it, as the memory of an attempt,
        # may let other threads run, and a compiled attribute would still refer to it. (A thread
        # may ask whether a session waits for its target: ``disk.ending.EndOfUse``.)
        self._absence: Final[list[IserblkError]] = []

    @property
    def absence(self) -> IserblkError | None:
        return self._absence[0] if self._absence else None

    def still_absent(self, why: IserblkError) -> None:
        """Note a later reason why there is no connection."""
        self._absence[:] = [why]

    @property
    def absent(self) -> bool:
        """There is no connection, and the session goes on nevertheless."""
        state = self.state
        return state is State.SUSPENDED or state is State.CLEANING_UP or state is State.REINSTATING

    def enter(self, event: Event, why: IserblkError | None = None) -> None:
        """Make the transition of ``event``. ``why``: the error, for LAST, LOSS and FAIL. Raises
        LocalProtocolError where the table has no such transition; then nothing has changed."""
        after = step(TABLE, f"{self.portal}: a session", self.state, event)
        if event is Event.LOSS or event is Event.LAST:
            assert why is not None
            self.still_absent(why)
        elif event is Event.FAIL:
            self.error = why
        elif event is Event.CLEAN:
            self.leaving = self.over = False
        self.connected = after is State.LOGGED_IN or after is State.LOGGING_OUT
        self.state = after  # last: an interrupt before it has changed nothing
