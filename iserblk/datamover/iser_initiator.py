"""The iSER datamover of an initiator, on any queue pair (RFC 7145 sections 7.3, 9).

The command of a read or write is one Send that advertises an STag for the task's buffer. The target
moves the data. The response (Send, or Send with Invalidate) ends the task. The data of a write that
fits into the PDU travels in the PDU, and the command advertises no STag.
"""

from __future__ import annotations

from collections import deque

from iserblk.datamover.iser import (
    BHS_LENGTH,
    CONTROL,
    CONTROL_LAYOUT,
    HEADER_LENGTH,
    LENGTHS,
    LENGTHS_OFFSET,
    MINIMUM_LENGTH,
    RSV,
    WSV,
    ConnectionFlags,
    check_message_untrusted,
)
from iserblk.datamover.seam import INLINE, READ, WRITE, InitiatorUser, PduSlot
from iserblk.errors import RemoteProtocolError
from iserblk.iscsi.keys import SessionParameters
from iserblk.rcap.seam import (
    RECEIVE,
    REMOTE_READ,
    REMOTE_WRITE,
    SEND,
    SEND_SE,
    QueuePair,
    WorkRequest,
)


class IserInitiator:
    """Implements InitiatorDatamover over a queue pair."""

    user: InitiatorUser

    def __init__(self, qp: QueuePair, inline_size: int) -> None:
        """``inline_size``: data bytes that a PDU of ours may carry behind its BHS, at most."""
        self.qp = qp
        # Whether both ends allow Send with Invalidate towards us, by their private data.
        self._invalidates = (
            qp.can_receive_invalidate
            and ConnectionFlags.unpack(qp.peer_private_data).send_invalidate
        )
        self._inline_size = inline_size
        self._send = SEND_SE if qp.solicits else SEND
        # Submitting threads append, the thread that flushes pops: both operations are atomic.
        self.queued: deque[WorkRequest] = deque()

    # -- down -------------------------------------------------------------------------------------

    def allocate_connection_resources(self, slots: list[PduSlot], unexpected: int) -> None:
        headers = self.qp.alloc_headers(len(slots), MINIMUM_LENGTH + self._inline_size)
        for slot, header in zip(slots, headers, strict=True):
            slot.header = header
            slot.bhs = header.view[HEADER_LENGTH : HEADER_LENGTH + BHS_LENGTH]
            slot.inline = header.view[MINIMUM_LENGTH:]
            slot.request.opcode = self._send
            slot.request.header = header
        self.qp.post_receive(len(slots) + unexpected)

    def notice_key_values(self, parameters: SessionParameters) -> None:
        if parameters.max_ulpdu:
            self.qp.allow_ulpdu(parameters.max_ulpdu)

    def enable_datamover(self) -> None:
        """Does nothing: the connection is iSER from its start, and login travels in Sends."""

    def send_control(self, slot: PduSlot) -> None:
        data = slot.data
        direction = slot.direction
        header = slot.header.view
        length = MINIMUM_LENGTH
        if direction == READ and data is not None:
            slot.stag, slot.base = self.qp.advertise(data, REMOTE_WRITE)
            CONTROL_LAYOUT.pack_into(header, 0, CONTROL | RSV, 0, 0, slot.stag, slot.base)
        elif direction == WRITE and data is not None:
            slot.stag, slot.base = self.qp.advertise(data, REMOTE_READ)
            CONTROL_LAYOUT.pack_into(header, 0, CONTROL | WSV, slot.stag, slot.base, 0, 0)
        else:
            CONTROL_LAYOUT.pack_into(header, 0, CONTROL, 0, 0, 0, 0)
            if direction == INLINE:
                length += slot.inline_length
        slot.request.header_length = length
        self.queued.append(slot.request)

    def flush(self) -> bool:
        queued = self.queued
        while queued:
            self.qp.post([queued.popleft() for _ in range(len(queued))])
        return True

    def deallocate_task_resources(self, slot: PduSlot, invalidated: int) -> None:
        stag = slot.stag
        slot.data = None
        if stag:
            slot.stag = 0
            # Where the response has invalidated it already, retire does not do so again.
            self.qp.retire(stag)
        if not invalidated:
            return
        if not self._invalidates:
            raise RemoteProtocolError(
                "iSER", f"response invalidated STag {invalidated:#x}, which was not agreed on"
            )
        if invalidated != stag:
            raise RemoteProtocolError(
                "iSER", f"response invalidated STag {invalidated:#x}, which is not its task's"
            )

    def disconnect(self) -> None:
        self.qp.disconnect()

    def connection_terminate(self) -> None:
        # ``queued`` is not cleared: another thread may be popping from it; its post then raises.
        self.qp.close()

    # -- up ---------------------------------------------------------------------------------------

    def progress(self, now: float) -> int:
        completions = self.qp.progress(now)
        received = 0
        notify = self.user.control_notify
        for completion in completions:
            if completion.opcode == RECEIVE:
                message = completion.data
                assert message is not None  # the seam promises it for RECEIVE
                received += 1
                # The common case in one test: a control header and a BHS without AHS and data.
                if (
                    len(message) != MINIMUM_LENGTH
                    or message[0] != CONTROL
                    or LENGTHS.unpack_from(message, LENGTHS_OFFSET)[0]
                ):
                    check_message_untrusted(message)
                notify(message, HEADER_LENGTH, completion.invalidated)
        if received:
            self.qp.post_receive(received)
        if self.qp.next_deadline() is not None:  # more, or an error, that no descriptor shows
            received += self.progress(now)
        return received

    def describe(self) -> dict[str, object]:
        return {"datamover": "iser", "header": HEADER_LENGTH, **self.qp.describe()}

    def fileno(self) -> int:
        return self.qp.fileno()

    def wants_write(self) -> bool:
        return self.qp.wants_write()
