"""The tcp datamover of a target: Traditional iSCSI (RFC 7143 sections 4.2.5, 11.4, 11.7, 11.8).

Put_Data becomes Data-In PDUs before the response of the task; the last of them carries the status
where that is allowed. Get_Data becomes an R2T; its Data-Outs are received straight into the sink.
Immediate data and unsolicited Data-Outs are notified to the layer above as they come.

**ErrorRecoveryLevel 1 or more** (RFC 7143 sections 7.8, 7.9, 11.16) is chosen when full feature
phase begins: then PDUs that come pass through other methods, and what was sent is kept (``kept``).
A Data-Out that is damaged or missing costs a recovery R2T for the rest of its burst, with a new
Target Transfer Tag: what still comes for the old tag is dropped. Without Data-Outs for a while the
R2T is sent again, then a recovery R2T, in turns: either may have been lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from struct import Struct
from typing import Final

from iserblk.datamover.allocation import Allocation, Event
from iserblk.datamover.data_in import (
    DataIns,
    offset_of,
    pdus_of,
)
from iserblk.datamover.kept import LEAST_INLINE, Kept, KeptPdu
from iserblk.datamover.seam import (
    ACKNOWLEDGE,
    NOTIFY,
    Resumption,
    SessionNumbers,
    TargetDatamover,
    TargetSlot,
    TargetUser,
    not_told,
)
from iserblk.datamover.tcp_stream import NOWHERE, ByteStream, PduReceiver, PduSender
from iserblk.errors import LocalProtocolError, RemoteProtocolError
from iserblk.iscsi import bhs, pdu
from iserblk.iscsi.keys import SessionParameters
from iserblk.iscsi.serial import serial_lt

_TTT_MASK: Final = 0x7FFFFFFF  # never 0xFFFFFFFF, which means unsolicited data
_PATIENCE: Final = 3  # ticks without a Data-Out, after which an R2T or the data counts as lost
_MOST_RECOVERIES: Final = 32  # of one burst
_MOST_ANSWERS: Final = 64  # SNACKs whose answers have not left
_COPIED: Final = 512  # bytes of a PDU in its slot, up to which it is copied
_MOST_AGAIN: Final = 1 << 16  # PDUs of such answers; one more answer may be begun before

# Of a SCSI Response: StatSN, ExpCmdSN, MaxCmdSN.
_NUMBERS: Final = Struct(">III")
_NUMBERS_OFFSET: Final = 24
_SNACK_TAG_OFFSET: Final = 20
_EXP_STAT_SN_OFFSET: Final = 28
_WORD: Final = Struct(">I")


class _Task:
    """The fields of a command that are needed later, and the state of its transfers.

    ``sn``: DataSN or R2TSN of the next Data-In or R2T. ``put``: Data-In that waits for the
    response, from ``put_offset`` of the task's data on. ``ttt``: of its R2T under way, or None.
    Of a ``bidirectional`` command, R2Ts and Data-In are numbered together (4.2.2.4).
    ``snack_tag``: of an R-Data SNACK that came before the response."""

    __slots__ = ("bidirectional", "itt", "lun", "put", "put_offset", "sn", "snack_tag", "ttt")

    def __init__(self, lun: bytes, itt: int, bidirectional: bool) -> None:
        self.lun = lun
        self.itt = itt
        self.bidirectional = bidirectional
        self.sn = 0
        self.put: memoryview | None = None
        self.put_offset = 0
        self.ttt: int | None = None
        self.snack_tag = 0


class _Burst:
    """An R2T under way. ``at``: bytes of ``sink`` that are filled or are being filled.
    ``offset``: of the sink in the task's data. ``notify``: Notify_Enable. ``r2ts``: its R2Ts by
    their R2TSN: Target Transfer Tag, offset in the sink. ``age``: ticks since anything came for it.
    ``overdue``: how often nothing came in time. ``recoveries``: recovery R2Ts."""

    __slots__ = (
        "age",
        "at",
        "data_sn",
        "itt",
        "notify",
        "offset",
        "overdue",
        "r2ts",
        "recoveries",
        "sink",
        "slot",
    )

    def __init__(
        self, slot: TargetSlot, itt: int, sink: memoryview, offset: int, notify: bool
    ) -> None:
        self.notify = notify
        self.slot = slot
        self.itt = itt
        self.sink = sink
        self.offset = offset
        self.at = 0
        self.data_sn = 0
        self.r2ts: dict[int, tuple[int, int]] | None = None
        self.age = 0
        self.overdue = 0
        self.recoveries = 0


class _Answer:
    """The token of what a SNACK asked for. ``slot``: busy until it has left. ``pdus``: how many."""

    __slots__ = ("pdus", "slot")

    def __init__(self, slot: TargetSlot | None, pdus: int) -> None:
        self.slot = slot
        self.pdus = pdus


class TcpTarget:
    """Implements TargetDatamover for one connection."""

    user: TargetUser

    def __init__(self, stream: ByteStream, receive_data: int) -> None:
        """``receive_data``: the MaxRecvDataSegmentLength that login declares."""
        self.greeted = True  # Traditional iSCSI has no Hello
        # Never called: what ``progress`` leaves is in the socket, whose descriptor shows it.
        self.on_unfinished: Callable[[], None] = not_told
        self._stream = stream
        self._receive_data = receive_data
        self._rx = PduReceiver(self._place, self._deliver)
        self._tx = PduSender(stream)
        self._allocation = Allocation()
        self._parameters = SessionParameters()
        self._numbers: SessionNumbers
        self._tasks: dict[TargetSlot, _Task] = {}
        self._bursts: dict[int, _Burst] = {}  # by Target Transfer Tag
        self._next_ttt = 0
        self._placing: _Burst | None = None
        self._command = _Task(b"", bhs.NO_TAG, False)
        self._kept: Kept | None = None  # at ErrorRecoveryLevel 1 or more
        self._answering = 0  # SNACKs whose answers have not left
        self._again = 0  # PDUs of these answers

    # -- down -------------------------------------------------------------------------------------

    @property
    def acknowledges(self) -> bool:
        return False

    def allocate_connection_resources(
        self, slots: Sequence[TargetSlot], inline_size: int, receives: int
    ) -> None:
        if self._allocation.enter(Event.ALLOCATE):
            self.add_resources(slots, inline_size, receives)

    def add_resources(self, slots: Sequence[TargetSlot], inline_size: int, receives: int) -> None:
        """See the seam. ``receives`` needs no memory: TCP holds back what does not fit."""
        self._allocation.need_resources()
        size = bhs.BHS_LENGTH + inline_size
        memory = memoryview(bytearray(size * len(slots)))
        for at, slot in enumerate(slots):
            start, end = at * size, (at + 1) * size
            slot.bhs = memory[start : start + bhs.BHS_LENGTH]
            slot.inline = memory[start + bhs.BHS_LENGTH : end]

    def notice_numbers(self, numbers: SessionNumbers) -> None:
        """See the seam. ``numbers`` is read when an R2T is queued."""
        self._numbers = numbers

    def notice_key_values(self, parameters: SessionParameters) -> None:
        self._parameters = parameters

    def enable_datamover(self, final: TargetSlot) -> TargetDatamover:
        """See the seam. Digests begin behind the final Login Response."""
        self._allocation.enter(Event.ENABLE)
        self.send_control(final)
        header = self._parameters.header_digest == "CRC32C"
        data = self._parameters.data_digest == "CRC32C"
        self._rx.full_feature_phase(self._receive_data, header, data)
        self._tx.full_feature_phase(header, data)
        if self._parameters.error_recovery_level:
            self._kept = Kept(self._numbers.stat_sn)
            self._rx.recover(self._place_recovering, self._deliver_recovering, self._discarded)
        return self

    def leave_stream(self) -> tuple[bytes, bytes]:
        """The stream belongs to another protocol now. Returns the bytes received behind the last
        PDU, and those still to be sent, which count as sent. Only ``connection_terminate`` is to be
        called after this, and ``progress`` to return."""
        left = self._rx.take_staged(), self._tx.take_unsent()
        self._notify_sent()
        return left

    def map_task(self, slot: TargetSlot) -> None:
        self._tasks[slot] = self._command
        slot.first_sn = 0
        slot.notices = 0

    def reassign_task(self, slot: TargetSlot, fresh: TargetSlot, how: Resumption) -> int:
        """See the seam. Data-In and R2Ts are numbered on from ExpDataSN, where that is a number
        that the initiator can mean; other values are ignored (RFC 7143 section 11.5.6). Each
        connection that sent Data-In of the task may have cut it in its own way."""
        self._tasks.pop(fresh, None)
        task = self._tasks[slot] = _Task(how.lun, how.itt, how.bidirectional)
        slot.notices = 0
        if not how.sent:
            if how.exp_data_sn <= slot.first_sn:
                task.sn = how.exp_data_sn
            slot.first_sn = task.sn
            return 0
        size = how.sent - how.sent_from
        burst = self._parameters.max_burst_length
        number = how.exp_data_sn - slot.first_sn
        at = 0
        if 0 < number <= pdus_of(size, slot.segment, burst):
            slot.first_sn = how.exp_data_sn
            at = min(offset_of(number, slot.segment, burst), size)
        task.sn = slot.first_sn
        return how.sent_from + at

    def put_data(
        self,
        slot: TargetSlot,
        data: memoryview,
        buffer_offset: int,
        notify_enable: bool = False,
        acknowledge: bool = False,
    ) -> None:
        """See the seam. The data leaves with the response, the next PDU in ``slot``."""
        slot.notices = NOTIFY if notify_enable else 0
        if acknowledge:
            if self._kept is None:
                raise LocalProtocolError("the A-bit needs an ErrorRecoveryLevel above 0")
            slot.notices |= ACKNOWLEDGE
        task = self._tasks[slot]
        task.put = data
        task.put_offset = buffer_offset

    def get_data(
        self,
        slot: TargetSlot,
        sink: memoryview,
        buffer_offset: int,
        notify_enable: bool = True,
    ) -> None:
        """Queue an R2T. ``buffer_offset`` counts from the start of the task's data."""
        task = self._tasks[slot]
        burst = _Burst(slot, task.itt, sink, buffer_offset, notify_enable)
        if self._kept is not None:
            burst.r2ts = {}
        slot.busy += 1
        self._ask(task, burst)

    def _ask(self, task: _Task, burst: _Burst) -> None:
        """Queue the next R2T of ``task``, for what ``burst`` lacks."""
        self._next_ttt = ttt = (self._next_ttt + 1) & _TTT_MASK
        self._bursts[ttt] = burst
        task.ttt = ttt
        r2t_sn = task.sn
        task.sn = burst.slot.first_sn = r2t_sn + 1
        if burst.r2ts is not None:
            burst.r2ts[r2t_sn] = (ttt, burst.at)
        self._queue_r2t(task, burst, r2t_sn, ttt, burst.at)

    def _queue_r2t(
        self, task: _Task, burst: _Burst, r2t_sn: int, ttt: int, at: int, token: object = None
    ) -> None:
        numbers = self._numbers
        header = pdu.ReadyToTransfer(
            lun=task.lun,
            itt=task.itt,
            ttt=ttt,
            stat_sn=numbers.stat_sn,
            exp_cmd_sn=numbers.exp_cmd_sn,
            max_cmd_sn=numbers.max_cmd_sn,
            r2t_sn=r2t_sn,
            buffer_offset=burst.offset + at,
            desired_length=len(burst.sink) - at,
        ).pack()
        self._tx.queued.append(self._tx.frame(header, None, None, token))

    def cancel_data(self, slot: TargetSlot) -> bool:
        """Always True: Data-Outs of a cancelled R2T that come later are dropped."""
        task = self._tasks.get(slot)
        burst = None if task is None or task.ttt is None else self._bursts.pop(task.ttt, None)
        if burst is not None:
            if self._placing is burst:
                self._rx.divert()
                self._placing = None
            slot.busy -= 1
        return True

    def send_control(self, slot: TargetSlot, invalidate: bool = False) -> None:
        """Queue the task's Data-In, if any, and then the PDU in ``slot``. ``invalidate`` is
        ignored."""
        if self._kept is not None:
            self._send_kept(slot, self._kept)
            return
        slot.busy += 1
        task = self._tasks.get(slot)
        header = bytes(slot.bhs)
        if task is not None and task.put is not None:
            data, task.put = task.put, None
            if self._data_in(slot, task, data, header):
                return
        if task is not None and header[0] == bhs.SCSI_RESPONSE and task.sn:
            patched = bytearray(header)
            _WORD.pack_into(patched, bhs.EXP_DATA_SN_OFFSET, task.sn)
            header = bytes(patched)
        ahs = header[bhs.LENGTHS_OFFSET] * 4
        header += slot.inline[:ahs]
        inline = slot.inline[ahs : slot.inline_length]
        owner = slot if len(inline) > _COPIED else None
        self._tx.queued.append(self._tx.frame(header, inline, owner, slot))

    def _data_in(self, slot: TargetSlot, task: _Task, data: memoryview, response: bytes) -> bool:
        """Queue the Data-In of a task. True when its last PDU carries the status."""
        # A status other than GOOD, sense data, and a bidirectional command need a SCSI Response.
        collapse = response[0] == bhs.SCSI_RESPONSE and not (
            response[2] or response[3] or slot.inline_length or task.bidirectional
        )
        stat_sn, exp_cmd_sn, max_cmd_sn = _NUMBERS.unpack_from(response, _NUMBERS_OFFSET)
        (residual,) = _WORD.unpack_from(response, bhs.RESIDUAL_OFFSET)
        most = self._parameters.initiator_recv_data_segment_length
        burst = self._parameters.max_burst_length
        size = len(data)
        if size > most or size > burst:
            several = DataIns(self._tx, slot, data, most, burst)
            several.offset = task.put_offset
            several.first_sn = task.sn
            several.itt = task.itt
            several.exp_cmd_sn = exp_cmd_sn
            several.max_cmd_sn = max_cmd_sn
            if collapse:
                several.status = bhs.DATA_IN_STATUS | (response[1] & bhs.RESIDUAL_FLAGS)
                several.stat_sn = stat_sn
                several.residual = residual
                several.token = slot
            task.sn = several.end_sn
            self._tx.queued.extend(several.following())
            return collapse
        if not size:
            return False
        header = bhs.DATA_IN_FIELDS.pack(
            bhs.DATA_IN,
            bhs.FLAG_FINAL
            | (bhs.DATA_IN_STATUS | (response[1] & bhs.RESIDUAL_FLAGS) if collapse else 0),
            0,
            size,
            bhs.NO_LUN,
            task.itt,
            bhs.NO_TAG,
            stat_sn if collapse else 0,
            exp_cmd_sn,
            max_cmd_sn,
            task.sn,
            task.put_offset,
            residual if collapse else 0,
        )
        self._tx.queued.append(self._tx.frame(header, data, slot, slot if collapse else None))
        task.sn += 1
        return collapse

    def flush(self) -> None:
        self._tx.flush()
        self._notify_sent()

    def _notify_sent(self) -> None:
        sent = self._tx.sent
        while sent:
            slot = sent.popleft()
            if isinstance(slot, _Answer):
                self._answered(slot)
                continue
            assert isinstance(slot, TargetSlot)
            slot.busy -= 1
            if slot.notices:  # of a put_data: its Data-In left in front of the response
                slot.notices = 0
                self.user.data_completion_notify(slot, self._tasks[slot].sn - 1)
            self.user.sent_notify(slot)

    def deallocate_task_resources(self, slot: TargetSlot) -> None:
        task = self._tasks.pop(slot, None)
        if task is not None and task.ttt is not None:
            self._bursts.pop(task.ttt, None)

    def disconnect(self) -> None:
        self._stream.disconnect()

    def connection_terminate(self) -> None:
        self._tx.close()
        self._rx.divert()
        self._placing = None
        self._bursts.clear()
        self._tasks.clear()
        if self._kept is not None:
            self._kept = Kept(0)

    # -- up ---------------------------------------------------------------------------------------

    def progress(self, now: float) -> int:
        count = self._rx.receive_from(self._stream, "the initiator")
        self._tx.resume()
        self._notify_sent()
        return count

    def _place(self, message: memoryview, at: int) -> memoryview | None:
        """Where to place the data of the PDU at ``at``, for PduReceiver. Checks a solicited
        Data-Out."""
        if message[at] & bhs.OPCODE_MASK != bhs.DATA_OUT:
            return None
        data_out = pdu.DataOut.unpack_from(message, at)
        if data_out.ttt == bhs.NO_TAG:
            return None
        burst = self._bursts.get(data_out.ttt)
        if burst is None:
            return NOWHERE  # its task has ended, or its R2T was cancelled
        size = data_out.data_length & 0xFFFFFF
        end = burst.at + size
        if (
            data_out.itt != burst.itt
            or data_out.data_sn != burst.data_sn
            or data_out.buffer_offset != burst.offset + burst.at
            or end > len(burst.sink)
            or bool(data_out.flags & bhs.FLAG_FINAL) != (end == len(burst.sink))
        ):
            raise RemoteProtocolError(
                "iSCSI",
                f"Data-Out {data_out.data_sn} of {size} bytes at {data_out.buffer_offset}, "
                f"expected {burst.data_sn} at {burst.offset + burst.at}, up to "
                f"{burst.offset + len(burst.sink)}",
            )
        where = burst.sink[burst.at : end]
        burst.at = end
        burst.data_sn += 1
        self._placing = burst
        return where

    def _deliver(self, message: memoryview, placed: bool) -> None:
        if placed:
            burst, self._placing = self._placing, None
            if burst is not None and burst.at == len(burst.sink):
                self._filled(burst)
            return
        opcode = message[0] & bhs.OPCODE_MASK
        if opcode == bhs.SCSI_COMMAND:
            (itt,) = bhs.ITT.unpack_from(message, bhs.ITT_OFFSET)
            both = message[1] & bhs.FLAGS_BIDIRECTIONAL == bhs.FLAGS_BIDIRECTIONAL
            self._command = _Task(bytes(message[8:16]), itt, both)
        elif opcode == bhs.TASK_MANAGEMENT_REQUEST:  # for ``map_task``: not the last command's
            self._command = _Task(b"", bhs.NO_TAG, False)
        elif opcode == bhs.DATA_OUT and pdu.DataOut.unpack_from(message).ttt != bhs.NO_TAG:
            if self._place(message, 0) is NOWHERE:
                return
            raise RemoteProtocolError("iSCSI", "a Data-Out without data")
        self.user.control_notify(message, 0, 0)

    def _filled(self, burst: _Burst) -> None:
        slot = burst.slot
        task = self._tasks[slot]
        assert task.ttt is not None
        del self._bursts[task.ttt]
        task.ttt = None
        slot.busy -= 1
        if burst.notify:
            self.user.data_completion_notify(slot, task.sn - 1)

    # -- ErrorRecoveryLevel 1 or more: what was sent, and is kept ----------------------------------

    def _send_kept(self, slot: TargetSlot, kept_pdus: Kept) -> None:
        """``send_control`` at this level: what is sent is also kept."""
        slot.busy += 1
        task = self._tasks.get(slot)
        header = bytearray(slot.bhs)
        ahs = header[bhs.LENGTHS_OFFSET] * 4
        header += slot.inline[:ahs]
        inline = bytes(slot.inline[ahs : slot.inline_length])
        (itt,) = bhs.ITT.unpack_from(header, bhs.ITT_OFFSET)
        lun = b"" if task is None else task.lun
        kept = KeptPdu(bytes(header), inline, itt, lun)
        if task is not None and header[0] == bhs.SCSI_RESPONSE:
            if task.put is not None:
                self._put_kept(slot, task, task.put, kept, kept_pdus)
                task.put = None
            _WORD.pack_into(header, bhs.EXP_DATA_SN_OFFSET, task.sn)
            _WORD.pack_into(header, _SNACK_TAG_OFFSET, task.snack_tag)
            kept.header = bytes(header)
        if not kept.collapsed:
            self._tx.queued.append(self._tx.frame(kept.header, memoryview(inline), None, slot))
        if header[0] == bhs.NOP_IN and itt == bhs.NO_TAG:
            return  # it took no StatSN
        (stat_sn, _, _) = _NUMBERS.unpack_from(header, _NUMBERS_OFFSET)
        kept_pdus.add(stat_sn, kept)
        while (surplus := kept_pdus.surplus()) is not None:
            self._let_go(surplus)

    def _put_kept(
        self, slot: TargetSlot, task: _Task, data: memoryview, kept: KeptPdu, kept_pdus: Kept
    ) -> None:
        """Queue the Data-In of a response, and keep it where there is room."""
        response = kept.header
        # As in ``_data_in``; and a SNACK Tag has a place in a SCSI Response only.
        kept.collapsed = bool(data) and not (
            response[2] or response[3] or kept.inline or task.bidirectional or task.snack_tag
        )
        kept.offset = task.put_offset
        kept.most = self._parameters.initiator_recv_data_segment_length
        kept.first_sn = kept.acknowledged = slot.first_sn = task.sn
        slot.segment = kept.most
        kept.tell = bool(slot.notices & ACKNOWLEDGE and data)
        slot.notices &= ~ACKNOWLEDGE
        if data and (kept.tell or kept_pdus.fits(len(data))):
            kept.data = data
            kept.slot = slot
            slot.busy += 1
            if kept.tell or kept_pdus.presses:
                self._next_ttt = kept.ttt = (self._next_ttt + 1) & _TTT_MASK
        task.sn = self._queue_data_in(
            kept, data, 0, -1, slot, slot if kept.collapsed else None, kept.collapsed
        )
        kept.end_sn = task.sn

    def _queue_data_in(
        self,
        kept: KeptPdu,
        data: memoryview,
        begin: int,
        end: int,
        owner: TargetSlot,
        token: object,
        status: bool,
    ) -> int:
        """Queue Data-In of ``kept`` with DataSN from ``begin`` up to ``end`` (-1: all of it).
        ``token``: comes back when the last of it has left. ``status``: the last of all carries the
        status. Returns the DataSN behind the last of all."""
        response = kept.header
        (stat_sn, _, _) = _NUMBERS.unpack_from(response, _NUMBERS_OFFSET)
        (residual,) = _WORD.unpack_from(response, bhs.RESIDUAL_OFFSET)
        numbers = self._numbers
        first = kept.first_sn
        several = DataIns(
            self._tx,
            owner,
            data,
            kept.most,
            self._parameters.max_burst_length,
            max(0, begin - first),
            end if end < 0 else end - first,
        )
        several.offset = kept.offset
        several.first_sn = first
        several.itt = kept.itt
        several.exp_cmd_sn = numbers.exp_cmd_sn
        several.max_cmd_sn = numbers.max_cmd_sn
        several.token = token
        if kept.ttt != bhs.NO_TAG:
            several.ttt = kept.ttt
            several.lun = kept.lun
        if status:
            several.status = bhs.DATA_IN_STATUS | (response[1] & bhs.RESIDUAL_FLAGS)
            several.stat_sn = stat_sn
            several.residual = residual
        self._tx.queued.extend(several.following())
        return several.end_sn

    def _let_go(self, kept: KeptPdu) -> None:
        """Keep its Data-In no longer, and tell the layer above."""
        kept_pdus = self._kept
        slot = None if kept_pdus is None else kept_pdus.let_go(kept)
        if slot is None:
            return
        slot.busy -= 1
        if kept.tell:
            kept.tell = False
            self.user.data_ack_notify(slot, kept.end_sn)
        else:
            self.user.sent_notify(slot)

    @property
    def kept_bytes(self) -> int:
        """See the seam."""
        kept_pdus = self._kept
        return kept_pdus.inline if kept_pdus is not None else 0

    def forget_kept(self) -> None:
        """See the seam. A SNACK for that is rejected from now on."""
        kept_pdus = self._kept
        if kept_pdus is None:
            return
        for kept in kept_pdus.all():
            if not kept.tell:
                self._let_go(kept)
        while (surplus := kept_pdus.surplus(LEAST_INLINE)) is not None:
            self._let_go(surplus)

    @property
    def unacknowledged(self) -> int | None:
        """See the seam."""
        kept_pdus = self._kept
        return kept_pdus.oldest if kept_pdus is not None else None

    # -- ErrorRecoveryLevel 1 or more: SNACK -------------------------------------------------------

    def retransmit(self, snack: pdu.SnackRequest) -> tuple[int, int]:
        """See the seam."""
        kept_pdus = self._kept
        if kept_pdus is None:
            return pdu.REJECT_PROTOCOL_ERROR, 0
        if self._answering >= _MOST_ANSWERS or self._again >= _MOST_AGAIN:
            raise RemoteProtocolError("iSCSI", "flood of SNACKs, whose answers are not taken")
        if snack.kind == pdu.SNACK_STATUS:
            return self._again_status(snack, kept_pdus), 0
        if snack.kind == pdu.SNACK_DATA_ACK:
            return self._take_data_ack(snack, kept_pdus), 0
        if snack.kind == pdu.SNACK_R_DATA:
            return self._again_resegmented(snack, kept_pdus), 0
        if snack.kind == pdu.SNACK_DATA:
            return self._again_data(snack, kept_pdus)
        return pdu.REJECT_INVALID_FIELD, 0

    def _answer(self, slot: TargetSlot | None, pdus: int = 1) -> _Answer:
        """The token of the last of the ``pdus`` that a SNACK brings about."""
        self._answering += 1
        self._again += pdus
        if slot is not None:
            slot.busy += 1
        return _Answer(slot, pdus)

    def _answered(self, answer: _Answer) -> None:
        self._answering -= 1
        self._again -= answer.pdus
        slot = answer.slot
        if slot is not None:
            slot.busy -= 1
            self.user.sent_notify(slot)

    def _again_status(self, snack: pdu.SnackRequest, kept_pdus: Kept) -> int:
        found = kept_pdus.statuses(snack.beg_run, snack.run_length, self._numbers.stat_sn)
        if isinstance(found, int):
            return found
        for _, kept in found:
            data = kept.data
            if kept.collapsed and data is not None and kept.slot is not None:
                self._queue_data_in(
                    kept, data, kept.end_sn - 1, -1, kept.slot, self._answer(kept.slot), True
                )
            else:
                # A status whose Data-In is not kept comes by itself: the data can be missed.
                self._queue_again(kept)
        return 0

    def _queue_again(self, kept: KeptPdu) -> None:
        """Queue a numbered PDU once more, with the present ExpCmdSN and MaxCmdSN."""
        numbers = self._numbers
        header = bytearray(kept.header)
        _WORD.pack_into(header, _NUMBERS_OFFSET + 4, numbers.exp_cmd_sn)
        _WORD.pack_into(header, _NUMBERS_OFFSET + 8, numbers.max_cmd_sn)
        self._tx.queued.append(
            self._tx.frame(bytes(header), memoryview(kept.inline), None, self._answer(None))
        )

    def _take_data_ack(self, snack: pdu.SnackRequest, kept_pdus: Kept) -> int:
        kept = kept_pdus.of_tag(snack.ttt, snack.lun)
        if (
            kept is None
            or snack.itt != bhs.NO_TAG
            or snack.run_length
            or snack.beg_run != kept.end_sn
        ):
            return pdu.REJECT_INVALID_DATA_ACK
        kept.acknowledged = kept.end_sn
        self._let_go(kept)
        return 0

    def _again_data(self, snack: pdu.SnackRequest, kept_pdus: Kept) -> tuple[int, int]:
        for task in self._tasks.values():
            burst = self._bursts.get(task.ttt) if task.ttt is not None else None
            if task.itt == snack.itt and burst is not None:
                return self._again_r2t(snack, task, burst)
        found = kept_pdus.of_task(snack.itt)
        if found is None:
            return pdu.REJECT_PROTOCOL_ERROR, 0
        kept = found[1]
        begin = snack.beg_run
        if not begin and not snack.run_length:
            begin = kept.acknowledged
        end = begin + snack.run_length if snack.run_length else kept.end_sn
        if begin < kept.acknowledged or end > kept.end_sn or begin >= end:
            return pdu.REJECT_PROTOCOL_ERROR, kept.end_sn
        data, slot = kept.data, kept.slot
        if data is None or slot is None:
            return pdu.REJECT_SNACK, 0
        answer = self._answer(slot, end - begin)
        self._queue_data_in(kept, data, begin, end, slot, answer, kept.collapsed)
        return 0, 0

    def _again_r2t(self, snack: pdu.SnackRequest, task: _Task, burst: _Burst) -> tuple[int, int]:
        """R2Ts that have been answered in full are acknowledged by that."""
        r2ts = burst.r2ts or {}
        begin = snack.beg_run
        end = begin + snack.run_length if snack.run_length else task.sn
        wanted = [sn for sn in r2ts if begin <= sn < end]
        whole = not begin and not snack.run_length
        if not wanted or end > task.sn or (not whole and begin != wanted[0]):
            return pdu.REJECT_PROTOCOL_ERROR, task.sn
        for sn in wanted:
            ttt, at = r2ts[sn]
            self._queue_r2t(task, burst, sn, ttt, at, self._answer(None))
        return 0, 0

    def _again_resegmented(self, snack: pdu.SnackRequest, kept_pdus: Kept) -> int:
        """R-Data SNACK: Data-In in pieces of the present length, and a SCSI Response with the
        SNACK Tag (11.16.3)."""
        if snack.ttt in (0, bhs.NO_TAG) or snack.beg_run or snack.run_length:
            return pdu.REJECT_INVALID_FIELD
        for task in self._tasks.values():
            if task.itt == snack.itt and kept_pdus.of_task(snack.itt) is None:
                task.snack_tag = snack.ttt  # nothing of its data was sent yet
                return 0
        found = kept_pdus.of_task(snack.itt)
        if found is None:
            return pdu.REJECT_PROTOCOL_ERROR
        kept = found[1]
        left = kept.acknowledged < kept.end_sn
        data, slot = kept.data, kept.slot
        if left and (data is None or slot is None):
            return pdu.REJECT_SNACK
        header = bytearray(kept.header)
        if data is not None and slot is not None:
            kept.most = slot.segment = self._parameters.initiator_recv_data_segment_length
            burst = self._parameters.max_burst_length
            answer = self._answer(slot, pdus_of(len(data), kept.most, burst))
            kept.end_sn = self._queue_data_in(kept, data, 0, -1, slot, answer, False)
        kept.collapsed = False
        _WORD.pack_into(header, bhs.EXP_DATA_SN_OFFSET, kept.end_sn)
        _WORD.pack_into(header, _SNACK_TAG_OFFSET, snack.ttt)
        kept.header = bytes(header)
        self._queue_again(kept)
        return 0

    # -- ErrorRecoveryLevel 1 or more: what comes --------------------------------------------------

    def _place_recovering(self, message: memoryview, at: int) -> memoryview | None:
        """``_place`` at this level: a Data-Out that shows that others were lost is dropped, and
        asked for again with them."""
        if message[at] & bhs.OPCODE_MASK != bhs.DATA_OUT:
            return None
        data_out = pdu.DataOut.unpack_from(message, at)
        burst = self._bursts.get(data_out.ttt) if data_out.ttt != bhs.NO_TAG else None
        if burst is not None and data_out.itt == burst.itt:
            burst.age = 0
            if data_out.data_sn != burst.data_sn:
                self._recover(burst)
                return NOWHERE
        return self._place(message, at)

    def _recover(self, burst: _Burst) -> None:
        """Queue a recovery R2T for all that ``burst`` lacks."""
        task = self._tasks.get(burst.slot)
        if task is None or task.ttt is None:
            return  # it has ended
        burst.recoveries += 1
        if burst.recoveries > _MOST_RECOVERIES:
            raise RemoteProtocolError("iSCSI", f"data of task {burst.itt:#x} does not come through")
        self._bursts.pop(task.ttt, None)
        burst.data_sn = 0
        burst.age = 0
        self._ask(task, burst)

    def _deliver_recovering(self, message: memoryview, placed: bool) -> None:
        """``_deliver`` at this level: every PDU of an initiator acknowledges statuses."""
        self._hear(message)
        self._deliver(message, placed)

    def _hear(self, message: memoryview) -> None:
        kept_pdus = self._kept
        if kept_pdus is None:
            return
        (exp_stat_sn,) = _WORD.unpack_from(message, _EXP_STAT_SN_OFFSET)
        if serial_lt(self._numbers.stat_sn, exp_stat_sn):
            return  # it acknowledges what was never sent
        for kept in kept_pdus.acknowledge(exp_stat_sn):
            kept.acknowledged = kept.end_sn
            self._let_go(kept)

    def _discarded(self, head: memoryview) -> None:
        """A PDU with a wrong data digest was dropped (7.8)."""
        burst, self._placing = self._placing, None
        if burst is not None:
            burst.at -= int.from_bytes(head[5:8], "big")
            self._recover(burst)
        self.user.discarded_notify(head)

    def tick(self) -> None:
        """See the seam."""
        for ttt, burst in list(self._bursts.items()):
            burst.age += 1
            if burst.age < _PATIENCE:
                continue
            burst.age = 0
            burst.overdue += 1
            task = self._tasks[burst.slot]
            if burst.overdue & 1 and burst.r2ts:
                for sn, (tag, at) in burst.r2ts.items():
                    self._queue_r2t(task, burst, sn, tag, at)
            elif self._placing is not burst and task.ttt == ttt:
                self._recover(burst)

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

    def next_deadline(self) -> float | None:
        return None
