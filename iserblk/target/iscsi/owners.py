"""What a connection of the target, and its session, tell those that own them.

Three seams: the server asks and is told (``ConnectionOwner``, ``SessionOwner``), and what drives
the connection is told (``ConnectionDriver``). All calls are made in the thread of the connection.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from iserblk.target.iscsi.tasks.slot import TargetTask


class ConnectionDriver(Protocol):
    """Calls ``progress`` of one connection."""

    def output_waits(self) -> None:
        """Output may be waiting, outside of ``progress``."""
        ...

    def unfinished(self) -> None:
        """``progress`` is to be called again soon, behind the other connections. Called inside
        ``progress``, too."""
        ...

    def ended(self) -> None:
        """The connection has ended otherwise than by an error: the initiator has logged out, or has
        reset the target (cold). Perhaps outside of ``progress``."""
        ...


class ConnectionOwner(Protocol):
    """The server of one connection."""

    def login_begun(self) -> None:
        """A Login Request has come."""
        ...

    def hold_attempt(self, user: str, resume: Callable[[], None]) -> bool:
        """Whether an attempt to prove ``user`` (CHAP) has to wait; then ``resume`` is called
        later."""
        ...

    def attempt_ended(self, user: str, right: bool) -> None:
        """``right``: the user was proved."""
        ...

    def take_place(self) -> None:
        """A login is about to end. Raises Busy if there is no place for the connection."""
        ...

    def logged_in(self) -> None:
        """Login is complete."""
        ...

    def offload(self, slot: TargetTask) -> None:
        """Run ``device.run(slot.task, slot.buffer)`` elsewhere, then call ``finish(slot)`` of the
        connection to which the task is allegiant, and ``wake()``."""
        ...

    def end_other_sessions(self) -> None:
        """The last of a TARGET COLD RESET: end all sessions but this."""
        ...

    def recovery_begins(self) -> None:
        """The connection, which is lost, was logged out for recovery: what is kept for it is kept
        as long as for one that has just been lost."""
        ...

    def released(self) -> None:
        """Nothing is kept any more for the connection, which was lost."""
        ...


class SessionOwner(Protocol):
    """The server of one session."""

    def session_over(self) -> None:
        """Nothing is left of the session."""
        ...


class Undriven:
    """In place of a driver until there is one. Implements ConnectionDriver."""

    def output_waits(self) -> None:
        pass

    def unfinished(self) -> None:
        pass

    def ended(self) -> None:
        pass


class Unowned:
    """In place of an owner of a session until there is one. Implements SessionOwner."""

    def session_over(self) -> None:
        pass
