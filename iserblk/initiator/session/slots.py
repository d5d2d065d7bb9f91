"""Task slots and waiters: one SCSI command in flight, and what waits for it."""

from __future__ import annotations

from collections.abc import Generator
from typing import Final, Protocol, TypeVar

from iserblk.datamover.seam import BIDIRECTIONAL, NO_DATA, PduSlot
from iserblk.initiator.session.connection import Connection

NO_BYTES: Final = memoryview(b"")
_LUN_0: Final = bytes(8)

T = TypeVar("T")

# States of a slot.
FREE: Final = 0  # in the session's list
TAKEN: Final = 1  # its caller fills it in, or reads the result
QUEUED: Final = 2  # submitted, and waits for the command window, memory or a connection
SENT: Final = 3  # in flight at the target
ABORTING: Final = 4  # in flight, and an ABORT TASK for it as well

# Initiator Task Tag: slot index in the low bits, a generation above it, so that an answer to a
# task that has ended is not taken for an answer to the next task of its slot. Bit 31 stays 0:
# never 0xFFFFFFFF.
INDEX_BITS: Final = 12
INDEX_MASK: Final = (1 << INDEX_BITS) - 1
ITT_MASK: Final = 0x7FFFFFFF

# ``last`` of a command that is not known to leave any block as it is: behind every block.
ANYTHING: Final = 1 << 60


class Waiter(Protocol):
    """Waits for ``pending`` things at once. Made by a driver; reusable when ``pending`` is 0. One
    that waits for a client of a front-end may have an ``owner``; see ``owner_of``."""

    pending: int

    def task_done(self) -> None:
        """One of them is done: ``pending`` falls by one; at 0 the waiting thread or task is
        woken."""
        ...


def owner_of(waiter: Waiter) -> object:
    """Where commands wait for a slot, or for the command window, those of different owners take
    turns. All waiters that have none share the turns of one owner. For what waits only: it is
    slow."""
    return getattr(waiter, "owner", None)


# A generator that runs commands. It yields what it waits for: a Waiter, or seconds. When it is
# closed at a yield, its driver has made sure that none of its commands is in flight any more.
Operation = Generator["Waiter | float", None, T]


class _Nobody:
    """The waiter of a slot that is not in use."""

    pending = 0

    def task_done(self) -> None:
        pass


NOBODY: Final = _Nobody()


class TaskSlot(PduSlot):
    """One SCSI command: the PDU slot, the request, and after its end the result.

    Request: ``cdb`` (16 bytes), ``lun`` (8-byte LUN field), ``length`` (Expected Data Transfer
    Length), ``flags`` (F, R, W, ATTR of the BHS), ``data`` and ``direction`` (READ or WRITE; the
    session makes it INLINE when the data goes along with its command). BIDIRECTIONAL: ``data`` is
    the Data-Out, of ``length`` bytes, and ``data_in`` the Data-In. ``first``/``last``: the
    blocks of ``lun`` that it may change, for the range lock; none when last < first; ``last`` is
    ANYTHING where what it does is not known. ``deadline``: when it is aborted (monotonic seconds);
    0 until ``submit`` where the caller sets none.

    Result: ``error`` (then nothing else counts), or ``status``, ``response``, ``residual`` (bytes;
    less moved than asked: positive; more: negative), ``sense`` (bytes). BIDIRECTIONAL:
    ``residual`` is of the Data-Out, ``residual_in`` of the Data-In.
    """

    __slots__ = (
        "cdb",
        "cmd_sn",
        "connection",
        "deadline",
        "error",
        "first",
        "flags",
        "itt",
        "last",
        "length",
        "lun",
        "residual",
        "residual_in",
        "response",
        "sense",
        "state",
        "status",
        "waiter",
    )

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.cdb = bytearray(16)
        self.itt = index
        self.cmd_sn = 0
        self.connection: Connection  # that it was sent on last
        self.lun = _LUN_0
        self.length = 0
        self.flags = 0
        self.first = 0
        self.last = -1
        self.state = FREE
        self.status = 0
        self.response = 0
        self.residual = 0
        self.residual_in = 0
        self.sense = b""
        self.error: Exception | None = None
        self.deadline = 0.0
        self.waiter: Waiter = NOBODY

    @property
    def complete(self) -> bool:
        """Whether the slot still has its whole request, so that it can be sent again."""
        return not self.once and self.whole

    @property
    def once(self) -> bool:
        """Whether the command must not be carried out twice: what it does is not known, or it is
        bidirectional, and its Data-In may depend on whether it was carried out before."""
        return self.direction == BIDIRECTIONAL or self.last == ANYTHING

    @property
    def whole(self) -> bool:
        """Whether the slot still has its whole request, bidirectional or not."""
        return self.data is not None or self.direction == NO_DATA or self.data_in is not None
