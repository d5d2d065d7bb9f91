"""The tcp datamover of an initiator: Traditional iSCSI (RFC 7143 sections 4.2.5, 11.3 to 11.8).

Data-In is placed into the buffer of its task. A Data-In with a status is notified to the layer
above as the SCSI Response that it stands for. This module answers R2Ts with Data-Outs. Unsolicited
data (immediate data, and the rest of the first burst where InitialR2T=No) goes with the command.
"""

from __future__ import annotations

from collections.abc import Collection
from struct import Struct
from typing import Final

from iserblk.datamover.allocation import Allocation, Event
from iserblk.datamover.seam import (
    BIDIRECTIONAL,
    INLINE,
    READ,
    WRITE,
    InitiatorDatamover,
    InitiatorUser,
    PduSlot,
)
from iserblk.datamover.tcp_stream import NOWHERE, ByteStream, OutPdu, PduReceiver, PduSender
from iserblk.errors import RemoteProtocolError
from iserblk.iscsi import bhs, pdu
from iserblk.iscsi.keys import SessionParameters

STATUS_FLAG: Final = 0x01  # S bit of a Data-In: it carries the status

# A Data-In: DataSegmentLength, ITT, DataSN, Buffer Offset.
_DATA_IN: Final = Struct(">4xI8xI16xII")
# A Data-Out: opcode, flags, DataSegmentLength, LUN, ITT, TTT, ExpStatSN, DataSN, Buffer Offset.
_DATA_OUT: Final = Struct(">BBxxI8sII4xI4xII4x")
_NO_LUN: Final = bytes(8)  # the field is reserved where there is no Target Transfer Tag (11.7.4)
_RESIDUAL_OFFSET: Final = 44
_STAT_SN_OFFSET: Final = 24
_WORD: Final = Struct(">I")
_CHECK_CONDITION: Final = 0x02  # SAM-5; the session reads its sense data


class _Transfer:
    """The data transfer of one task. ``source``, ``sink``: Data-Out and Data-In; None where the
    task has none. ``sn``: DataSN or R2TSN of the next Data-In or R2T. ``asked``: offset behind all
    Data-Out that was asked for; ``placed``: behind all Data-In that has come, ``moved`` bytes of
    it. ``unsent``: R2Ts whose Data-Outs have not all left."""

    __slots__ = ("asked", "itt", "moved", "placed", "sink", "sn", "source", "unsent")

    def __init__(self, source: memoryview | None, sink: memoryview | None, itt: int) -> None:
        self.source = source
        self.sink = sink
        self.itt = itt
        self.sn = 0
        self.asked = 0
        self.placed = 0
        self.moved = 0
        self.unsent = 0

    def forget(self) -> None:
        """From now on the buffers are not touched."""
        if self.source is not None:
            self.source = NOWHERE
        if self.sink is not None:
            self.sink = NOWHERE


