"""One SCSI command in flight, as a disk sees it, and what waits for it.

An initiator derives from Command what it sends (iSCSI: ``TaskSlot``). The commands of a session are
a list that stays: they are taken, filled in, submitted and given back, and never made anew.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator
from typing import Final, Protocol, TypeVar

from mypy_extensions import trait

from iserblk.errors import CommandTimeout, ScsiError
from iserblk.scsi.tasks import BIDIRECTIONAL, NO_DATA, SIMPLE

NO_BYTES: Final = memoryview(b"")
LUN_0: Final = bytes(8)
# (A literal would have mypy refuse the attributes that a trait only declares.)
_NO_SLOTS: Final[tuple[str, ...]] = ()

T = TypeVar("T")

# States of a command.
FREE: Final = 0  # in the session's list
TAKEN: Final = 1  # its caller fills it in, or reads the result
QUEUED: Final = 2  # submitted, and waits to be sent
SENT: Final = 3  # in flight at the target
ABORTING: Final = 4  # in flight, and the target was asked to abort it

# ``last`` of a command that is not known to leave any block as it is: behind every block.
ANYTHING: Final = 1 << 60


class InDoubt(ScsiError):
    """The command was not sent: another LUN may have the number. What submits it has the LUN
    compared (``LunListeners.reassure``), and tries again."""


class Unanswered(CommandTimeout):
    """The target left the command unanswered for too long; it was aborted. It may have been carried
    out, and may be sent again: its request has time left."""


class EndedByReset(ScsiError):
    """A LOGICAL UNIT RESET of this session has ended the command, as TASK ABORTED: the target left
    another command, and its abort, unanswered. It may have been carried out, and may be sent
    again."""


class Waiter(Protocol):
    """Waits for ``pending`` things at once. Made by a driver; reusable when ``pending`` is 0. One
    that waits for a client of a front-end may have an ``owner``; see ``owner_of``."""

    pending: int

    def task_done(self) -> None:
        """One of them is done: ``pending`` falls by one; at 0 the waiting thread or task is
        woken."""
        ...


def owner_of(waiter: Waiter) -> object:
    """Where commands wait to be taken or sent, those of different owners take turns. All waiters
    that have none share the turns of one owner. For what waits only: it is slow."""
    return getattr(waiter, "owner", None)


# A generator that runs commands. It yields what it waits for: a Waiter, or seconds. When it is
# closed at a yield, its driver has made sure that none of its commands is in flight any more.
Operation = Generator["Waiter | float", None, T]


class _Nobody:
    """The waiter of a command that is not in use."""

    pending = 0

    def task_done(self) -> None:
        pass


NOBODY: Final = _Nobody()


@trait
class Command:
    """One SCSI command: the request, and after its end the result. ``index``: its place in the
    session's list.

    Request: ``cdb`` (16 bytes), ``lun`` (8-byte LUN field), ``length`` (bytes of data),
    ``attribute`` (of ``iserblk.scsi.tasks``), ``data`` and ``direction`` (READ or WRITE; the
    initiator may change it while the command is in flight). BIDIRECTIONAL: ``data`` is the
    Data-Out, of ``length`` bytes, and ``data_in`` the Data-In. ``first``/``last``: the blocks of
    ``lun`` that it may change, for the range lock; none when last < first; ``last`` is ANYTHING
    where what it does is not known. ``deadline``: when it is aborted (monotonic seconds); 0 until
    ``submit`` where the caller sets none; ``begun`` then is when that was (in nanoseconds).
    ``waiter`` is told of its end.

    Result: ``error`` (then nothing else counts), or ``status``, ``response`` (0, unless the target
    has no status to tell), ``residual`` (bytes; less moved than asked: positive; more: negative),
    ``sense`` (bytes). BIDIRECTIONAL: ``residual`` is of the Data-Out, ``residual_in`` of the
    Data-In.

    ``state``: one of the states above, which the initiator keeps. At its end the command is TAKEN.

    (A trait: the compiler finds attributes by their place in each class. It can do that with no
    float, so ``deadline`` is a property here, and an attribute of what is derived.)
    """

    __slots__ = _NO_SLOTS

    index: int
    state: int
    cdb: bytearray
    lun: bytes
    length: int
    attribute: int
    data: memoryview | None
    data_in: memoryview | None
    direction: int
    first: int
    last: int
    begun: int
    waiter: Waiter
    status: int
    response: int
    residual: int
    residual_in: int
    sense: bytes
    error: Exception | None

    @property
    @abstractmethod
    def deadline(self) -> float:
        """See above."""

    @deadline.setter
    def deadline(self, deadline: float) -> None:
        # (The compiler takes no abstract setter.)
        raise AttributeError("a class of commands has a deadline of its own")

    @property
    @abstractmethod
    def tag(self) -> int:
        """Another number each time that a new task is begun for the command. So long as it is the
        same, nothing was sent since."""

    @property
    def once(self) -> bool:
        """Whether the command must not be carried out twice: what it does is not known, or it is
        bidirectional, and its Data-In may depend on whether it was carried out before."""
        return self.direction == BIDIRECTIONAL or self.last == ANYTHING

    @property
    def whole(self) -> bool:
        """Whether the command still has its whole request, bidirectional or not."""
        return self.data is not None or self.direction == NO_DATA or self.data_in is not None

    @property
    def complete(self) -> bool:
        """Whether it may be sent again: it still has its whole request, and is none of ``once``."""
        return not self.once and self.whole


class PlainCommand(Command):
    """A command of an initiator that keeps nothing of its own in it."""

    __slots__ = (
        "attribute",
        "begun",
        "cdb",
        "data",
        "data_in",
        "deadline",
        "direction",
        "error",
        "first",
        "index",
        "last",
        "length",
        "lun",
        "residual",
        "residual_in",
        "response",
        "sense",
        "state",
        "status",
        "tag",
        "waiter",
    )

    deadline: float
    tag: int

    def __init__(self, index: int) -> None:
        self.index = index
        self.state = FREE
        self.cdb = bytearray(16)
        self.lun = LUN_0
        self.length = 0
        self.attribute = SIMPLE
        self.data = None
        self.data_in = None
        self.direction = NO_DATA
        self.first = 0
        self.last = -1
        self.begun = 0
        self.waiter = NOBODY
        self.status = 0
        self.response = 0
        self.residual = 0
        self.residual_in = 0
        self.sense = b""
        self.error = None
        self.deadline = 0.0
        self.tag = 0
