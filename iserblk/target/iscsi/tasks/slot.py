"""One command at the target, and its response."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from iserblk.datamover.seam import TargetSlot
from iserblk.errors import RemoteProtocolError
from iserblk.iscsi import bhs, pdu
from iserblk.scsi import status as sam
from iserblk.target.iscsi.numbers import Numbers
from iserblk.target.seam import DATA_IN, ScsiTask

# What a task is doing.
IDLE: Final = 0
DEFERRED: Final = 1  # waits for buffer space, or for the old session that its session reinstates
FETCHING: Final = 2  # get_data is under way
RUNNING: Final = 3  # in a thread
ENDED: Final = 4  # response queued
UNSOLICITED: Final = 5  # unsolicited data is on its way
DORMANT: Final = 6  # waits for other tasks of its LUN
WAITING: Final = 7  # came before commands with a smaller CmdSN
SUSPENDED: Final = 8  # its connection is lost; it goes on when it is reassigned
COMPLETED: Final = 9  # its connection is lost; its response is sent when it is reassigned

# The ``turn`` of a task.
NO_TURN: Final = 0  # it never waited
WAITS: Final = 1  # it is dormant, though its state may be UNSOLICITED
HAS_COME: Final = 2  # it was dormant


class Allegiance(Protocol):
    """A connection to which tasks are allegiant, as its session and its parts use it.

    ``done``: it takes no more PDUs, and moves no more data. ``leaving``: it takes no more PDUs, as
    a Logout has come. ``recovered``: it was logged out for recovery. ``on_closed``: called when
    nothing touches its buffers any more."""

    cid: int
    done: bool
    leaving: bool
    recovered: bool
    on_closed: list[Callable[[], None]]

    def abandon(self) -> None:
        """The connection has failed, or is given up."""
        ...

    def tell_of_drop(self, cid: int, time2wait: int, time2retain: int) -> bool:
        """Tell the initiator on this connection that the target drops that with the CID ``cid``.
        False: it could not be told."""
        ...

    def note_acknowledgements(self) -> None:
        """Note from now on which responses the initiator has acknowledged."""
        ...

    def ask_for_acknowledgement(self) -> None:
        """Ask the initiator for its ExpStatSN, if that can acknowledge anything."""
        ...

    def release(self) -> None:
        """The connection is closed: give back the buffers that nothing needs any more."""
        ...

    def recycle(self, slot: TargetTask) -> None:
        """Free the slot and its buffer for reuse: all that the task sends has left."""
        ...

    def await_acknowledgement(self, tell: Callable[[], None]) -> None:
        """Call ``tell`` when the initiator has acknowledged all responses so far."""
        ...

    def enabled(self, slot: TargetTask) -> None:
        """See ``TargetSession.enabled``."""
        ...

    def start(self, slot: TargetTask) -> None:
        """Get the buffer and the data that the task needs, then run it."""
        ...

    def respond(self, slot: TargetTask) -> None:
        """Send Data-In, if any, and the SCSI Response, in one post."""
        ...

    def finish(self, slot: TargetTask) -> None:
        """Answer an offloaded task: its ``run`` has ended. Raises
        TransportError when the connection has ended."""
        ...

    def drop(self, slot: TargetTask) -> None:
        """Free the slot of an aborted task, and call its ``on_aborted``."""
        ...

    def cancel_data(self, slot: TargetTask) -> bool:
        """As ``TargetDatamover.cancel_data``."""
        ...

    def wake(self) -> None:
        """Start deferred tasks, and send what is queued. Raises nothing."""
        ...

    def flush_quietly(self) -> None:
        """Send what is queued. Raises nothing."""
        ...

    def stop(self) -> None:
        """Take no more PDUs. What is queued still leaves."""
        ...

    def disconnect(self) -> None:
        """Take no more PDUs, and end the connection."""
        ...

    def notify_ended(self) -> None:
        """Tell what drives the connection that it has ended otherwise than by an error."""
        ...

    def notify_recovery(self) -> None:
        """Tell the server that the connection, which is lost, was logged out for recovery."""
        ...

    def notify_released(self) -> None:
        """Tell the server that nothing is kept any more for the connection, which was lost."""
        ...


class Unsolicited:
    """The Data-Out of a command that comes unasked.

    ``immediate``: bytes that came with the command. ``more``: Data-Outs are on their way, while the
    task is WAITING. ``arrived``: bytes that have come. ``data_sn``: of the next Data-Out. ``age``:
    ticks since the last one."""

    __slots__ = ("age", "arrived", "data_sn", "immediate", "more")

    def __init__(self) -> None:
        self.immediate = 0
        self.more = False
        self.arrived = 0
        self.data_sn = 0
        self.age = 0

    def is_next(self, data_out: pdu.DataOut) -> bool:
        return data_out.data_sn == self.data_sn and data_out.buffer_offset == self.arrived

    def check(self, data_out: pdu.DataOut) -> None:
        """Raises RemoteProtocolError unless ``data_out`` is the next."""
        if not self.is_next(data_out):
            raise RemoteProtocolError(
                "iSCSI",
                f"Data-Out {data_out.data_sn} at {data_out.buffer_offset}, expected "
                f"{self.data_sn} at {self.arrived}",
            )


class TargetTask(TargetSlot):
    """One SCSI command at the target, with the slot of its response. ``connection``: to which it
    is allegiant."""

    __slots__ = (
        "aborted",
        "acknowledged",
        "advertised_from",
        "buffer",
        "connection",
        "control",
        "edtl",
        "fetching",
        "filled",
        "flags",
        "immediate",
        "itt",
        "kept",
        "losses",
        "lun",
        "on_aborted",
        "on_ended",
        "overflow",
        "read_length",
        "reassigned",
        "resume_at",
        "stat_sn",
        "state",
        "task",
        "turn",
        "unsolicited",
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
        self.stat_sn = 0  # of its response, while that is ``kept``
        self.kept = False  # its response has not been acknowledged
        self.acknowledged = False  # its Data-In has come to the initiator's buffer
        self.reassigned = False
        self.losses = 0  # connections that it has lost before it had its data
        self.resume_at = 0  # bytes of Data-In that need not be sent again
        self.filled = 0  # bytes of Data-Out that are in the buffer
        self.unsolicited = Unsolicited()
        self.fetching = 0  # bytes that get_data is fetching; they follow the ``filled`` bytes
        self.advertised_from = 0  # the byte of Data-Out that the Write Base Offset names
        self.flags = 0
        self.task: ScsiTask
        self.connection: Allegiance
        self.buffer: memoryview | None = None
        self.state = IDLE
        self.turn = NO_TURN  # in the task set of its LUN
        self.aborted = False
        self.on_aborted: list[Callable[[], None]] = []
        self.on_ended: list[Callable[[], None]] = []  # called when its thread has finished

    def end_unknown(self) -> None:
        """Nobody knows what became of the task: whoever takes it up again is not told GOOD."""
        self.task.cancel()
        self.task.status = sam.TASK_ABORTED
        self.task.transferred = 0

    def adopt(self, fresh: TargetTask, connection: Allegiance) -> None:
        """Become a task of another connection, with the memory of its slot ``fresh``, which is not
        used any more. The old connection is closed: nothing of it comes any more."""
        self.take_memory(fresh)
        self.transfer = fresh.transfer
        self.transfer.token = self
        self.index = fresh.index
        self.connection = connection
        self.busy = 0
        self.kept = False
        self.reassigned = True


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
    bhs.pack_scsi_response(
        slot.bhs,
        0,
        bhs.SCSI_RESPONSE << 24 | flags << 16 | task.status,
        slot.inline_length,
        slot.itt,
        numbers.take_stat_sn(),
        numbers.window.exp_cmd_sn,
        numbers.window.max_cmd_sn,
        residual,
    )
    if bidi_residual:
        bhs.BIDI_RESIDUAL.pack_into(slot.bhs, bhs.BIDI_RESIDUAL_OFFSET, bidi_residual)
