"""The tcp datamover of an initiator: Traditional iSCSI (RFC 7143 sections 4.2.5, 11.3 to 11.8).

Data-In is placed into the buffer of its task. A Data-In with a status is notified to the layer
above as the SCSI Response that it stands for. This module answers R2Ts with Data-Outs. Unsolicited
data (immediate data, and the rest of the first burst where InitialR2T=No) goes with the command.
Whatever is missing or damaged ends the connection; see ``tcp_recovering_initiator``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from struct import Struct
from typing import Final

from iserblk.datamover.allocation import Allocation, Event
from iserblk.datamover.arrivals import Gaps
from iserblk.datamover.seam import (
    INLINE,
    InitiatorDatamover,
    InitiatorUser,
    Losses,
    PduSlot,
    not_told,
)
from iserblk.datamover.tcp_stream import NOWHERE, ByteStream, OutPdu, PduReceiver, PduSender
from iserblk.errors import LocalProtocolError, RemoteProtocolError
from iserblk.iscsi import bhs, pdu
from iserblk.iscsi.keys import SessionParameters
from iserblk.scsi.tasks import BIDIRECTIONAL, READ, WRITE

# Of one sequence, that are made; the others when these have left.
_MOST_DATA_OUTS: Final = 64

_DataInFields = tuple[int, int, int, int]
_STAT_SN_OFFSET: Final = 24
_WORD: Final = Struct(">I")
_CHECK_CONDITION: Final = 0x02  # SAM-5; the session reads its sense data


class Transfer:
    """The data transfer of one task. ``source``, ``sink``: Data-Out and Data-In; None where the
    task has none. ``sn``: DataSN or R2TSN of the next Data-In or R2T. ``asked``: offset behind all
    Data-Out that was asked for; ``placed``: behind all Data-In that has come, ``moved`` bytes of
    it. ``unsent``: R2Ts whose Data-Outs have not all left. ``gaps``: what is missing, since
    something was, and ``size``, of the last Data-In, at ErrorRecoveryLevel 1 or more."""

    __slots__ = (
        "asked",
        "gaps",
        "itt",
        "moved",
        "placed",
        "sink",
        "size",
        "sn",
        "source",
        "unsent",
    )

    def __init__(self, source: memoryview | None, sink: memoryview | None, itt: int) -> None:
        self.source = source
        self.sink = sink
        self.itt = itt
        self.sn = 0
        self.asked = 0
        self.placed = 0
        self.moved = 0
        self.size = 0
        self.unsent = 0
        self.gaps: Gaps | None = None

    def contiguous(self) -> tuple[int, int, int]:
        """``sn``, ``placed`` and ``moved`` of the Data-In that have come with none missing before
        them."""
        gaps = self.gaps
        if gaps is None:
            return self.sn, self.placed, self.moved
        return gaps.sn, gaps.placed, gaps.moved

    def forget(self) -> None:
        """From now on the buffers are not touched."""
        if self.source is not None:
            self.source = NOWHERE
        if self.sink is not None:
            self.sink = NOWHERE


class _DataOuts:
    """The rest of a sequence of Data-Outs. Implements Rest. ``exp_stat_sn``: of the time at which
    the sequence was queued. Data-Outs that are made later leave in front of PDUs that were queued
    behind the sequence: a later number would acknowledge what a SNACK among them asks for."""

    __slots__ = (
        "data_sn",
        "datamover",
        "end",
        "exp_stat_sn",
        "lun",
        "offset",
        "source",
        "token",
        "transfer",
        "ttt",
    )

    def __init__(
        self,
        datamover: PlainTcpInitiator,
        transfer: Transfer,
        source: memoryview,
        ttt: int,
        offset: int,
        end: int,
        lun: bytes,
        token: object,
        exp_stat_sn: int,
    ) -> None:
        """See ``PlainTcpInitiator.data_outs``."""
        self.datamover = datamover
        self.transfer = transfer
        self.source = source
        self.ttt = ttt
        self.offset = offset
        self.end = end
        self.lun = lun
        self.token = token
        self.exp_stat_sn = exp_stat_sn
        self.data_sn = 0

    def following(self) -> list[OutPdu]:
        return self.datamover.data_outs(self)


class PlainTcpInitiator:
    """Implements InitiatorDatamover over a byte stream, without recovery."""

    user: InitiatorUser

    def __init__(self, stream: ByteStream, inline_size: int, receive_data: int) -> None:
        """``inline_size``: data bytes that a slot may carry behind its BHS, at most.
        ``receive_data``: the MaxRecvDataSegmentLength that login declares."""
        self.greeted = True  # Traditional iSCSI has no Hello
        # Never called: what ``progress`` leaves is in the socket, whose descriptor shows it.
        self.on_unfinished: Callable[[], None] = not_told
        self.adds_resources = True
        self._stream = stream
        self._ender = "the target"  # by whom the stream ends, if it does
        self._inline_size = inline_size
        self._receive_data = receive_data
        self._rx = PduReceiver(self._place, self._deliver)
        self._tx = PduSender(stream)
        self._tasks: dict[int, Transfer] = {}  # by ITT
        self._placing: Transfer | None = None
        self._exp_stat_sn = 0
        self._allocation = Allocation()
        self._parameters = SessionParameters()
        self._immediate = 0  # bytes of immediate data in a write command, at most
        self._unsolicited = 0  # bytes of unsolicited data of a write, immediate data included
        self.losses = Losses()

    # -- down -------------------------------------------------------------------------------------

    def allocate_connection_resources(self, slots: list[PduSlot], unexpected: int) -> None:
        """See the seam. ``unexpected`` needs no memory: TCP holds back what does not fit."""
        if self._allocation.enter(Event.ALLOCATE) and slots:
            self.add_resources(slots, 0)

    def add_resources(self, slots: list[PduSlot], receives: int) -> None:
        # BHS side by side, and the data in a mapping: pages that no PDU has filled cost nothing.
        size = self._inline_size
        headers = memoryview(bytearray(len(slots) * bhs.BHS_LENGTH))
        inline = memoryview(mmap(-1, len(slots) * size, MAP_PRIVATE | MAP_ANONYMOUS))
        for number, slot in enumerate(slots):
            slot.bhs = headers[number * bhs.BHS_LENGTH : (number + 1) * bhs.BHS_LENGTH]
            slot.inline = inline[number * size : (number + 1) * size]

    def allocate_data_outs(self, count: int, size: int) -> list[PduSlot]:
        """None: ``send_control`` makes them of the task's buffer."""
        return []

    def notice_key_values(self, parameters: SessionParameters) -> None:
        self._parameters = parameters
        if parameters.immediate_data:
            self._immediate = min(
                parameters.first_burst_length, parameters.max_recv_data_segment_length
            )
        self._unsolicited = (
            self._immediate if parameters.initial_r2t else parameters.first_burst_length
        )

    def enable_datamover(self) -> InitiatorDatamover:
        self._allocation.enter(Event.ENABLE)
        header = self._parameters.header_digest == "CRC32C"
        data = self._parameters.data_digest == "CRC32C"
        self._rx.full_feature_phase(self._receive_data, header, data)
        self._tx.full_feature_phase(header, data)
        return self

    def leave_stream(self) -> tuple[bytes, bytes]:
        """The stream belongs to another protocol now. Returns the bytes received behind the last
        PDU, and those still to be sent. Only ``connection_terminate`` is to be called after
        this."""
        return self._rx.take_staged(), self._tx.take_unsent()

    @property
    def queued(self) -> Collection[object]:
        return self._tx.queued

    def send_control(self, slot: PduSlot) -> None:
        direction = slot.direction
        data = slot.data
        header = bytes(slot.bhs)
        if direction == INLINE:
            ahs = header[bhs.LENGTHS_OFFSET] * 4
            header += slot.inline[:ahs]
            self._tx.queued.append(self._tx.frame(header, slot.inline[ahs : slot.inline_length]))
            return
        if direction in (READ, WRITE) and data:
            (itt,) = bhs.ITT.unpack_from(header, bhs.ITT_OFFSET)
            if direction == WRITE:
                transfer = Transfer(data, None, itt)
                self._begin(itt, transfer)
                if self._unsolicited:
                    self._write_unsolicited(transfer, data, header)
                    return
            else:
                self._tasks[itt] = Transfer(None, data, itt)
        elif direction == BIDIRECTIONAL:
            (itt,) = bhs.ITT.unpack_from(header, bhs.ITT_OFFSET)
            transfer = Transfer(data or NOWHERE, slot.data_in or NOWHERE, itt)
            self._begin(itt, transfer)
            header += slot.inline[: slot.inline_length]
        self._tx.queued.append(self._tx.frame(header, None))

    def _begin(self, itt: int, transfer: Transfer) -> None:
        """A task that sends data begins."""
        self._tasks[itt] = transfer

    def reassign(self, slot: PduSlot, control: PduSlot, before: InitiatorDatamover) -> None:
        """See the seam."""
        raise LocalProtocolError("TASK REASSIGN needs ErrorRecoveryLevel 2")

    def _write_unsolicited(self, transfer: Transfer, data: memoryview, header: bytes) -> None:
        """Queue the command of a write with its unsolicited data."""
        immediate = min(self._immediate, len(data))
        most = min(self._unsolicited, len(data))
        patched = bytearray(header)
        bhs.LENGTHS.pack_into(patched, bhs.LENGTHS_OFFSET, immediate)
        if most > immediate:
            patched[1] &= ~bhs.FLAG_FINAL & 0xFF
        transfer.asked = most
        pdus = [self._tx.frame(bytes(patched), data[:immediate], transfer)]
        if most > immediate:
            pdus += self._data_outs(transfer, data, bhs.NO_TAG, immediate, most)
        self._tx.queued.extend(pdus)

    def _data_outs(
        self,
        transfer: Transfer,
        source: memoryview,
        ttt: int,
        offset: int,
        end: int,
        lun: bytes = bhs.NO_LUN,
        token: object = None,
    ) -> list[OutPdu]:
        """The Data-Outs of one sequence. ``token`` comes back when the last of them has left."""
        exp_stat_sn = self._exp_stat_sn
        left = _DataOuts(self, transfer, source, ttt, offset, end, lun, token, exp_stat_sn)
        return self.data_outs(left)

    def data_outs(self, left: _DataOuts) -> list[OutPdu]:
        """The next Data-Outs of ``left``, a few at once."""
        pdus: list[OutPdu] = []
        most = self._parameters.max_recv_data_segment_length
        offset, end = left.offset, left.end
        while offset < end and len(pdus) < _MOST_DATA_OUTS:
            size = min(most, end - offset)
            last = offset + size == end
            header = bhs.DATA_OUT_FIELDS.pack(
                bhs.DATA_OUT,
                bhs.FLAG_FINAL if last else 0,
                size,
                left.lun,
                left.transfer.itt,
                left.ttt,
                left.exp_stat_sn,
                left.data_sn,
                offset,
            )
            data = left.source[offset : offset + size]
            pdus.append(self._tx.frame(header, data, left.transfer, left.token if last else None))
            offset += size
            left.data_sn += 1
        left.offset = offset
        if offset < end:
            pdus[-1].rest = left
        return pdus

    def flush(self) -> bool:
        self._tx.flush()
        return self._tx.blocked

    def deallocate_task_resources(self, slot: PduSlot, invalidated: int) -> None:
        slot.data = None
        slot.data_in = None
        (itt,) = bhs.ITT.unpack_from(slot.bhs, bhs.ITT_OFFSET)
        transfer = self._tasks.pop(itt, None)
        if transfer is None:
            return
        if transfer.source is not None:
            self._tx.disown(transfer)
        if self._placing is transfer:
            self._rx.divert()
        transfer.forget()

    def disconnect(self) -> None:
        self._ender = "this side"
        self._stream.disconnect(discard=True)  # see IwarpQueuePair.disconnect

    def connection_terminate(self) -> None:
        self._tx.close()
        self._rx.divert()
        self._placing = None
        for transfer in self._tasks.values():
            transfer.forget()
        self._tasks = {}

    # -- up ---------------------------------------------------------------------------------------

    def progress(self, now: float) -> int:
        count = self._rx.receive_from(self._stream, self._ender)
        self._tx.resume()
        if self._tx.orphaned:
            raise RemoteProtocolError("iSCSI", "the target ends commands that it has not taken")
        return count

    def _place(self, message: memoryview, at: int) -> memoryview | None:
        """Where to place the data of the PDU at ``at``, for PduReceiver. Checks a Data-In."""
        if message[at] & bhs.OPCODE_MASK != bhs.DATA_IN:
            return None
        fields: _DataInFields = bhs.unpack_data_in_place(message, at)
        lengths, itt, data_sn, offset = fields
        transfer = self._tasks.get(itt)
        sink = None if transfer is None else transfer.sink
        if transfer is None or sink is None:
            raise RemoteProtocolError("iSCSI", f"Data-In for task {itt:#x}: no such read")
        size = lengths & 0xFFFFFF
        if data_sn != transfer.sn:
            raise RemoteProtocolError(
                "iSCSI", f"Data-In with DataSN {data_sn}, expected {transfer.sn}"
            )
        if offset < transfer.placed or offset + size > len(sink):
            raise RemoteProtocolError(
                "iSCSI",
                f"Data-In of {size} bytes at {offset}: {transfer.placed} came before, and the task "
                f"has {len(sink)}",
            )
        transfer.sn += 1
        transfer.placed = offset + size
        transfer.moved += size
        self._placing = transfer
        return sink[offset : offset + size]

    def _deliver(self, message: memoryview, placed: bool) -> None:
        opcode = message[0] & bhs.OPCODE_MASK
        if opcode == bhs.DATA_IN:
            if not placed:  # it has no data, but may carry a status
                self._place(message, 0)
            self._placing = None
            self._data_in(message)
        elif opcode == bhs.R2T:
            self._r2t(pdu.ReadyToTransfer.unpack_from(message))
        else:
            if opcode == bhs.SCSI_RESPONSE:
                self._check_moved(message)
            if opcode != bhs.NOP_IN or bhs.ITT.unpack_from(message, 16)[0] != bhs.NO_TAG:
                self._take_stat_sn(message)
            self.user.control_notify(message, 0, 0)

    def _take_stat_sn(self, message: memoryview) -> None:
        (stat_sn,) = _WORD.unpack_from(message, _STAT_SN_OFFSET)
        self._exp_stat_sn = (stat_sn + 1) & 0xFFFFFFFF

    def _data_in(self, message: memoryview) -> None:
        """Phase collapse (11.7.3): a Data-In with a status becomes a SCSI Response."""
        fields: bhs.ScsiResponseFields = bhs.unpack_scsi_response(message, 0)
        word, _, itt, stat_sn, exp_cmd_sn, max_cmd_sn, residual = fields
        flags = word >> 16 & 0xFF
        if not flags & bhs.DATA_IN_STATUS:
            return
        if not flags & bhs.FLAG_FINAL:
            raise RemoteProtocolError("iSCSI", "a Data-In with a status that is not the last")
        flags &= bhs.RESIDUAL_FLAGS
        status = word & 0xFF
        transfer = self._tasks.get(itt)
        sink = None if transfer is None else transfer.sink
        if transfer is not None and sink is not None:
            if transfer.source is not None:
                raise RemoteProtocolError(
                    "iSCSI", "a Data-In with the status of a bidirectional task"
                )
            missing = len(sink) - transfer.moved  # see _check_moved
            reported = residual if flags & bhs.RESIDUAL_UNDERFLOW else 0
            if missing > reported and status in (0, _CHECK_CONDITION):
                flags, residual = bhs.RESIDUAL_UNDERFLOW, missing
        word = bhs.SCSI_RESPONSE << 24 | (bhs.FLAG_FINAL | flags) << 16 | status
        bhs.pack_scsi_response(message, 0, word, 0, itt, stat_sn, exp_cmd_sn, max_cmd_sn, residual)
        self._exp_stat_sn = (stat_sn + 1) & 0xFFFFFFFF
        self.user.control_notify(message, 0, 0)

    def _check_moved(self, message: memoryview) -> None:
        """Set the underflow of a read from the bytes that have come, where the target reports less.

        So a read that lacks data never passes as whole. This holds for GOOD and for CHECK
        CONDITION, whose command may have been carried out."""
        (itt,) = bhs.ITT.unpack_from(message, bhs.ITT_OFFSET)
        transfer = self._tasks.get(itt)
        sink = None if transfer is None else transfer.sink
        if transfer is None or sink is None or message[2]:
            return
        if message[3] and message[3] != _CHECK_CONDITION:
            return
        missing = len(sink) - transfer.moved
        place, underflow, flags = bhs.RESIDUAL_OFFSET, bhs.RESIDUAL_UNDERFLOW, bhs.RESIDUAL_FLAGS
        if transfer.source is not None:  # that of the read transfer has a place of its own
            place, underflow, flags = bhs.BIDI_RESIDUAL_OFFSET, bhs.BIDI_UNDERFLOW, bhs.BIDI_FLAGS
        (residual,) = _WORD.unpack_from(message, place)
        if not message[1] & underflow:
            residual = 0
        if missing > residual:
            message[1] = message[1] & ~flags & 0xFF | underflow
            _WORD.pack_into(message, place, missing)

    def _r2t(self, r2t: pdu.ReadyToTransfer) -> None:
        transfer = self._tasks.get(r2t.itt)
        source = None if transfer is None else transfer.source
        if transfer is None or source is None:
            raise RemoteProtocolError("iSCSI", f"R2T for task {r2t.itt:#x}: no such write")
        if r2t.r2t_sn != transfer.sn:
            raise RemoteProtocolError("iSCSI", f"R2TSN {r2t.r2t_sn}, expected {transfer.sn}")
        self._answer_r2t(r2t, transfer, source, transfer.asked, 0)
        transfer.sn += 1

    def _answer_r2t(
        self,
        r2t: pdu.ReadyToTransfer,
        transfer: Transfer,
        source: memoryview,
        lowest: int,
        more: int,
    ) -> None:
        """Queue the Data-Outs that ``r2t`` asks for. ``lowest``: offset from which on it may.
        ``more``: R2Ts allowed beyond MaxOutstandingR2T."""
        end = r2t.buffer_offset + r2t.desired_length
        most = self._parameters.max_burst_length
        if (
            not 0 < r2t.desired_length <= most
            or r2t.buffer_offset < lowest
            or end > len(source)
            or r2t.ttt == bhs.NO_TAG
        ):
            raise RemoteProtocolError(
                "iSCSI",
                f"R2T for {r2t.desired_length} bytes at {r2t.buffer_offset}: {transfer.asked} are "
                f"sent or asked for, the task has {len(source)}, a burst {most}",
            )
        self._settle_sent()
        if transfer.unsent >= self._parameters.max_outstanding_r2t + more:
            raise RemoteProtocolError("iSCSI", "more R2Ts than MaxOutstandingR2T")
        transfer.asked = end
        transfer.unsent += 1
        self._tx.queued.extend(
            self._data_outs(transfer, source, r2t.ttt, r2t.buffer_offset, end, r2t.lun, transfer)
        )

    def _settle_sent(self) -> None:
        sent = self._tx.sent
        while sent:
            transfer = sent.popleft()
            assert isinstance(transfer, Transfer)
            transfer.unsent -= 1

    def tick(self) -> None:
        """See the seam: nothing is asked for."""

    def describe(self) -> dict[str, object]:
        parameters = self._parameters
        return {
            "datamover": "tcp",
            **self._stream.describe(),
            "header_digest": parameters.header_digest,
            "data_digest": parameters.data_digest,
        }

    def fileno(self) -> int:
        return self._stream.fileno()

    def wants_write(self) -> bool:
        return self._tx.blocked
