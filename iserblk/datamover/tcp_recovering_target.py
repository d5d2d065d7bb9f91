"""The tcp datamover of a target at ErrorRecoveryLevel 1 or more (RFC 7143 sections 7.8, 7.9,
11.16).

What was sent is kept (``kept``), for SNACKs. A Data-Out that is damaged or missing costs a recovery
R2T for the rest of its burst, with a new Target Transfer Tag: what still comes for the old tag is
dropped. Without Data-Outs for a while the R2T is sent again, then a recovery R2T, in turns: either
may have been lost.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

from iserblk.datamover.data_in import DataIns, offset_of, pdus_of
from iserblk.datamover.kept import LEAST_INLINE, Kept, KeptPdu
from iserblk.datamover.seam import ACKNOWLEDGE, Resumption, TargetSlot
from iserblk.datamover.tcp_plain_target import TTT_MASK, Burst, PlainTcpTarget, Task
from iserblk.datamover.tcp_stream import NOWHERE, PduSender
from iserblk.errors import RemoteProtocolError
from iserblk.iscsi import bhs, pdu
from iserblk.iscsi.serial import serial_lt

_PATIENCE: Final = 3  # ticks without a Data-Out, after which an R2T or the data counts as lost
_MOST_RECOVERIES: Final = 32  # of one burst
_MOST_ANSWERS: Final = 64  # SNACKs whose answers have not left
_MOST_AGAIN: Final = 1 << 16  # PDUs of such answers; one more answer may be begun before

# Of a SCSI Response: StatSN, ExpCmdSN, MaxCmdSN.
_NUMBERS: Final = Struct(">III")
_NUMBERS_OFFSET: Final = 24
_SNACK_TAG_OFFSET: Final = 20
_EXP_STAT_SN_OFFSET: Final = 28
_WORD: Final = Struct(">I")


class _Answer:
    """The token of what a SNACK asked for. ``slot``: busy until it has left. ``pdus``: how many."""

    __slots__ = ("pdus", "slot")

    def __init__(self, slot: TargetSlot | None, pdus: int) -> None:
        self.slot = slot
        self.pdus = pdus


class RecoveringTcpTarget(PlainTcpTarget):
    """Implements TargetDatamover for one connection, from the end of the login on."""

    def __init__(self, login: PlainTcpTarget) -> None:
        """``login``: the datamover of the login, whose connection this is from now on. It is
        enabled, and has no tasks."""
        super().__init__(login._stream, login._receive_data)
        self.user = login.user
        self.on_unfinished = login.on_unfinished
        self._allocation = login._allocation
        self.notice_key_values(login._parameters)
        self.notice_numbers(login._numbers)
        self._rx = login._rx
        self._rx.recover(self._place, self._deliver, self._discarded)
        self._tx = login._tx  # with the final Login Response
        login._tx = PduSender(login._stream)  # it is in the middle of its ``progress``
        self._kept = Kept(self._numbers.stat_sn)
        self._answering = 0  # SNACKs whose answers have not left
        self._again = 0  # PDUs of these answers

    # -- down -------------------------------------------------------------------------------------

    def reassign_task(self, slot: TargetSlot, fresh: TargetSlot, how: Resumption) -> int:
        """See the seam. Data-In and R2Ts are numbered on from ExpDataSN, where that is a number
        that the initiator can mean; other values are ignored (RFC 7143 section 11.5.6). Each
        connection that sent Data-In of the task may have cut it in its own way."""
        self._tasks.pop(fresh, None)
        task = self._tasks[slot] = Task(how.lun, how.itt, how.bidirectional)
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
        super().put_data(slot, data, buffer_offset, notify_enable)
        if acknowledge:
            slot.notices |= ACKNOWLEDGE

    def _ask(self, task: Task, burst: Burst) -> None:
        """See PlainTcpTarget. The R2T is kept, too."""
        r2t_sn = task.sn
        super()._ask(task, burst)
        assert task.ttt is not None
        if burst.r2ts is None:
            burst.r2ts = {}
        burst.r2ts[r2t_sn] = (task.ttt, burst.at)

    def _left(self, slot: object) -> None:
        if isinstance(slot, _Answer):
            self._answered(slot)
        else:
            super()._left(slot)

    def connection_terminate(self) -> None:
        super().connection_terminate()
        self._kept = Kept(0)

    # -- what was sent, and is kept ---------------------------------------------------------------

    def send_control(self, slot: TargetSlot, invalidate: bool = False) -> None:
        """See PlainTcpTarget. What is sent is also kept."""
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
                self._put_kept(slot, task, task.put, kept)
                task.put = None
            _WORD.pack_into(header, bhs.EXP_DATA_SN_OFFSET, task.sn)
            _WORD.pack_into(header, _SNACK_TAG_OFFSET, task.snack_tag)
            kept.header = bytes(header)
        if not kept.collapsed:
            self._tx.queued.append(self._tx.frame(kept.header, memoryview(inline), None, slot))
        if header[0] == bhs.NOP_IN and itt == bhs.NO_TAG:
            return  # it took no StatSN
        (stat_sn, _, _) = _NUMBERS.unpack_from(header, _NUMBERS_OFFSET)
        self._kept.add(stat_sn, kept)
        while (surplus := self._kept.surplus()) is not None:
            self._let_go(surplus)

    def _put_kept(self, slot: TargetSlot, task: Task, data: memoryview, kept: KeptPdu) -> None:
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
        if data and (kept.tell or self._kept.fits(len(data))):
            kept.data = data
            kept.slot = slot
            slot.busy += 1
            if kept.tell or self._kept.presses:
                self._next_ttt = kept.ttt = (self._next_ttt + 1) & TTT_MASK
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
        slot = self._kept.let_go(kept)
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
        return self._kept.inline

    def forget_kept(self) -> None:
        """See the seam. A SNACK for that is rejected from now on."""
        for kept in self._kept.all():
            if not kept.tell:
                self._let_go(kept)
        while (surplus := self._kept.surplus(LEAST_INLINE)) is not None:
            self._let_go(surplus)

    @property
    def unacknowledged(self) -> int | None:
        """See the seam."""
        return self._kept.oldest

    # -- SNACK ------------------------------------------------------------------------------------

    def retransmit(self, snack: pdu.SnackRequest) -> tuple[int, int]:
        """See the seam."""
        if self._answering >= _MOST_ANSWERS or self._again >= _MOST_AGAIN:
            raise RemoteProtocolError("iSCSI", "flood of SNACKs, whose answers are not taken")
        if snack.kind == pdu.SNACK_STATUS:
            return self._again_status(snack), 0
        if snack.kind == pdu.SNACK_DATA_ACK:
            return self._take_data_ack(snack), 0
        if snack.kind == pdu.SNACK_R_DATA:
            return self._again_resegmented(snack), 0
        if snack.kind == pdu.SNACK_DATA:
            return self._again_data(snack)
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

    def _again_status(self, snack: pdu.SnackRequest) -> int:
        found = self._kept.statuses(snack.beg_run, snack.run_length, self._numbers.stat_sn)
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

    def _take_data_ack(self, snack: pdu.SnackRequest) -> int:
        kept = self._kept.of_tag(snack.ttt, snack.lun)
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

    def _again_data(self, snack: pdu.SnackRequest) -> tuple[int, int]:
        for task in self._tasks.values():
            burst = self._bursts.get(task.ttt) if task.ttt is not None else None
            if task.itt == snack.itt and burst is not None:
                return self._again_r2t(snack, task, burst)
        found = self._kept.of_task(snack.itt)
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

    def _again_r2t(self, snack: pdu.SnackRequest, task: Task, burst: Burst) -> tuple[int, int]:
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

    def _again_resegmented(self, snack: pdu.SnackRequest) -> int:
        """R-Data SNACK: Data-In in pieces of the present length, and a SCSI Response with the
        SNACK Tag (11.16.3)."""
        if snack.ttt in (0, bhs.NO_TAG) or snack.beg_run or snack.run_length:
            return pdu.REJECT_INVALID_FIELD
        for task in self._tasks.values():
            if task.itt == snack.itt and self._kept.of_task(snack.itt) is None:
                task.snack_tag = snack.ttt  # nothing of its data was sent yet
                return 0
        found = self._kept.of_task(snack.itt)
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

    # -- what comes -------------------------------------------------------------------------------

    def _place(self, message: memoryview, at: int) -> memoryview | None:
        """See PlainTcpTarget. A Data-Out that shows that others were lost is dropped, and
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
        return super()._place(message, at)

    def _recover(self, burst: Burst) -> None:
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

    def _deliver(self, message: memoryview, placed: bool) -> None:
        """See PlainTcpTarget. Every PDU of an initiator acknowledges statuses."""
        self._hear(message)
        super()._deliver(message, placed)

    def _hear(self, message: memoryview) -> None:
        (exp_stat_sn,) = _WORD.unpack_from(message, _EXP_STAT_SN_OFFSET)
        if serial_lt(self._numbers.stat_sn, exp_stat_sn):
            return  # it acknowledges what was never sent
        for kept in self._kept.acknowledge(exp_stat_sn):
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
