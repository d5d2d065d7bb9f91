"""The iSER datamover of a target, on any queue pair (RFC 7145 sections 7.3.5, 7.3.6, 9).

Put_Data becomes an RDMA Write, Get_Data an RDMA Read. A SCSI Response becomes a Send with
Invalidate of an STag that its command advertised, where the initiator allows that.

Work requests are queued. ``flush`` posts all that one turn of the event loop has queued at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from iserblk.datamover.iser import (
    BHS_LENGTH,
    CONTROL,
    CONTROL_LAYOUT,
    HEADER_LENGTH,
    MINIMUM_LENGTH,
    RSV,
    WSV,
    check_message_untrusted,
)
from iserblk.datamover.seam import SessionNumbers, TargetSlot, TargetUser
from iserblk.errors import RemoteProtocolError
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
# still carried out. With more the initiator would have nothing to do until all are.
EARLY: Final = 16


class IserTarget:
    """Implements TargetDatamover for one connection."""

    user: TargetUser

    def __init__(self, qp: QueuePair, send_invalidate: bool) -> None:
        """``send_invalidate``: the initiator allows Send with Invalidate."""
        self.qp = qp
        self.send_invalidate = send_invalidate
        self._send = SEND_SE if qp.solicits else SEND
        self._send_with_invalidate = SEND_SE_INVALIDATE if qp.solicits else SEND_INVALIDATE
        self._queued: list[WorkRequest] = []
        # What the command being notified advertised: its Local and Remote Mapping (RFC 7145
        # section 7.3.1).
        self._write_stag = 0
        self._write_base = 0
        self._read_stag = 0
        self._read_base = 0

    # -- down -------------------------------------------------------------------------------------

    def allocate_connection_resources(
        self, slots: Sequence[TargetSlot], inline_size: int, receives: int
    ) -> None:
        headers = self.qp.alloc_headers(len(slots), MINIMUM_LENGTH + inline_size)
        for slot, header in zip(slots, headers, strict=True):
            slot.header = header
            slot.bhs = header.view[HEADER_LENGTH : HEADER_LENGTH + BHS_LENGTH]
            slot.inline = header.view[MINIMUM_LENGTH:]
            slot.request.header = header
            slot.request.signaled = True
        self.qp.post_receive(receives)

    def notice_key_values(self, parameters: SessionParameters) -> None:
        if parameters.max_ulpdu:
            self.qp.allow_ulpdu(parameters.max_ulpdu)

    def enable_datamover(self) -> None:
        """Does nothing: the connection is iSER from its start, and login travels in Sends."""

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

    def put_data(self, slot: TargetSlot, data: memoryview, buffer_offset: int) -> None:
        """Queue an RDMA Write to the buffer that the command advertised for reading."""
        if not slot.read_stag:
            raise RemoteProtocolError("iSER", "a command that reads advertised no Read STag")
        transfer = slot.transfer
        transfer.opcode = RDMA_WRITE
        transfer.data = data
        transfer.stag = slot.read_stag
        transfer.to = (slot.read_base + buffer_offset) & 0xFFFFFFFFFFFFFFFF
        self._queued.append(transfer)

    def get_data(self, slot: TargetSlot, sink: memoryview, buffer_offset: int) -> None:
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
        transfer.to = (slot.write_base + buffer_offset) & 0xFFFFFFFFFFFFFFFF
        slot.busy += 1
        self._queued.append(transfer)

    def send_control(self, slot: TargetSlot, invalidate: bool = False) -> None:
        """Queue the PDU. ``invalidate``: send it with Invalidate of an STag of its command, where
        the initiator allows that."""
        CONTROL_LAYOUT.pack_into(slot.header.view, 0, CONTROL, 0, 0, 0, 0)
        request = slot.request
        request.header_length = MINIMUM_LENGTH + slot.inline_length
        request.opcode = self._send
        if invalidate and self.send_invalidate:
            stag = slot.read_stag or slot.write_stag
            if stag:
                request.opcode = self._send_with_invalidate
                request.stag = stag
        slot.busy += 1
        self._queued.append(request)

    def flush(self) -> None:
        while self._queued:
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
        completions = self.qp.progress(now)
        received = 0
        for completion in completions:
            opcode = completion.opcode
            if opcode == RECEIVE:
                message = completion.data
                assert message is not None  # the seam promises it for RECEIVE
                received += 1
                self._receive(message, completion.invalidated)
                if len(self._queued) >= EARLY:
                    self.flush()
            else:
                slot = completion.token
                assert isinstance(slot, TargetSlot)
                slot.busy -= 1
                if opcode == RDMA_READ:
                    self.user.data_completion_notify(slot)
                else:
                    self.user.sent_notify(slot)
        if received:
            self.qp.post_receive(received)
        if self.qp.next_deadline() is not None:  # more, or an error, that no descriptor shows
            return len(completions) + self.progress(now)
        return len(completions)

    def _receive(self, message: memoryview, invalidated: int) -> None:
        check_message_untrusted(message)
        if invalidated:
            raise RemoteProtocolError("iSER", "an initiator sent a Send with Invalidate")
        flags, write_stag, write_base, read_stag, read_base = CONTROL_LAYOUT.unpack_from(message, 0)
        self._write_stag = write_stag if flags & WSV else 0
        self._write_base = write_base
        self._read_stag = read_stag if flags & RSV else 0
        self._read_base = read_base
        self.user.control_notify(message, HEADER_LENGTH, 0)

    def describe(self) -> dict[str, object]:
        return {"datamover": "iser", "header": HEADER_LENGTH, **self.qp.describe()}

    def fileno(self) -> int:
        return self.qp.fileno()

    def wants_write(self) -> bool:
        return self.qp.wants_write()

    def next_deadline(self) -> float | None:
        return self.qp.next_deadline()
