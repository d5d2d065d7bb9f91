"""The Datamover seam: RFC 5047 / RFC 7145 section 3, as plain calls.

The iSCSI layer calls down with the primitives; the datamover calls up with the notifications. Both
directions are direct calls in the caller's thread: no queue, no await.

    down  Send_Control  Put_Data  Get_Data  Allocate_Connection_Resources  Enable_Datamover
          Connection_Terminate  Notice_Key_Values  Deallocate_Task_Resources
    up    Control_Notify  Data_Completion_Notify

Put_Data, Get_Data and Data_Completion_Notify exist at the target only. Two of RFC 5047 have no call
of their own: Deallocate_Connection_Resources is part of Connection_Terminate, and
Connection_Terminate_Notify is the error that ``progress`` raises. Data_ACK_Notify belongs to error
recovery levels above 0.

A PDU goes out in a **slot**: memory that the datamover allocated (so that its own headers lie
beside the BHS), patched and reused, never rebuilt.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from iserblk.iscsi.keys import SessionParameters
from iserblk.rcap.seam import RDMA_WRITE, HeaderSlot, WorkRequest

# Where the payload of a slot travels.
NO_DATA = 0
INLINE = 1  # behind the BHS, in the control-type PDU: immediate data, text, ping data, sense
READ = 2  # tagged, target to initiator
WRITE = 3  # tagged, initiator to target


class PduSlot:
    """One outgoing control-type PDU.

    ``bhs``: 48 writable bytes (the layer above fills them, DataSegmentLength included).
    ``inline``: writable bytes behind it, ``inline_length`` of them in use. ``direction`` and
    ``data``: the tagged buffer to advertise (initiator) or None. ``stag``: what was advertised,
    0 when nothing is.
    """

    __slots__ = (
        "base",
        "bhs",
        "data",
        "direction",
        "header",
        "index",
        "inline",
        "inline_length",
        "request",
        "stag",
    )

    def __init__(self, index: int) -> None:
        self.index = index
        self.header: HeaderSlot
        self.bhs: memoryview
        self.inline: memoryview
        self.inline_length = 0
        self.data: memoryview | None = None
        self.direction = NO_DATA
        self.stag = 0
        self.base = 0
        self.request = WorkRequest(token=self)

    def take_memory(self, other: PduSlot) -> None:
        """Go on with the memory of ``other``, which its datamover gave it, and which is not used
        any more. What was asked stays."""
        self.bhs = other.bhs
        self.inline = other.inline
        self.request = other.request
        self.request.token = self
        if self.request.header is not None:
            self.header = self.request.header


class TargetSlot(PduSlot):
    """A task at the target: the PDU slot of its response, and what the command advertised.

    ``transfer`` is the work request of its Put_Data or Get_Data. ``busy`` counts reasons why the
    slot's memory may not be used again yet: posted requests that have not completed.
    """

    __slots__ = ("busy", "read_base", "read_stag", "transfer", "write_base", "write_stag")

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.transfer = WorkRequest(RDMA_WRITE, self)
        self.read_stag = 0
        self.read_base = 0
        self.write_stag = 0
        self.write_base = 0
        self.busy = 0


class SessionNumbers(Protocol):
    """The sequence numbers of a session (RFC 7143 section 4.2.2), which the layer above counts."""

    stat_sn: int
    exp_cmd_sn: int
    max_cmd_sn: int


class InitiatorUser(Protocol):
    """The iSCSI layer above an initiator's datamover."""

    def control_notify(self, message: memoryview, at: int, invalidated: int) -> None:
        """A control-type PDU came. Its BHS starts at ``message[at]``, the data segment behind it
        is complete; readable until the next ``progress``. ``invalidated``: the STag that came
        with it, 0 if none. May raise RemoteProtocolError, which ends the connection."""
        ...


class TargetUser(InitiatorUser, Protocol):
    """The iSCSI layer above a target's datamover."""

    def data_completion_notify(self, slot: PduSlot) -> None:
        """The ``get_data`` of ``slot`` is complete: its buffer is filled."""
        ...

    def sent_notify(self, slot: PduSlot) -> None:
        """The PDU of ``slot`` has left; all that was queued before it, too."""
        ...


