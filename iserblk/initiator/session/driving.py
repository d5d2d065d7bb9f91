"""What a session needs of the driver that runs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from iserblk.initiator.session.slots import Waiter

TICK_S = 1.0  # how often a driver has deadlines and the keep-alive looked at
LOGOUT_S = 3.0  # that the answer to a logout is waited for


class SessionDriver(Protocol):
    """Runs ``Session.progress`` and the ticks of its deadlines, and waits for commands.

    ``reconnect``: asks for another connection; from any thread. It is called when the connection is
    lost, and when a command is submitted while there is none. None: a session whose connection is
    lost has ended.
    """

    reconnect: Callable[[], None] | None

    def new_waiter(self) -> Waiter:
        """For the thread or task that calls."""
        ...

    def flush_soon(self) -> None:
        """A command is to leave: flush the queue, now or together with the next few."""
        ...

    def blocked(self) -> None:
        """The socket is full: run ``progress`` when it is writable."""
        ...

    def closing(self, fd: int) -> None:
        """This descriptor, which is polled, is about to be closed."""
        ...

    def changed(self) -> None:
        """The session is about to go on with another descriptor, or has ended."""
        ...


class Undriven:
    """Implements SessionDriver for a session that nothing runs: between its login and its driver,
    and once its connection was given away."""

    reconnect: Callable[[], None] | None = None

    def __init__(self, flush: Callable[[], None]) -> None:
        self.flush_soon = flush

    def new_waiter(self) -> Waiter:
        raise AssertionError("the session has no driver")

    def blocked(self) -> None:
        """The driver to come looks."""

    def closing(self, fd: int) -> None:
        """Nothing polls it."""

    def changed(self) -> None:
        """The driver to come looks."""
