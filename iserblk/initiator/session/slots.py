"""Task slots: one SCSI command in flight, as iSCSI sends it."""

from __future__ import annotations

from typing import Final

from iserblk.commands.command import FREE, LUN_0, NOBODY, Command
from iserblk.datamover.seam import PduSlot
from iserblk.initiator.session.connection import Connection
from iserblk.scsi.tasks import SIMPLE

# Initiator Task Tag: slot index in the low bits, a generation above it, so that an answer to a
# task that has ended is not taken for an answer to the next task of its slot. Bit 31 stays 0:
# never 0xFFFFFFFF.
INDEX_BITS: Final = 12
INDEX_MASK: Final = (1 << INDEX_BITS) - 1
ITT_MASK: Final = 0x7FFFFFFF


class TaskSlot(PduSlot, Command):
    """A command and its PDU slot. Control PDUs have slots of their own, whose command is not used.

    ``length`` is the Expected Data Transfer Length. The session makes ``direction`` INLINE when the
    data goes along with its command. QUEUED: it waits for the command window, memory or a
    connection. ABORTING: there is an ABORT TASK for it. ``connection``: that it was sent on last.
    ``response``: the iSCSI response code.
    """

    __slots__ = (
        "attribute",
        "begun",
        "cdb",
        "cmd_sn",
        "connection",
        "deadline",
        "error",
        "first",
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

    connection: Connection
    deadline: float

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.cdb = bytearray(16)
        self.itt = index
        self.cmd_sn = 0
        self.lun = LUN_0
        self.length = 0
        self.attribute = SIMPLE
        self.first = 0
        self.last = -1
        self.begun = 0
        self.state = FREE
        self.status = 0
        self.response = 0
        self.residual = 0
        self.residual_in = 0
        self.sense = b""
        self.error = None
        self.deadline = 0.0
        self.waiter = NOBODY

    @property
    def tag(self) -> int:
        return self.itt
