"""The iSER datamover of an initiator, on any queue pair (RFC 7145 sections 7.3, 9).

The command of a read or write is one Send that advertises an STag for the task's buffer. The target
moves the data. The response (Send, or Send with Invalidate) ends the task. The data of a write that
fits into the PDU travels in the PDU, or in SCSI Data-Outs behind it, and the command advertises no
STag.

Where login has agreed on it, the connection begins with Hello and HelloReply (module ``hello``).
``ZeroBasedInitiator`` speaks the 12-byte header of RFC 5046.
"""

from __future__ import annotations

from collections.abc import Callable

from iserblk.datamover import hello
from iserblk.datamover.allocation import Allocation, Event
from iserblk.datamover.iser import (
    BHS_LENGTH,
    CONTROL,
    HEADER_LENGTH,
    MINIMUM_LENGTH,
    RSV,
    WSV,
    ZERO_BASED_LAYOUT,
    ZERO_BASED_LENGTH,
    ZERO_BASED_MINIMUM,
    ConnectionFlags,
    MessageEnds,
    check_message_untrusted,
    check_zero_based_untrusted,
    pack_control,
    unpack_ends,
)
from iserblk.datamover.seam import (
    INLINE,
    ROUNDS,
    UNSOLICITED,
    InitiatorDatamover,
    InitiatorUser,
    Losses,
    PduSlot,
    not_told,
)
from iserblk.errors import Busy, LocalProtocolError, RemoteProtocolError
from iserblk.iscsi import bhs
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
from iserblk.scsi.tasks import BIDIRECTIONAL, READ, WRITE


class _BeforeReply:
    """Takes the place of the layer above while the HelloReply is awaited, so that no PDU costs a
    look at whether it is."""

    def __init__(self, user: InitiatorUser) -> None:
        self.user = user

    def control_notify(self, message: memoryview, at: int, invalidated: int) -> None:
        raise RemoteProtocolError("iSER", "the target's first message is no HelloReply")

    def sent_notify(self, slot: PduSlot) -> None:
        self.user.sent_notify(slot)