class InitiatorDatamover(Protocol):
    """What an initiator's iSCSI layer asks of its datamover. The caller holds its own lock
    around ``send_control``; ``flush`` and ``progress`` are called by one thread at a time each,
    and may run beside each other and beside ``send_control``.

    ``queued``: true while something waits for ``flush``."""

    user: InitiatorUser

    @property
    def queued(self) -> Collection[object]: ...

    def allocate_connection_resources(self, slots: list[PduSlot], unexpected: int) -> None:
        """Give each slot its memory, and post receives for their answers and for
        ``unexpected`` PDUs that answer nothing."""
        ...

    def notice_key_values(self, parameters: SessionParameters) -> None:
        """What the login has agreed on."""
        ...

    def enable_datamover(self) -> None:
        """Login is complete: full feature phase begins."""
        ...

    def send_control(self, slot: PduSlot) -> None:
        """Queue the PDU; ``flush`` sends it. Advertises ``slot.data`` for READ and WRITE. Raises
        Busy when there is no memory for that until another task ends; nothing is queued then."""
        ...

    def flush(self) -> bool:
        """Send what is queued. False: ``progress`` is at it in another thread, and sends that, too.
        Raises ConnectionLost."""
        ...

    def deallocate_task_resources(self, slot: PduSlot, invalidated: int) -> None:
        """The task has ended: on return nothing touches ``slot.data``. ``invalidated`` is the
        STag that its response brought; another one than the slot's is a RemoteProtocolError."""
        ...

    def progress(self, now: float) -> int:
        """Take in what has come, call up for each PDU; returns how many. Errors as QueuePair."""
        ...

    def disconnect(self) -> None:
        """Ask for the end, from any thread; ``progress`` then raises ConnectionLost."""
        ...

    def connection_terminate(self) -> None:
        """End the connection now; no buffer is touched on return."""
        ...

    def describe(self) -> dict[str, object]: ...

    def fileno(self) -> int: ...

    def wants_write(self) -> bool: ...


class TargetDatamover(Protocol):
    """What a target's iSCSI layer asks of its datamover. All of it in one thread.

    ``user``: set before the first ``progress``."""

    user: TargetUser

    def allocate_connection_resources(
        self, slots: Sequence[TargetSlot], inline_size: int, receives: int
    ) -> None:
        """Give each slot memory for its PDU with up to ``inline_size`` bytes of data (sense,
        text), and post ``receives`` more receives. Called again when login is complete: before,
        a peer that nobody knows gets no more than login needs."""
        ...

    def notice_numbers(self, numbers: SessionNumbers) -> None:
        """Where PDUs that the datamover makes get their sequence numbers from."""
        ...

    def notice_key_values(self, parameters: SessionParameters) -> None:
        """What the login has agreed on."""
        ...

    def enable_datamover(self) -> None:
        """Full feature phase begins. To be called where the final Login Response is queued."""
        ...

    def map_task(self, slot: TargetSlot) -> None:
        """The command that is being notified starts the task of ``slot``. Inside ``control_notify``
        only."""
        ...

    def put_data(self, slot: TargetSlot, data: memoryview, buffer_offset: int) -> None:
        """Data-In for the task of ``slot``, in front of its response. ``data`` stays in use until
        that has left (``busy`` is 0 again). Raises RemoteProtocolError where the command named no
        buffer."""
        ...

    def get_data(self, slot: TargetSlot, sink: memoryview, buffer_offset: int) -> None:
        """Fill ``sink`` with Data-Out of the task of ``slot``; then data_completion_notify. At most
        MaxBurstLength bytes, one at a time for each task. Raises RemoteProtocolError where the
        command named no buffer."""
        ...

    def cancel_data(self, slot: TargetSlot) -> bool:
        """Give up the ``get_data`` of ``slot``. True: its sink is not touched any more, and no
        completion follows. False: it cannot be given up, and completes."""
        ...

    def send_control(self, slot: TargetSlot, invalidate: bool = False) -> None:
        """Queue the PDU in ``slot``; ``flush`` sends it, then sent_notify follows. ``invalidate``:
        it is a SCSI Response, which may revoke what its command advertised."""
        ...

    def flush(self) -> None:
        """Send what is queued. Raises ConnectionLost."""
        ...

    def deallocate_task_resources(self, slot: TargetSlot) -> None:
        """The task has ended."""
        ...

    def progress(self, now: float) -> int:
        """Take in what has come, call up for it; returns how much. Errors as QueuePair."""
        ...

    def disconnect(self) -> None:
        """Ask for the end, from any thread; ``progress`` then raises ConnectionLost."""
        ...

    def connection_terminate(self) -> None:
        """End the connection now; no buffer is touched on return."""
        ...

    def describe(self) -> dict[str, object]: ...

    def fileno(self) -> int: ...

    def wants_write(self) -> bool: ...

    def next_deadline(self) -> float | None:
        """When ``progress`` wants to be called though nothing has come (monotonic seconds)."""
        ...
