"""The iSER datamover of a target, on any queue pair (RFC 7145 sections 7.3.5, 7.3.6, 9).

Put_Data becomes an RDMA Write, Get_Data an RDMA Read. A SCSI Response becomes a Send with
Invalidate of an STag that its command advertised, where the initiator allows that.

Work requests are queued. ``flush`` posts all that one turn of the event loop has queued at once.

A Hello is answered where it is the initiator's first message (module ``hello``), and demanded where
login has agreed on it. ``ZeroBasedTarget`` speaks the 12-byte header of RFC 5046.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from iserblk.datamover import hello
from iserblk.datamover.allocation import Allocation, Event
from iserblk.datamover.iser import (
    BHS_LENGTH,
    CONTROL,
    HEADER_LENGTH,
    HELLO,
    MINIMUM_LENGTH,
    RSV,
    WSV,
    ZERO_BASED_LAYOUT,
    ZERO_BASED_LENGTH,
    ZERO_BASED_MINIMUM,
    MessageFields,
    check_message_untrusted,
    check_zero_based_untrusted,
    length_behind,
    unpack_message,
)
from iserblk.datamover.seam import (
    ACKNOWLEDGE,
    NOTIFY,
    ROUNDS,
    PduSlot,
    Resumption,
    SessionNumbers,
    TargetDatamover,
    TargetSlot,
    TargetUser,
    not_told,
)
from iserblk.errors import LocalProtocolError, RemoteProtocolError
from iserblk.iscsi import pdu
from iserblk.iscsi.keys import SessionParameters
from iserblk.rcap.seam import (
    RDMA_READ,
    RDMA_WRITE,
    RECEIVE,
    SEND,
    SEND_INVALIDATE,
    SEND_SE,
    SEND_SE_INVALIDATE,
    QueuePair,
    WorkRequest,
)

# Work requests, of which two belong to a read, that leave while commands that came with theirs are
# still carried out. With more the initiator would have nothing to do until all are. Of many
# commands a quarter of their answers leaves at a time: the initiator has enough to do, and each
# send costs.
EARLY: Final = 16

_UNKNOWN: Final = -1  # ErrorRecoveryLevel before Notice_Key_Values


class _Acknowledgement:
    """The token of the RDMA Read that acknowledges a Put_Data. ``data_sn``: of the next one."""

    __slots__ = ("data_sn", "slot")

    def __init__(self, slot: TargetSlot, data_sn: int) -> None:
        self.slot = slot
        self.data_sn = data_sn


class _BeforeHello:
    """Takes the place of the layer above until the initiator's first message, so that no PDU costs
    a look at whether it is the first."""

    def __init__(self, datamover: IserTarget, user: TargetUser) -> None:
        self._datamover = datamover
        self.user = user

    def control_notify(self, message: memoryview, at: int, invalidated: int) -> None:
        if not self._datamover.greeted:
            raise RemoteProtocolError("iSER", "the initiator's first message is no Hello")
        self._datamover.end_greeting()
        self.user.control_notify(message, at, invalidated)

    def data_completion_notify(self, slot: PduSlot, sn: int) -> None:
        self.user.data_completion_notify(slot, sn)

    def sent_notify(self, slot: PduSlot) -> None:
        self.user.sent_notify(slot)

    def data_ack_notify(self, slot: PduSlot, data_sn: int) -> None:
        self.user.data_ack_notify(slot, data_sn)

    def discarded_notify(self, head: memoryview) -> None:
        self.user.discarded_notify(head)


class IserTarget:
    """Implements TargetDatamover for one connection, with the 28-byte header of RFC 7145."""

    user: TargetUser

    def __init__(self, qp: QueuePair, send_invalidate: bool) -> None:
        """``send_invalidate``: the initiator allows Send with Invalidate."""
        self.qp = qp
        self.send_invalidate = send_invalidate
        self._send = SEND_SE if qp.solicits else SEND
        self._send_with_invalidate = SEND_SE_INVALIDATE if qp.solicits else SEND_INVALIDATE
        self.greeted = True
        self.on_unfinished: Callable[[], None] = not_told
        self._form = hello.RFC_7145
        self._minimum = MINIMUM_LENGTH
        # What login has agreed on. None: iSERHelloRequired was not declared.
        self._hello_required: bool | None = False
        self._waiting: _BeforeHello | None = None
        self._queued: list[WorkRequest] = []
        self._allocation = Allocation()
        self._recovery_level = _UNKNOWN  # the operational ErrorRecoveryLevel
        # What the command being notified advertised: its Local and Remote Mapping (RFC 7145
        # section 7.3.1).
        self._write_stag = 0
        self._write_base = 0
        self._read_stag = 0
        self._read_base = 0

    # -- down -------------------------------------------------------------------------------------

    @property
    def acknowledges(self) -> bool:
        return self._recovery_level == 1 or (self._recovery_level != 0 and self.qp.ord > 0)

    def allocate_connection_resources(
        self, slots: Sequence[TargetSlot], inline_size: int, receives: int
    ) -> None:
        if self._allocation.enter(Event.ALLOCATE):
            self.add_resources(slots, inline_size, receives)

    def add_resources(self, slots: Sequence[TargetSlot], inline_size: int, receives: int) -> None:
        self._allocation.need_resources()
        start = self._form.length
        headers = self.qp.alloc_headers(len(slots), start + BHS_LENGTH + inline_size)
        plain = bytes([CONTROL]).ljust(start, b"\0")  # of every PDU: a target advertises nothing
        for slot, header in zip(slots, headers, strict=True):
            header.view[:start] = plain
            slot.header = header
            slot.bhs = header.view[start : start + BHS_LENGTH]
            slot.inline = header.view[start + BHS_LENGTH :]
            slot.request.header = header
            slot.request.signaled = True
        self.qp.post_receive(receives)

    def notice_key_values(self, parameters: SessionParameters) -> None:
        if parameters.max_ulpdu:
            self.qp.allow_ulpdu(parameters.max_ulpdu)
        if parameters.rdma_extensions:
            self._hello_required = parameters.iser_hello_required
        self._recovery_level = parameters.error_recovery_level

    def enable_datamover(self, final: TargetSlot) -> TargetDatamover:
        """See the seam. The connection is iSER from its start: all of the login travels in
        Sends."""
        self._allocation.enter(Event.ENABLE)
        self.send_control(final)
        self._await_hello()
        return self

    def enable_behind_stream(self) -> None:
        """As ``enable_datamover``, where the final Login Response leaves as a byte stream."""
        self._allocation.enter(Event.ENABLE)
        self._await_hello()

    def _await_hello(self) -> None:
        """Wait for the Hello where login has agreed on one: until it has come nothing is sent but
        what is queued already, and any other message is an error. Where login has not spoken of it,
        a Hello may be the first message."""
        required = self._hello_required
        if required is None and self._form.without_key:
            required = True
        if required is False:
            return
        self.flush()
        self._waiting = _BeforeHello(self, self.user)
        self.user = self._waiting
        self.greeted = not required
        if required:
            self.qp.post_receive(1)  # for the Hello, which counts as no PDU

    def end_greeting(self) -> None:
        """The first message has come: a Hello is an error from now on."""
        waiting = self._waiting
        if waiting is not None:
            self.user = waiting.user
            self._waiting = None
            self.greeted = True

    def notice_numbers(self, numbers: SessionNumbers) -> None:
        """Does nothing: RDMA Reads carry no sequence numbers of the session."""

    def cancel_data(self, slot: TargetSlot) -> bool:
        """Always False: an RDMA Read cannot be cancelled; its completion follows."""
        return False

    def map_task(self, slot: TargetSlot) -> None:
        slot.write_stag = self._write_stag
        slot.write_base = self._write_base
        slot.read_stag = self._read_stag
        slot.read_base = self._read_base
        slot.sn = 0
        slot.notices = 0

    def reassign_task(self, slot: TargetSlot, fresh: TargetSlot, how: Resumption) -> int:
        """See the seam. What the request advertises replaces what the command, or an earlier
        request, has advertised (RFC 7145 section 7.3.3). Always 0: an initiator does not know what
        has been placed, so ExpDataSN says nothing."""
        slot.write_stag = fresh.write_stag
        slot.write_base = fresh.write_base
        slot.read_stag = fresh.read_stag
        slot.read_base = fresh.read_base
        slot.sn = 0
        slot.notices = 0
        return 0

    def put_data(
        self,
        slot: TargetSlot,
        data: memoryview,
        buffer_offset: int,
        notify_enable: bool = False,
        acknowledge: bool = False,
    ) -> None:
        """Queue an RDMA Write to the buffer that the command advertised for reading.

        An acknowledgement is an RDMA Read of nothing behind it: when that completes, the
        initiator's RNIC has placed the data. At ErrorRecoveryLevel 1 it is the completion of the
        Write itself (RFC 7145 section 7.3.5)."""
        if not slot.read_stag:
            raise RemoteProtocolError("iSER", "a command that reads advertised no Read STag")
        transfer = slot.transfer
        transfer.opcode = RDMA_WRITE
        transfer.data = data
        transfer.stag = slot.read_stag
        to = slot.read_base + buffer_offset
        transfer.to = to & 0xFFFFFFFFFFFFFFFF if to >> 64 else to
        transfer.signaled = False
        if notify_enable or acknowledge:
            if acknowledge and self._recovery_level not in (0, 1) and not self.qp.ord:
                raise RemoteProtocolError("iSER", "the initiator takes no RDMA Reads (IRD 0)")
            self._put_with_notices(slot, notify_enable, acknowledge)
            return
        slot.sn += 1
        self._queued.append(transfer)

    def _put_with_notices(self, slot: TargetSlot, notify_enable: bool, acknowledge: bool) -> None:
        notices = NOTIFY if notify_enable else 0
        read = None
        if acknowledge:
            if self._recovery_level == 0:
                raise LocalProtocolError("the A-bit needs an ErrorRecoveryLevel above 0")
            if self._recovery_level == 1:
                notices |= ACKNOWLEDGE
            else:
                read = self._acknowledging_read(slot, slot.sn + 1)
        slot.sn += 1
        slot.notices = notices
        if notices:
            slot.transfer.signaled = True
            slot.busy += 1
        self._queued.append(slot.transfer)
        if read is not None:
            slot.busy += 1
            self._queued.append(read)

    def _acknowledging_read(self, slot: TargetSlot, data_sn: int) -> WorkRequest:
        read = WorkRequest(RDMA_READ, _Acknowledgement(slot, data_sn))
        read.data = memoryview(bytearray())
        read.stag = slot.read_stag
        read.to = slot.read_base
        return read

    def get_data(
        self,
        slot: TargetSlot,
        sink: memoryview,
        buffer_offset: int,
        notify_enable: bool = True,
    ) -> None:
        """Queue an RDMA Read of the buffer that the command advertised for writing.

        ``buffer_offset`` counts from the first byte that the STag names. Implementations advertise
        the first solicited byte, and so do we."""
        if not slot.write_stag:
            raise RemoteProtocolError("iSER", "a command that writes advertised no Write STag")
        if not self.qp.ord:
            raise RemoteProtocolError("iSER", "the initiator takes no RDMA Reads (IRD 0)")
        transfer = slot.transfer
        transfer.opcode = RDMA_READ
        transfer.data = sink
        transfer.stag = slot.write_stag
        to = slot.write_base + buffer_offset
        transfer.to = to & 0xFFFFFFFFFFFFFFFF if to >> 64 else to
        slot.sn += 1
        slot.notices = NOTIFY if notify_enable else 0
        slot.busy += 1
        self._queued.append(transfer)

    def send_control(self, slot: TargetSlot, invalidate: bool = False) -> None:
        """Queue the PDU. ``invalidate``: send it with Invalidate of an STag of its command, where
        the initiator allows that."""
        request = slot.request
        request.header_length = self._minimum + slot.inline_length
        request.opcode = self._send
        if invalidate and self.send_invalidate:
            stag = slot.read_stag or slot.write_stag
            if stag:
                request.opcode = self._send_with_invalidate
                request.stag = stag
        slot.busy += 1
        self._queued.append(request)

    def flush(self) -> None:
        while self._queued and self.greeted:
            queued = self._queued
            self._queued = []
            self.qp.post(queued)

    def deallocate_task_resources(self, slot: TargetSlot) -> None:
        slot.read_stag = 0
        slot.write_stag = 0
        slot.transfer.data = None

    def disconnect(self) -> None:
        self.qp.disconnect()

    def connection_terminate(self) -> None:
        self._queued.clear()
        self.qp.close()

    # -- up ---------------------------------------------------------------------------------------

    def progress(self, now: float) -> int:
        """See the seam. Returns the number of completions of all kinds."""
        count = 0
        for _ in range(ROUNDS):
            completions = self.qp.progress(now)
            received = 0
            # In the list is a command, and the answer to one before it, for each two requests to
            # come.
            early = max(EARLY, len(completions) // 4)
            for completion in completions:
                opcode = completion.opcode
                if opcode == RECEIVE:
                    message = completion.data
                    assert message is not None  # the seam promises it for RECEIVE
                    received += 1
                    self._receive(message, completion.invalidated)
                    if len(self._queued) >= early:
                        self.flush()
                else:
                    self._completed(completion.token, opcode)
            count += len(completions)
            if received:
                self.qp.post_receive(received)
            if self.qp.next_deadline() is None:
                return count
            # There is more, or an error, that no descriptor shows.
        self.on_unfinished()
        return count

    def _completed(self, slot: object, opcode: int) -> None:
        if isinstance(slot, _Acknowledgement):
            slot.slot.busy -= 1
            self.user.data_ack_notify(slot.slot, slot.data_sn)
            return
        assert isinstance(slot, TargetSlot)
        slot.busy -= 1
        if RDMA_WRITE <= opcode <= RDMA_READ:
            self._transferred(slot)
        else:
            self.user.sent_notify(slot)

    def _transferred(self, slot: TargetSlot) -> None:
        notices, sn = slot.notices, slot.sn
        slot.notices = 0
        if notices & NOTIFY:
            self.user.data_completion_notify(slot, sn - 1)
        if notices & ACKNOWLEDGE:
            self.user.data_ack_notify(slot, sn)

    def _receive(self, message: memoryview, invalidated: int) -> None:
        behind = len(message) - MINIMUM_LENGTH
        if behind < 0:
            check_message_untrusted(message)  # raises, unless it is a Hello
            self._take_hello(message, invalidated)
            return
        fields: MessageFields = unpack_message(message, 0)
        flags, write_stag, write_base, read_stag, read_base, lengths = fields
        if (
            flags & 0xF0 != CONTROL or length_behind(lengths) > behind
        ) and not check_message_untrusted(message):
            self._take_hello(message, invalidated)
            return
        if invalidated:
            raise RemoteProtocolError("iSER", "an initiator sent a Send with Invalidate")
        self._write_stag = write_stag if flags & WSV else 0
        self._write_base = write_base
        self._read_stag = read_stag if flags & RSV else 0
        self._read_base = read_base
        self.user.control_notify(message, HEADER_LENGTH, 0)

    def _take_hello(self, message: memoryview, invalidated: int) -> None:
        """Answer a Hello, and keep to the RDMA Reads that it declares. Raises RemoteProtocolError
        when it is not the initiator's first message, and when it is none; and behind a HelloReply
        with REJ."""
        if self._waiting is None or invalidated or message[0] & 0xF0 != HELLO:
            raise RemoteProtocolError(
                "iSER", f"unexpected Hello or HelloReply message (byte 0 {message[0]:#04x})"
            )
        length = self._form.length
        greeting = hello.Hello.unpack_untrusted(message, length)
        reply = hello.answer(self._form, greeting, self.qp.ord)
        request = WorkRequest(self._send)
        request.header = self.qp.alloc_headers(1, length)[0]
        request.header.view[:] = reply.pack(length)
        request.header_length = length
        self.qp.post([request])
        if reply.rejected:
            raise RemoteProtocolError(
                "iSER",
                f"the Hello is rejected: versions {greeting.min_version} to "
                f"{greeting.max_version}, {greeting.ird} RDMA Reads at a time; we speak version "
                f"{self._form.version}, and make {self.qp.ord}",
            )
        self.qp.limit_reads(self.qp.ird, reply.ord)
        self.end_greeting()

    def retransmit(self, snack: pdu.SnackRequest) -> tuple[int, int]:
        """There are no SNACKs here (RFC 7145 section 7.3.11)."""
        return pdu.REJECT_PROTOCOL_ERROR, 0

    def forget_kept(self) -> None:
        """Nothing is kept."""

    @property
    def kept_bytes(self) -> int:
        return 0

    @property
    def unacknowledged(self) -> int | None:
        return None

    def tick(self) -> None:
        """Does nothing."""

    def describe(self) -> dict[str, object]:
        return {"datamover": "iser", "header": self._form.length, **self.qp.describe()}

    def fileno(self) -> int:
        return self.qp.fileno()

    def wants_write(self) -> bool:
        return self.qp.wants_write()

    def next_deadline(self) -> float | None:
        return self.qp.next_deadline()


class ZeroBasedTarget(IserTarget):
    """The same with the 12-byte header of RFC 5046, in which an STag has no Base Offset: RDMA
    begins at the Tagged Offset 0."""

    def __init__(self, qp: QueuePair, send_invalidate: bool) -> None:
        super().__init__(qp, send_invalidate)
        self._form = hello.RFC_5046
        self._minimum = ZERO_BASED_MINIMUM

    def _receive(self, message: memoryview, invalidated: int) -> None:
        if not check_zero_based_untrusted(message):
            self._take_hello(message, invalidated)
            return
        if invalidated:
            raise RemoteProtocolError("iSER", "an initiator sent a Send with Invalidate")
        flags, write_stag, read_stag = ZERO_BASED_LAYOUT.unpack_from(message, 0)
        self._write_stag = write_stag if flags & WSV else 0
        self._read_stag = read_stag if flags & RSV else 0
        self.user.control_notify(message, ZERO_BASED_LENGTH, 0)
