"""The Datamover seam: the primitives of RFC 5047 and RFC 7145 section 3, as plain calls.

The iSCSI layer calls the datamover (down), and the datamover notifies the iSCSI layer (up). Both
are direct calls in the caller's thread: no queue, no await.

    down  Send_Control  Put_Data  Get_Data  Allocate_Connection_Resources  Enable_Datamover
          Connection_Terminate  Notice_Key_Values  Deallocate_Task_Resources
    up    Control_Notify  Data_Completion_Notify  Data_ACK_Notify

Put_Data, Get_Data, Data_Completion_Notify and Data_ACK_Notify exist at the target only. Two
primitives of RFC 5047 have no call: Deallocate_Connection_Resources is part of
Connection_Terminate; Connection_Terminate_Notify is the error that ``progress`` raises.

A PDU is sent from a **slot**: memory that the datamover allocated, so that its own headers lie in
front of the BHS. A slot is patched and reused, never rebuilt.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Final, NamedTuple, Protocol

from iserblk.iscsi import pdu
from iserblk.iscsi.keys import SessionParameters
from iserblk.rcap.seam import RDMA_WRITE, HeaderSlot, WorkRequest
from iserblk.scsi.tasks import NO_DATA

# Where the payload of a slot travels: tagged, as ``iserblk.scsi.tasks`` says (BIDIRECTIONAL:
# ``data`` as WRITE, ``data_in`` as READ; the AHS is ``inline``), or in a control-type PDU.
INLINE: Final = 1  # behind the BHS: immediate data, text, ping data, sense
UNSOLICITED: Final = 4  # as INLINE, in a SCSI Data-Out that no R2T asked for


# ``bhs`` and ``inline`` of a slot that has no memory yet.
BARE: Final = memoryview(b"")
_NO_HEADER: Final = HeaderSlot(BARE, None, 0)

# Rounds of one call of ``progress`` over a queue pair, at most. A round takes no more messages than
# receives are posted; more rounds follow while output that it brought about completes at once.
ROUNDS: Final = 8

# What is notified of a transfer (``TargetSlot.notices``).
NOTIFY: Final = 1  # Data_Completion_Notify
ACKNOWLEDGE: Final = 2  # Data_ACK_Notify


def not_told() -> None:
    """``on_unfinished`` where the layer above has set none: it calls ``progress`` in a loop."""


class PduSlot:
    """One outgoing control-type PDU.

    ``bhs``: 48 writable bytes, which the layer above fills, DataSegmentLength included; BARE until
    the datamover has given the slot its memory.
    ``inline``: writable bytes behind the BHS, ``inline_length`` of them in use. ``data``: at an
    initiator, the tagged buffer of the task, or None; ``direction``: where its data goes.
    ``stag``, ``base``: STag and Base Offset advertised for it; ``stag`` 0: none. ``data_in``,
    ``stag_in``: of a BIDIRECTIONAL task, the same for its Data-In; else None and 0.
    """

    __slots__ = (
        "base",
        "bhs",
        "data",
        "data_in",
        "direction",
        "header",
        "index",
        "inline",
        "inline_length",
        "request",
        "stag",
        "stag_in",
    )

    def __init__(self, index: int) -> None:
        self.index = index
        self.header = _NO_HEADER
        self.bhs: memoryview = BARE
        self.inline: memoryview = BARE
        self.inline_length = 0
        self.data: memoryview | None = None
        self.direction = NO_DATA
        self.stag = 0
        self.base = 0
        self.data_in: memoryview | None = None
        self.stag_in = 0
        self.request = WorkRequest(token=self)

    def take_memory(self, other: PduSlot) -> None:
        """Take over the memory and the work request of ``other``, which must not be used any more.
        The other fields of this slot stay as they are."""
        self.bhs = other.bhs
        self.inline = other.inline
        self.request = other.request
        self.request.token = self
        self.request.header = self.header = other.header

    def drop_memory(self) -> None:
        """Let go of the memory. No PDU in it is in flight, or still to be sent."""
        self.bhs = BARE
        self.inline = BARE
        self.header = _NO_HEADER
        self.request.header = None


class TargetSlot(PduSlot):
    """A task at the target: the PDU slot of its response, and what the command advertised.

    ``transfer`` is the work request of its Put_Data or Get_Data. ``sn``: how many Put_Data and
    Get_Data the task has had over iSER, which is the DataSN or R2TSN of the next. ``first_sn``,
    ``segment``: over TCP, where tasks are reassigned, the DataSN of the first Data-In on the
    present connection (until there is one, the R2TSN of the next R2T), and how many bytes each had.
    ``notices``: what
    is to be notified when the transfer under way completes (NOTIFY, ACKNOWLEDGE). ``busy`` counts
    requests that are queued or posted and have not completed; until it is 0 the slot's memory may
    not be used again.
    """

    __slots__ = (
        "busy",
        "first_sn",
        "notices",
        "read_base",
        "read_stag",
        "segment",
        "sn",
        "transfer",
        "write_base",
        "write_stag",
    )

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.transfer = WorkRequest(RDMA_WRITE, self)
        self.sn = 0
        self.first_sn = 0
        self.segment = 0
        self.notices = 0
        self.read_stag = 0
        self.read_base = 0
        self.write_stag = 0
        self.write_base = 0
        self.busy = 0


class Resumption(NamedTuple):
    """How a task goes on that is made allegiant to another connection (RFC 7143 section 7.2.2).

    ``lun``: the LUN field of its command. ``exp_data_sn``: ExpDataSN of the request. ``sent``:
    bytes of its Data-In that have been sent, and are not acknowledged; those from ``sent_from`` on
    by the connection before."""

    lun: bytes
    itt: int
    bidirectional: bool
    exp_data_sn: int
    sent: int
    sent_from: int


class SessionNumbers(Protocol):
    """The sequence numbers of a connection, and those of its session (RFC 7143 section 4.2.2). The
    layer above counts them."""

    @property
    def stat_sn(self) -> int: ...

    @property
    def exp_cmd_sn(self) -> int: ...

    @property
    def max_cmd_sn(self) -> int: ...


class InitiatorUser(Protocol):
    """The iSCSI layer above an initiator's datamover."""

    def control_notify(self, message: memoryview, at: int, invalidated: int) -> None:
        """A control-type PDU has come. Its BHS starts at ``message[at]``, followed by its complete
        data segment. ``message`` is readable until the next ``progress``. ``invalidated``: the STag
        that the PDU invalidated, 0 if none. May raise RemoteProtocolError, which ends the
        connection."""
        ...

    def sent_notify(self, slot: PduSlot) -> None:
        """The PDU of ``slot`` has left, and so has all that was queued before it. At an initiator
        that is told of unsolicited Data-Outs only."""
        ...