class TcpInitiator:
    """Implements InitiatorDatamover over a byte stream."""

    user: InitiatorUser

    def __init__(self, stream: ByteStream, inline_size: int, receive_data: int) -> None:
        """``inline_size``: data bytes that a slot may carry behind its BHS, at most.
        ``receive_data``: the MaxRecvDataSegmentLength that login declares."""
        self.greeted = True  # Traditional iSCSI has no Hello
        self._stream = stream
        self._inline_size = inline_size
        self._receive_data = receive_data
        self._rx = PduReceiver(self._place, self._deliver)
        self._tx = PduSender(stream)
        self._tasks: dict[int, _Transfer] = {}  # by ITT
        self._placing: _Transfer | None = None
        self._exp_stat_sn = 0
        self._allocation = Allocation()
        self._parameters = SessionParameters()
        self._immediate = 0  # bytes of immediate data in a write command, at most
        self._unsolicited = 0  # bytes of unsolicited data of a write, immediate data included

    # -- down -------------------------------------------------------------------------------------

    def allocate_connection_resources(self, slots: list[PduSlot], unexpected: int) -> None:
        """See the seam. ``unexpected`` needs no memory: TCP holds back what does not fit."""
        if not self._allocation.enter(Event.ALLOCATE):
            return
        for slot in slots:
            memory = memoryview(bytearray(bhs.BHS_LENGTH + self._inline_size))
            slot.bhs = memory[: bhs.BHS_LENGTH]
            slot.inline = memory[bhs.BHS_LENGTH :]

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
                self._tasks[itt] = transfer = _Transfer(data, None, itt)
                if self._unsolicited:
                    self._write_unsolicited(transfer, data, header)
                    return
            else:
                self._tasks[itt] = _Transfer(None, data, itt)
        elif direction == BIDIRECTIONAL:
            (itt,) = bhs.ITT.unpack_from(header, bhs.ITT_OFFSET)
            self._tasks[itt] = _Transfer(data or NOWHERE, slot.data_in or NOWHERE, itt)
            header += slot.inline[: slot.inline_length]
        self._tx.queued.append(self._tx.frame(header, None))

    def _write_unsolicited(self, transfer: _Transfer, data: memoryview, header: bytes) -> None:
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
        # In the order of the commands, because the caller holds its lock.
        self._tx.queued.extend(pdus)

    def _data_outs(
        self,
        transfer: _Transfer,
        source: memoryview,
        ttt: int,
        offset: int,
        end: int,
        lun: bytes = _NO_LUN,
        token: object = None,
    ) -> list[OutPdu]:
        """The Data-Outs of one sequence. ``token`` comes back when the last of them has left."""
        pdus = []
        most = self._parameters.max_recv_data_segment_length
        data_sn = 0
        while offset < end:
            size = min(most, end - offset)
            last = offset + size == end
            header = _DATA_OUT.pack(
                bhs.DATA_OUT,
                bhs.FLAG_FINAL if last else 0,
                size,
                lun,
                transfer.itt,
                ttt,
                self._exp_stat_sn,
                data_sn,
                offset,
            )
            data = source[offset : offset + size]
            pdus.append(self._tx.frame(header, data, transfer, token if last else None))
            offset += size
            data_sn += 1
        return pdus

    def flush(self) -> bool:
        return self._tx.flush()

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
        self._stream.disconnect(discard=True)  # see IwarpQueuePair.disconnect

    def connection_terminate(self) -> None:
        self._tx.close()
        self._rx.divert()
        for transfer in self._tasks.values():
            transfer.forget()
        self._tasks.clear()

    # -- up ---------------------------------------------------------------------------------------

    def progress(self, now: float) -> int:
        count = self._rx.receive_from(self._stream, "the target")
        self._tx.resume()
        return count

    def _place(self, message: memoryview, at: int) -> memoryview | None:
        """Where to place the data of the PDU at ``at``, for PduReceiver. Checks a Data-In."""
        if message[at] & bhs.OPCODE_MASK != bhs.DATA_IN:
            return None
        lengths, itt, data_sn, offset = _DATA_IN.unpack_from(message, at)
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
        flags = message[1]
        if not flags & STATUS_FLAG:
            return
        if not flags & bhs.FLAG_FINAL:
            raise RemoteProtocolError("iSCSI", "a Data-In with a status that is not the last")
        if self._is_bidirectional(message):
            raise RemoteProtocolError("iSCSI", "a Data-In with the status of a bidirectional task")
        message[0] = bhs.SCSI_RESPONSE
        message[1] = bhs.FLAG_FINAL | (flags & bhs.RESIDUAL_FLAGS)
        message[2] = 0
        message[4:16] = bytes(12)
        message[20:24] = bytes(4)
        message[36:44] = bytes(8)
        self._check_moved(message)
        self._take_stat_sn(message)
        self.user.control_notify(message[: bhs.BHS_LENGTH], 0, 0)

    def _is_bidirectional(self, message: memoryview) -> bool:
        (itt,) = bhs.ITT.unpack_from(message, bhs.ITT_OFFSET)
        transfer = self._tasks.get(itt)
        return transfer is not None and transfer.source is not None and transfer.sink is not None

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
        place, underflow, flags = _RESIDUAL_OFFSET, bhs.RESIDUAL_UNDERFLOW, bhs.RESIDUAL_FLAGS
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
        end = r2t.buffer_offset + r2t.desired_length
        most = self._parameters.max_burst_length
        if (
            not 0 < r2t.desired_length <= most
            or r2t.buffer_offset < transfer.asked
            or end > len(source)
            or r2t.ttt == bhs.NO_TAG
        ):
            raise RemoteProtocolError(
                "iSCSI",
                f"R2T for {r2t.desired_length} bytes at {r2t.buffer_offset}: {transfer.asked} are "
                f"sent or asked for, the task has {len(source)}, a burst {most}",
            )
        self._settle_sent()
        if transfer.unsent >= self._parameters.max_outstanding_r2t:
            self._tx.settle()  # another thread may have sent PDUs that it has not noted yet
            self._settle_sent()
            if transfer.unsent >= self._parameters.max_outstanding_r2t:
                raise RemoteProtocolError("iSCSI", "more R2Ts than MaxOutstandingR2T")
        transfer.sn += 1
        transfer.asked = end
        transfer.unsent += 1
        self._tx.queued.extend(
            self._data_outs(transfer, source, r2t.ttt, r2t.buffer_offset, end, r2t.lun, transfer)
        )

    def _settle_sent(self) -> None:
        sent = self._tx.sent
        while sent:
            transfer = sent.popleft()
            assert isinstance(transfer, _Transfer)
            transfer.unsent -= 1

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
