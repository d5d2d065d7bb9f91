"""What a session needs of the driver that runs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from iserblk.commands.command import Waiter

TICK_S = 1.0  # between two ticks of a driver, for deadlines and the keep-alive
STALLED_S = 2.0  # a tick that is later than this shows that the process did not run
GATHER_COMMANDS: Final = 8  # of a batch at most, that are sent at once
LOGOUT_S = 3.0  # how long a driver waits for the answer to a logout


class SessionDriver(Protocol):
    """Runs ``Session.progress`` and the ticks of its deadlines, and waits for commands.

    ``reconnect``: asks for another connection. Called when the connection is lost,
    and when a command is submitted while there is none. None: a lost connection ends the session.
    """

    reconnect: Callable[[], None] | None

    def new_waiter(self) -> Waiter:
        """A waiter for the calling thread or task."""
        ...

    def flush_soon(self) -> None:
        """A command is ready to be sent: flush the queue, now or together with the next few."""
        ...

    def blocked(self) -> None:
        """The socket is full: run ``progress`` when it is writable."""
        ...

    def closing(self, fd: int) -> None:
        """The descriptor ``fd``, which is polled, is about to be closed."""
        ...

    def changed(self) -> None:
        """The session is about to go on with another descriptor, or has ended."""
        ...

    def again(self) -> None:
        """Called inside ``progress``: run it again soon, though no descriptor may be ready, but let
        other sessions of the same loop, and the tasks that were woken, go first."""
        ...


class Undriven:
    """Implements SessionDriver for a session that no driver runs: between its login and its driver,
    and once its connection was given away."""

    reconnect: Callable[[], None] | None = None

    def __init__(self, flush: Callable[[], None]) -> None:
        self.flush_soon = flush

    def new_waiter(self) -> Waiter:
        raise AssertionError("the session has no driver")

    def blocked(self) -> None:
        """The next driver checks by itself."""

    def closing(self, fd: int) -> None:
        """No driver polls it."""

    def changed(self) -> None:
        """The next driver checks by itself."""

    def again(self) -> None:
        """Whoever runs ``progress`` without a driver does so in a loop."""