class TargetUser(InitiatorUser, Protocol):
    """The iSCSI layer above a target's datamover."""

    def discarded_notify(self, head: memoryview) -> None:
        """Over TCP, at ErrorRecoveryLevel 1 or more: a PDU came with a wrong data digest, and was
        dropped (RFC 7143 section 7.8). ``head``: its BHS. Solicited data has been asked for again
        already."""
        ...

    def data_completion_notify(self, slot: PduSlot, sn: int) -> None:
        """The ``get_data`` of ``slot`` is complete: its sink is filled; ``sn`` is its R2TSN. Or the
        ``put_data`` is: its data has left, and ``sn`` is its DataSN. Only where the call had
        Notify_Enable set (RFC 7145 section 3.2.2)."""
        ...

    def data_ack_notify(self, slot: PduSlot, data_sn: int) -> None:
        """The data of a ``put_data`` with the A-bit is in the initiator's buffer. ``data_sn``: of
        the task's next Data-In (RFC 7145 section 3.2.3)."""
        ...


class Losses:
    """Counts what was lost, for statistics. ``damaged``: PDUs that were dropped because their data
    digest was wrong. ``snacks``: SNACKs that asked for what was missing."""

    __slots__ = ("damaged", "snacks")

    def __init__(self) -> None:
        self.damaged = 0
        self.snacks = 0

    def add(self, more: Losses) -> None:
        self.damaged += more.damaged
        self.snacks += more.snacks


