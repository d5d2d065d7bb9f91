"""One command at the target, and the sequence numbers of its session."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from iserblk.datamover.seam import TargetSlot
from iserblk.errors import RemoteProtocolError
from iserblk.iscsi import bhs, pdu
from iserblk.iscsi.serial import serial_lt
from iserblk.target.seam import DATA_IN, ScsiTask

# What a task is doing.
IDLE: Final = 0
DEFERRED: Final = 1  # waits for buffer space, or for the old session that its session reinstates
FETCHING: Final = 2  # get_data is under way
RUNNING: Final = 3  # in a thread
ENDED: Final = 4  # response queued
UNSOLICITED: Final = 5  # unsolicited data is on its way
DORMANT: Final = 6  # waits for other tasks of its LUN

# The ``turn`` of a task.
AT_ONCE: Final = 0  # it never waited
WAITS: Final = 1  # it is dormant, though its state may be UNSOLICITED
HAS_COME: Final = 2  # it was dormant

_MASK: Final = 0xFFFFFFFF


class TargetTask(TargetSlot):
    """One SCSI command at the target, with the slot of its response."""

    __slots__ = (
        "aborted",
        "advertised_from",
        "arrived",
        "buffer",
        "control",
        "data_sn",
        "edtl",
        "fetching",
        "filled",
        "flags",
        "immediate",
        "itt",
        "lun",
        "on_aborted",
        "on_ended",
        "overflow",
        "read_length",
        "state",
        "task",
        "turn",
    )

    def __init__(self, index: int, control: bool = False) -> None:
        """``control``: the slot is for an answer to a PDU that is no SCSI command."""
        super().__init__(index)
        self.control = control
        self.itt = bhs.NO_TAG
        self.lun = 0
        self.edtl = 0
        self.overflow = 0  # bytes of Data-Out that the command asks for beyond EDTL
        self.read_length = 0  # of a bidirectional command: bytes of Data-In that it expects
        self.immediate = 0  # the I bit of the command; if set, it used up no CmdSN
        self.filled = 0  # bytes of Data-Out that are in the buffer
        self.arrived = 0  # bytes of unsolicited Data-Out that have come
        self.data_sn = 0  # of the next unsolicited Data-Out
        self.fetching = 0  # bytes that get_data is fetching; they follow the ``filled`` bytes
        self.advertised_from = 0  # the byte of Data-Out that the Write Base Offset names
        self.flags = 0
        self.task: ScsiTask
        self.buffer: memoryview | None = None
        self.state = IDLE
        self.turn = AT_ONCE  # in the task set of its LUN
        self.aborted = False
        self.on_aborted: list[Callable[[], None]] = []
        self.on_ended: list[Callable[[], None]] = []  # called when its thread has finished

    def check_data_out(self, data_out: pdu.DataOut) -> None:
        """Raises RemoteProtocolError unless ``data_out`` is the next of the unsolicited data."""
        if data_out.data_sn != self.data_sn or data_out.buffer_offset != self.arrived:
            raise RemoteProtocolError(
                "iSCSI",
                f"Data-Out {data_out.data_sn} at {data_out.buffer_offset}, expected "
                f"{self.data_sn} at {self.arrived}",
            )


class Numbers:
    """StatSN, ExpCmdSN and MaxCmdSN of a session with one connection (RFC 7143 section 4.2.2).

    The window is as wide as the queue is deep: it moves on by one with each command that ends.
    """

    __slots__ = ("_given_up", "exp_cmd_sn", "max_cmd_sn", "stat_sn")

    def __init__(self) -> None:
        self._given_up: set[int] = set()  # CmdSNs that never came, and count as received
        self.stat_sn = 0
        self.exp_cmd_sn = 0
        self.max_cmd_sn = 0

    def is_next(self, first: int, cmd_sn: int) -> bool:
        """Whether ``accept`` would accept this PDU; nothing changes. For PDUs that may be rejected:
        a rejected PDU does not count as received, and its number comes again (7.3)."""
        return bool(first & bhs.IMMEDIATE) or (
            cmd_sn == self.exp_cmd_sn and not serial_lt(self.max_cmd_sn, cmd_sn)
        )

    def accept(self, first: int, cmd_sn: int) -> bool:
        """Count the PDU whose byte 0 is ``first``; False: ignore it. On one connection commands
        come in order, so any other number is a duplicate or outside of the window (4.2.2.1)."""
        if first & bhs.IMMEDIATE:
            return True
        if cmd_sn != self.exp_cmd_sn or serial_lt(self.max_cmd_sn, cmd_sn):
            return False
        self.exp_cmd_sn = (cmd_sn + 1) & _MASK
        if self._given_up:
            self._skip()
        return True

    def give_up(self, ref_cmd_sn: int, cmd_sn: int) -> bool:
        """Handle an ABORT TASK (with ``cmd_sn``) of an unknown command, ``ref_cmd_sn``. True: the
        command never came, and now counts as received; otherwise the target would accept no
        command after it (11.6.1 b)."""
        if (
            serial_lt(ref_cmd_sn, self.exp_cmd_sn)
            or serial_lt(self.max_cmd_sn, ref_cmd_sn)
            or not serial_lt(ref_cmd_sn, cmd_sn)
        ):
            return False
        self._given_up.add(ref_cmd_sn)
        self._skip()
        return True

    def _skip(self) -> None:
        while self.exp_cmd_sn in self._given_up:
            self._given_up.remove(self.exp_cmd_sn)
            self.exp_cmd_sn = (self.exp_cmd_sn + 1) & _MASK
            self.max_cmd_sn = (self.max_cmd_sn + 1) & _MASK

    def ended(self, immediate: int) -> None:
        """Open the window by one: a PDU that ``accept`` took has ended. A PDU with the I bit
        (``immediate``) does not move the window."""
        if not immediate:
            self.max_cmd_sn = (self.max_cmd_sn + 1) & _MASK

    def take_stat_sn(self) -> int:
        stat_sn = self.stat_sn
        self.stat_sn = (stat_sn + 1) & _MASK
        return stat_sn


def pack_response(slot: TargetTask, moved: int, numbers: Numbers) -> None:
    """Fill in the SCSI Response of ``slot``, with sense data; it takes a StatSN. ``moved``: bytes
    that the command took or has to give, whatever EDTL is; of a bidirectional command, took."""
    task = slot.task
    residual = slot.edtl - moved
    flags = bhs.FLAG_FINAL
    if slot.overflow:
        flags |= bhs.RESIDUAL_OVERFLOW
        residual = slot.overflow
    elif residual > 0:
        flags |= bhs.RESIDUAL_UNDERFLOW
    elif residual < 0:
        flags |= bhs.RESIDUAL_OVERFLOW
        residual = -residual
    bidi_residual = 0
    if slot.flags & bhs.FLAGS_BIDIRECTIONAL == bhs.FLAGS_BIDIRECTIONAL:
        given = task.transferred if task.direction & DATA_IN else 0
        bidi_residual = slot.read_length - given
        if bidi_residual > 0:
            flags |= bhs.BIDI_UNDERFLOW
        elif bidi_residual < 0:
            flags |= bhs.BIDI_OVERFLOW
            bidi_residual = -bidi_residual
    sense = task.sense
    if sense:
        slot.inline[:2] = len(sense).to_bytes(2, "big")
        slot.inline[2 : 2 + len(sense)] = sense
        slot.inline_length = 2 + len(sense)
    else:
        slot.inline_length = 0
    bhs.SCSI_RESPONSE_FIELDS.pack_into(
        slot.bhs,
        0,
        bhs.SCSI_RESPONSE,
        flags,
        0,
        task.status,
        slot.inline_length,
        slot.itt,
        0,
        numbers.take_stat_sn(),
        numbers.exp_cmd_sn,
        numbers.max_cmd_sn,
        0,
        bidi_residual,
        residual,
    )