class IserInitiator:
    """Implements InitiatorDatamover over a queue pair, with the 28-byte header of RFC 7145."""

    user: InitiatorUser

    def __init__(self, qp: QueuePair, inline_size: int, style: str = "cm") -> None:
        """``inline_size``: data bytes that a PDU of ours may carry behind its BHS, at most.
        ``style``: how the connection began, for ``describe``: iSER from its start (``cm``), or as a
        byte stream (``stream``)."""
        self.qp = qp
        # Whether the target may use Send with Invalidate. It says so by private data; where it has
        # sent none (by RFC 7145 alone there is none), we can take it if our STags allow that.
        said = qp.peer_private_data
        self._invalidates = qp.can_receive_invalidate and (
            not said or ConnectionFlags.unpack(said).send_invalidate
        )
        self.greeted = True
        self.on_unfinished: Callable[[], None] = not_told
        self.losses = Losses()  # there are none
        self._form = hello.RFC_7145
        self._minimum = MINIMUM_LENGTH
        self._begins_with_hello = False
        self._hello = hello.greeting(self._form, 0)  # as it was sent
        self._awaiting: _BeforeReply | None = None
        self._said_hello = False
        self._style = style
        self.inline_size = inline_size
        self._send = SEND_SE if qp.solicits else SEND
        self._allocation = Allocation()
        self.queued: list[WorkRequest] = []

    # -- down -------------------------------------------------------------------------------------

    def allocate_connection_resources(self, slots: list[PduSlot], unexpected: int) -> None:
        if not self._allocation.enter(Event.ALLOCATE):
            return
        self._give_memory(slots, self.inline_size)
        self.qp.post_receive(len(slots) + unexpected)

    @property
    def adds_resources(self) -> bool:
        return self.qp.plain_headers

    def add_resources(self, slots: list[PduSlot], receives: int) -> None:
        self._give_memory(slots, self.inline_size)
        self.qp.post_receive(receives)

    def _give_memory(self, slots: list[PduSlot], size: int) -> None:
        start = self._form.length
        headers = self.qp.alloc_headers(len(slots), start + BHS_LENGTH + size)
        for slot, header in zip(slots, headers, strict=True):
            slot.header = header
            slot.bhs = header.view[start : start + BHS_LENGTH]
            slot.inline = header.view[start + BHS_LENGTH :]
            slot.request.opcode = self._send
            slot.request.header = header

    def allocate_data_outs(self, count: int, size: int) -> list[PduSlot]:
        """See the seam. The target answers none of them, so each tells when it has left."""
        slots = [PduSlot(index) for index in range(count)]
        self._give_memory(slots, size)
        for slot in slots:
            slot.request.signaled = True
        return slots

    def notice_key_values(self, parameters: SessionParameters) -> None:
        if parameters.max_ulpdu:
            self.qp.allow_ulpdu(parameters.max_ulpdu)
        if parameters.rdma_extensions:
            required = parameters.iser_hello_required
            self._begins_with_hello = self._form.without_key if required is None else required

    def enable_datamover(self) -> InitiatorDatamover:
        """See the seam. Queues the Hello, if there is one. Else there is nothing to do: the RCaP is
        there already."""
        self._allocation.enter(Event.ENABLE)
        if not self._begins_with_hello:
            return self
        length = self._form.length
        self._hello = hello.greeting(self._form, self.qp.ird)
        request = WorkRequest(self._send)
        request.header = self.qp.alloc_headers(1, length)[0]
        request.header.view[:] = self._hello.pack(length)
        request.header_length = length
        self._awaiting = _BeforeReply(self.user)
        self.user = self._awaiting
        self.greeted = False
        self._said_hello = True
        self.qp.post_receive(1)  # for the HelloReply, which counts as no PDU
        self.queued.append(request)
        return self

    def send_control(self, slot: PduSlot) -> None:
        data = slot.data
        direction = slot.direction
        length = self._minimum
        if direction == READ and data is not None:
            slot.stag, slot.base = self.qp.advertise(data, REMOTE_WRITE)
            self._pack_header(slot, CONTROL | RSV, 0, 0, slot.stag, slot.base)
        elif direction == WRITE and data is not None:
            slot.stag, slot.base = self.qp.advertise(data, REMOTE_READ)
            self._pack_header(slot, CONTROL | WSV, slot.stag, slot.base, 0, 0)
        elif direction == BIDIRECTIONAL:
            base_in = self._advertise_both(slot)
            flags = CONTROL | (WSV if slot.stag else 0) | (RSV if slot.stag_in else 0)
            self._pack_header(slot, flags, slot.stag, slot.base, slot.stag_in, base_in)
            length += slot.inline_length
        else:
            self._pack_header(slot, CONTROL, 0, 0, 0, 0)
            if direction == INLINE:
                length += slot.inline_length
            elif direction == UNSOLICITED:
                length += slot.inline_length
                slot.request.opcode = self._data_out_opcode(slot)
        slot.request.header_length = length
        self.queued.append(slot.request)

    def reassign(self, slot: PduSlot, control: PduSlot, before: InitiatorDatamover) -> None:
        """See the seam. A write advertises its whole buffer, also where its data had gone with its
        command: some of it may be missing at the target."""
        data = slot.data
        flags, read_stag, read_base = CONTROL, 0, 0
        slot.stag = slot.stag_in = slot.base = 0
        if slot.direction == BIDIRECTIONAL:
            read_base = self._advertise_both(slot)
            read_stag = slot.stag_in
            flags |= (WSV if slot.stag else 0) | (RSV if read_stag else 0)
            self._pack_header(control, flags, slot.stag, slot.base, read_stag, read_base)
        elif slot.direction == READ and data is not None:
            slot.stag, slot.base = self.qp.advertise(data, REMOTE_WRITE)
            self._pack_header(control, CONTROL | RSV, 0, 0, slot.stag, slot.base)
        elif slot.direction == WRITE and data is not None:
            slot.stag, slot.base = self.qp.advertise(data, REMOTE_READ)
            self._pack_header(control, CONTROL | WSV, slot.stag, slot.base, 0, 0)
        else:
            self._pack_header(control, CONTROL, 0, 0, 0, 0)
        control.request.header_length = self._minimum
        self.queued.append(control.request)

    def _pack_header(
        self,
        slot: PduSlot,
        flags: int,
        write_stag: int,
        write_base: int,
        read_stag: int,
        read_base: int,
    ) -> None:
        pack_control(slot.header.view, 0, flags, write_stag, write_base, read_stag, read_base)

    def _data_out_opcode(self, slot: PduSlot) -> int:
        """Only the last Data-Out of a write asks for an event: before it the target has nothing to
        do (section 7.3.4)."""
        return self._send if slot.bhs[1] & bhs.FLAG_FINAL else SEND

    def _advertise_both(self, slot: PduSlot) -> int:
        """Advertise the two buffers of a bidirectional command, as far as they have any bytes;
        returns the Base Offset of Data-In. Raises as ``send_control``; then neither is
        advertised."""
        slot.base = base_in = 0
        if slot.data:
            slot.stag, slot.base = self.qp.advertise(slot.data, REMOTE_READ)
        if slot.data_in:
            try:
                slot.stag_in, base_in = self.qp.advertise(slot.data_in, REMOTE_WRITE)
            except Busy:
                if slot.stag:
                    self.qp.retire(slot.stag)
                    slot.stag = 0
                raise
        return base_in

    def flush(self) -> bool:
        queued = self.queued
        if queued:
            self.queued = []
            self.qp.post(queued)
        return self.qp.wants_write()

    def deallocate_task_resources(self, slot: PduSlot, invalidated: int) -> None:
        stag = slot.stag
        slot.data = None
        if stag:
            slot.stag = 0
            # Where the response has invalidated it already, retire does not do so again.
            self.qp.retire(stag)
        if slot.data_in is not None:
            # A response can invalidate one of two STags only, the Read STag; the Write STag was
            # retired above (section 7.3.2).
            slot.data_in = None
            if slot.stag_in:
                stag, slot.stag_in = slot.stag_in, 0
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
        self.qp.close()

    # -- up ---------------------------------------------------------------------------------------

    def progress(self, now: float) -> int:
        count = 0
        for _ in range(ROUNDS):
            completions = self.qp.progress(now)
            received = 0
            for completion in completions:
                if completion.opcode == RECEIVE:
                    message = completion.data
                    assert message is not None  # the seam promises it for RECEIVE
                    received += 1
                    self._receive(message, completion.invalidated)
                else:
                    slot = completion.token
                    assert isinstance(slot, PduSlot)  # of ``allocate_data_outs``
                    self.user.sent_notify(slot)
            if received:
                count += received
                self.qp.post_receive(received)
            if self.qp.next_deadline() is None:
                return count
            # There is more, or an error, that no descriptor shows.
        self.on_unfinished()
        return count

    def _receive(self, message: memoryview, invalidated: int) -> None:
        # The common case: a control header and a BHS without AHS and data.
        if len(message) == MINIMUM_LENGTH:
            ends: MessageEnds = unpack_ends(message, 0)
            first, lengths = ends
            if first == CONTROL and not lengths:
                self.user.control_notify(message, HEADER_LENGTH, invalidated)
                return
        if not check_message_untrusted(message):
            self._take_reply(message, invalidated)
        else:
            self.user.control_notify(message, HEADER_LENGTH, invalidated)

    def _take_reply(self, message: memoryview, invalidated: int) -> None:
        """Take a HelloReply. The IRD becomes what the target makes use of. Raises
        RemoteProtocolError when it is not the time for one, when it is none, and for REJ."""
        awaiting = self._awaiting
        if awaiting is None or invalidated:
            raise RemoteProtocolError(
                "iSER", f"unexpected Hello or HelloReply message (byte 0 {message[0]:#04x})"
            )
        reply = hello.HelloReply.unpack_untrusted(message, self._form.length)
        hello.check_reply_untrusted(self._form, self._hello, reply)
        self.qp.limit_reads(min(self.qp.ird, reply.ord), self.qp.ord)
        self.user = awaiting.user
        self._awaiting = None
        self.greeted = True

    def tick(self) -> None:
        """Does nothing: the RCaP loses nothing."""

    def describe(self) -> dict[str, object]:
        return {
            "datamover": "iser",
            "style": self._style,
            "header": self._form.length,
            "hello": self._said_hello,
            **self.qp.describe(),
        }

    def fileno(self) -> int:
        return self.qp.fileno()

    def wants_write(self) -> bool:
        return self.qp.wants_write()


class ZeroBasedInitiator(IserInitiator):
    """The same with the 12-byte header of RFC 5046, in which an STag has no Base Offset: RDMA of
    the target begins at the Tagged Offset 0. For queue pairs whose STags are so, as those of
    software iWARP are."""

    def __init__(self, qp: QueuePair, inline_size: int, style: str = "cm") -> None:
        super().__init__(qp, inline_size, style)
        self._form = hello.RFC_5046
        self._minimum = ZERO_BASED_MINIMUM

    def _pack_header(
        self,
        slot: PduSlot,
        flags: int,
        write_stag: int,
        write_base: int,
        read_stag: int,
        read_base: int,
    ) -> None:
        if write_base or read_base:
            raise LocalProtocolError("the 12-byte iSER header needs STags that are zero-based")
        ZERO_BASED_LAYOUT.pack_into(slot.header.view, 0, flags, write_stag, read_stag)

    def _receive(self, message: memoryview, invalidated: int) -> None:
        if not check_zero_based_untrusted(message):
            self._take_reply(message, invalidated)
        else:
            self.user.control_notify(message, ZERO_BASED_LENGTH, invalidated)