class InitiatorDatamover(Protocol):
    """The datamover of an initiator, as its iSCSI layer uses it.

    All calls are made in one thread, but for ``disconnect``.

    ``user``: the layer above sets it before ``enable_datamover`` and the first ``progress``.
    ``adds_resources``: whether ``add_resources`` may be called; else all slots are to be given
    their memory at once. ``queued``: not empty while PDUs wait for ``flush``. ``greeted``: False
    from ``enable_datamover`` until the target has answered the Hello, where there is one.
    ``losses``: what was lost and asked for again; the layer above may put another object in its
    place, between two calls of ``progress`` and ``tick``. ``on_unfinished``: see
    TargetDatamover."""

    user: InitiatorUser
    greeted: bool
    losses: Losses
    on_unfinished: Callable[[], None]

    @property
    def adds_resources(self) -> bool: ...

    @property
    def queued(self) -> Collection[object]: ...

    def allocate_connection_resources(self, slots: list[PduSlot], unexpected: int) -> None:
        """Give each slot its memory. Post receives for the answers to all slots, and for
        ``unexpected`` PDUs that answer nothing. A second call succeeds and changes nothing
        (RFC 7145 section 3.1.4)."""
        ...

    def add_resources(self, slots: list[PduSlot], receives: int) -> None:
        """Give more slots of a connection whose resources are allocated their memory, and post
        ``receives`` receives for the answers. Raises OSError or MemoryError when there is no
        memory; then no slot has any."""
        ...

    def allocate_data_outs(self, count: int, size: int) -> list[PduSlot]:
        """Slots for ``count`` unsolicited Data-Outs of up to ``size`` bytes. None of them where the
        datamover makes these itself of a task's buffer. Raises ConnectionLost."""
        ...

    def notice_key_values(self, parameters: SessionParameters) -> None:
        """Take the keys that login agreed on."""
        ...

    def enable_datamover(self) -> InitiatorDatamover:
        """The final Login Response has come: full feature phase begins. Returns the datamover of
        the connection from now on: this one, or, where the connection changes its mode, one that
        has taken over its slots and its ``user``; then this one is not used any more. May queue a
        Hello; then the caller calls ``flush``, and ``progress`` until ``greeted``. Raises
        LocalProtocolError, and changes nothing, before ``allocate_connection_resources`` and for a
        second call."""
        ...

    def send_control(self, slot: PduSlot) -> None:
        """Queue the PDU; ``flush`` sends it. Advertises ``slot.data`` for READ and WRITE, and
        ``slot.data_in`` as well for BIDIRECTIONAL; the datamover uses these buffers until
        ``deallocate_task_resources``. The memory of an UNSOLICITED PDU is in use until sent_notify,
        that of any other PDU until it is answered.

        Raises Busy when there is no memory for that until another task ends; then nothing is
        queued."""
        ...

    def reassign(self, slot: PduSlot, control: PduSlot, before: InitiatorDatamover) -> None:
        """Queue the PDU of ``control``, a TASK REASSIGN of the task of ``slot``, which belonged to
        the datamover ``before``; that one is terminated, and its STags with it. ``slot`` has memory
        of this datamover, with the task's ITT in its BHS. Its buffers are advertised anew, in the
        header of the TASK REASSIGN, and used until ``deallocate_task_resources`` (RFC 7145 section
        7.3.3). Raises Busy as ``send_control``, and where the task cannot be continued."""
        ...

    def flush(self) -> bool:
        """Send what is queued. Whether some of it waits until the descriptor is writable: then
        ``progress`` goes on with it. Raises ConnectionLost."""
        ...

    def deallocate_task_resources(self, slot: PduSlot, invalidated: int) -> None:
        """The task has ended: on return nothing touches ``slot.data`` and ``slot.data_in``.
        ``invalidated``: the STag that its response invalidated, or 0. Raises RemoteProtocolError
        when that is not the STag of the slot (of a BIDIRECTIONAL task: its Read STag), or when the
        two ends did not agree on remote invalidation; the buffers are free then, too."""
        ...

    def progress(self, now: float) -> int:
        """Take in what has come, and notify the layer above of each PDU. Returns the number of
        PDUs. Raises as ``QueuePair.progress``."""
        ...

    def disconnect(self) -> None:
        """Ask for the end, from any thread; ``progress`` then raises ConnectionLost."""
        ...

    def connection_terminate(self) -> None:
        """End the connection now; on return no buffer is touched."""
        ...

    def tick(self) -> None:
        """Call it about once a second, in the thread that calls ``progress``, and ``flush`` behind
        it: what was lost, and asked for in vain, is asked for again. Raises RemoteProtocolError
        when that was done too often. Over iSER, and at ErrorRecoveryLevel 0, nothing is."""
        ...

    def describe(self) -> dict[str, object]: ...

    def fileno(self) -> int: ...

    def wants_write(self) -> bool: ...


