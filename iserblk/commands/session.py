"""The initiator as its commands see it: what runs commands, and the LUNs, need of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from iserblk.commands.command import Command, Operation, Waiter
from iserblk.commands.listeners import LunListeners
from iserblk.errors import IserblkError

T = TypeVar("T")


class Place(Protocol):
    """Where a command stood in the order in which the target got commands."""

    def may_overtake(self, command: Command) -> bool:
        """Whether its answer may have come before that of ``command``, which is in flight, though
        the target has given it later."""
        ...


class CommandQueue(Protocol):
    """The commands of a session. See SendQueue for iSCSI's."""

    @property
    def tasks(self) -> Sequence[Command]:
        """All of them, for good, each at its ``index``."""
        ...

    def take(self, waiter: Waiter) -> Command | None:
        """A free command. None: ``waiter.pending`` was raised by one; wait and try again. Callers
        that wait have commands in the order in which they came, but owners take turns. Raises the
        session's error once it has failed."""
        ...

    def take_now(self) -> Command | None:
        """A free command if there is one, no caller waits for one, and the session has not
        ended."""
        ...

    def submit(self, command: Command) -> None:
        """Send the command, or queue it while it cannot be sent. ``pending`` of its waiter already
        counts it. Never raises: what is wrong is the command's ``error``."""
        ...

    def release(self, command: Command) -> None:
        """Give back a command that was taken and is not in flight."""
        ...

    def shrink(self) -> None:
        """The target had no room for a command, which has been given back: have one less in flight
        from now on."""
        ...

    def place(self, command: Command) -> Place:
        """Of a command that has ended, and is not given back yet."""
        ...

    def doubt(self, lun: bytes) -> Sequence[Command]:
        """Send no command to ``lun`` from now on, but for those that tell what it is. Returns those
        that were queued, for ``refuse``."""
        ...

    def refuse(self, commands: Sequence[Command]) -> None:
        """End the commands that ``doubt`` returned with InDoubt."""
        ...

    def believe(self, lun: bytes) -> None:
        """Send commands to ``lun`` again."""
        ...


class CommandSession(Protocol):
    """A session with a target. See Session for iSCSI's."""

    @property
    def queue(self) -> CommandQueue: ...

    @property
    def listeners(self) -> LunListeners: ...

    @property
    def io_timeout(self) -> float: ...

    @property
    def command_timeout(self) -> float: ...

    @property
    def patience(self) -> float: ...

    def extended(self, deadline: float) -> float: ...

    @property
    def portal(self) -> str: ...

    @property
    def error(self) -> IserblkError | None: ...

    @property
    def suspended(self) -> IserblkError | None: ...

    @property
    def gives_up(self) -> bool: ...

    @property
    def can_reconnect(self) -> bool: ...

    @property
    def suspended_at(self) -> float: ...

    def new_waiter(self) -> Waiter: ...

    def describe(self) -> dict[str, object]: ...

    def disconnect(self) -> None: ...


class CommandDriver(Protocol):
    """What waits for the commands of a session, in tasks and strands of trio. See TrioDriver for
    iSCSI's."""

    @property
    def session(self) -> CommandSession: ...

    def check_here(self) -> None:
        """Raises LocalProtocolError in another thread than that of its loop."""
        ...

    def new_waiter(self) -> Waiter:
        """A waiter for this task; in a strand, with its owner. Raises as ``check_here``."""
        ...

    async def wait(self, waiter: Waiter) -> None:
        """Wait until ``pending`` is 0, of a waiter of this driver. If the task is cancelled, or its
        strand closed, the commands are aborted; their buffers are free when it raises."""
        ...

    async def run_operation(self, operation: Operation[T]) -> T:
        """Run ``operation`` to its end; returns its result."""
        ...

    def abandon(self, mine: Callable[[Waiter], bool]) -> int:
        """Begin to abort at the target the commands whose waiter is ``mine``; returns how many.
        Their waiters are told when they have ended: only then their buffers are free."""
        ...

    def begin_batch(self) -> bool:
        """Have commands that are submitted from now on leave together, at ``end_batch``. Returns
        its argument."""
        ...

    def end_batch(self, held: bool) -> None: ...