class TargetDatamover(Protocol):
    """The datamover of a target, as its iSCSI layer uses it. All calls are made in one thread.

    ``user``: the layer above sets it before ``enable_datamover`` and the first ``progress``.
    ``greeted``: False from ``enable_datamover`` until the Hello has come, where login has agreed on
    one; until then PDUs are queued and do not leave.
    ``on_unfinished``: the layer above may set it. ``progress`` calls it, at its end, when it has
    done its share of a turn, and there is more that no descriptor shows: it is to be called again,
    but behind the other connections of its loop. A peer that keeps it busy starves no other."""

    user: TargetUser
    greeted: bool
    on_unfinished: Callable[[], None]

    @property
    def acknowledges(self) -> bool:
        """Whether ``put_data`` may ask for an acknowledgement."""
        ...

    def allocate_connection_resources(
        self, slots: Sequence[TargetSlot], inline_size: int, receives: int
    ) -> None:
        """Give each slot memory for its PDU with up to ``inline_size`` bytes of data (sense,
        text), and post ``receives`` receives. A second call succeeds and changes nothing
        (RFC 7145 section 3.1.4). Raises as ``add_resources``, where there is no memory."""
        ...

    def add_resources(self, slots: Sequence[TargetSlot], inline_size: int, receives: int) -> None:
        """Give a connection whose resources are allocated more of them, as
        ``allocate_connection_resources``: until login is complete an unknown peer has no more
        than login needs. Raises LocalProtocolError, and changes nothing, before that.

        Raises Busy, OSError or MemoryError when there is no memory; the connection goes on, to
        answer the login with 0302 (RFC 7145 section 10.1.3.1)."""
        ...

    def notice_numbers(self, numbers: SessionNumbers) -> None:
        """Take the object that holds the sequence numbers, for PDUs that the datamover makes."""
        ...

    def notice_key_values(self, parameters: SessionParameters) -> None:
        """Take the keys that login agreed on."""
        ...

    def enable_datamover(self, final: TargetSlot) -> TargetDatamover:
        """Full feature phase begins. ``final`` has the final Login Response, which is queued as
        by ``send_control``, in the mode of the login. Returns the datamover of the connection from
        now on: this one, or, where the connection changes its mode, one that has taken over its
        slots and its ``user``. Then this one is not used any more, except that a ``progress`` that
        is under way returns.

        Raises ConnectionLost. Raises LocalProtocolError, and changes nothing, before
        ``allocate_connection_resources`` and for a second call."""
        ...

    def map_task(self, slot: TargetSlot) -> None:
        """The command that is being notified starts the task of ``slot``. To be called inside
        ``control_notify`` only. Also for a TASK REASSIGN: then ``slot`` is one that is not in use,
        and ``reassign_task`` follows, unless the request fails."""
        ...

    def reassign_task(self, slot: TargetSlot, fresh: TargetSlot, how: Resumption) -> int:
        """Take over the task of ``slot`` from another connection, which is closed. ``fresh``: a
        slot of this one, for which ``map_task`` was called; the caller has ``slot`` take over its
        memory. Returns how many bytes of its Data-In the initiator has, which need not be sent
        again."""
        ...

    def put_data(
        self,
        slot: TargetSlot,
        data: memoryview,
        buffer_offset: int,
        notify_enable: bool = False,
        acknowledge: bool = False,
    ) -> None:
        """Send ``data`` (at least 1 byte) as Data-In for the task of ``slot``, before its response.
        ``data`` stays in use until the response has left (``busy`` is 0 again). ``notify_enable``:
        data_completion_notify follows when it has left. ``acknowledge``: the A-bit;
        data_ack_notify follows when it is in the initiator's buffer. A task with either has one
        ``put_data`` or ``get_data`` at a time.

        Raises RemoteProtocolError where the command named no buffer, and where the initiator takes
        no RDMA Reads that an acknowledgement needs. Raises LocalProtocolError for ``acknowledge``
        at ErrorRecoveryLevel 0, which has no acknowledgements (RFC 7145 section 7.3.5). Nothing is
        queued then."""
        ...

    def get_data(
        self,
        slot: TargetSlot,
        sink: memoryview,
        buffer_offset: int,
        notify_enable: bool = True,
    ) -> None:
        """Fill ``sink`` with Data-Out of the task of ``slot``; with ``notify_enable``,
        data_completion_notify follows.

        ``sink`` stays in use until then, without a notice until ``busy`` has fallen. At most
        MaxBurstLength bytes, and one call at a time for each task. Raises RemoteProtocolError where
        the command named no buffer."""
        ...

    def cancel_data(self, slot: TargetSlot) -> bool:
        """Cancel the ``get_data`` of ``slot``. True: its sink is not touched any more, and no
        completion follows. False: it cannot be cancelled, and its completion follows."""
        ...

    def send_control(self, slot: TargetSlot, invalidate: bool = False) -> None:
        """Queue the PDU in ``slot``; ``flush`` sends it, then sent_notify follows. ``invalidate``:
        it is a SCSI Response, which may invalidate an STag that its command advertised."""
        ...

    def flush(self) -> None:
        """Send what is queued. Raises ConnectionLost."""
        ...

    def deallocate_task_resources(self, slot: TargetSlot) -> None:
        """The task has ended: forget its buffers."""
        ...

    def progress(self, now: float) -> int:
        """Take in what has come, and notify the layer above. Returns how many PDUs or completions.
        Raises as ``QueuePair.progress``."""
        ...

    def disconnect(self) -> None:
        """Ask for the end, from any thread; ``progress`` then raises ConnectionLost."""
        ...

    def connection_terminate(self) -> None:
        """End the connection now; on return no buffer is touched."""
        ...

    def retransmit(self, snack: pdu.SnackRequest) -> tuple[int, int]:
        """Queue what a SNACK asks for, or take its acknowledgement (RFC 7143 section 11.16). Over
        TCP, at ErrorRecoveryLevel 1 or more. Returns 0, 0; or the reason to reject it, and the
        DataSN field of the Reject. Raises RemoteProtocolError when the initiator asks and asks, and
        does not take the answers."""
        ...

    def forget_kept(self) -> None:
        """The memory of what is kept for retransmission is wanted: keep Data-In no longer, and of
        other PDUs few bytes. Each of its slots is notified as sent."""
        ...

    @property
    def kept_bytes(self) -> int:
        """Bytes of PDUs that are kept for retransmission, their Data-In excepted."""
        ...

    @property
    def unacknowledged(self) -> int | None:
        """The StatSN of the oldest PDU that is kept for retransmission; None: there is none."""
        ...

    def tick(self) -> None:
        """Call it about once a second, and ``flush`` behind it: Data-Outs that do not come are
        asked for again. Raises RemoteProtocolError when that was done too often. Over iSER, and at
        ErrorRecoveryLevel 0, nothing is."""
        ...

    def describe(self) -> dict[str, object]: ...

    def fileno(self) -> int: ...

    def wants_write(self) -> bool: ...

    def next_deadline(self) -> float | None:
        """The time (monotonic seconds) at which ``progress`` is to be called even if nothing has
        come; None: never."""
        ...
