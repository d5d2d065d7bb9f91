"""The tcp datamover of an initiator at ErrorRecoveryLevel 1 or more (RFC 7143 sections 7.8, 7.9,
11.16).

A Data-In, R2T or status that is damaged or missing is asked for by SNACK; so is an R2T that a write
has waited for, because not all targets send a lost one again by themselves. Statuses are notified
in the order of their StatSN, and none before the data of its task is whole: so the layer above
acknowledges nothing too early, and a buffer that a damaged Data-In was placed in is right before
its command ends. What the target cannot send again ends with CHECK CONDITION, protocol service CRC
error; a status that it cannot send again ends the connection.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

from iserblk.datamover.arrivals import (
    MOST_ASKED,
    MOST_DAMAGED,
    MOST_RUNS,
    PATIENCE,
    Arrivals,
    Awaited,
    Gaps,
)
from iserblk.datamover.seam import InitiatorDatamover, PduSlot
from iserblk.datamover.tcp_plain_initiator import PlainTcpInitiator, Transfer
from iserblk.datamover.tcp_stream import NOWHERE, PduSender
from iserblk.errors import RemoteProtocolError
from iserblk.iscsi import bhs, pdu
from iserblk.scsi.tasks import BIDIRECTIONAL, READ, WRITE

_MOST_SNACKS: Final = 32 * MOST_RUNS  # of all tasks, that have not left
_MOST_RECOVERIES: Final = 8  # R2Ts beyond MaxOutstandingR2T

_STAT_SN_OFFSET: Final = 24
_WORD: Final = Struct(">I")
_ANY_SN: Final = -1  # the first R2TSN of a write that was reassigned
_CHECK_CONDITION: Final = 0x02  # SAM-5; the session reads its sense data
# SenseLength, and fixed format sense data: ABORTED COMMAND, protocol service CRC error (11.4.7.2).
_CRC_ERROR: Final = bytes.fromhex("0012 70000b000000000a 00000000 4705 00000000")


class RecoveringTcpInitiator(PlainTcpInitiator):
    """Implements InitiatorDatamover over a byte stream, from the end of the login on."""

    def __init__(self, login: PlainTcpInitiator) -> None:
        """``login``: the datamover of the login, whose connection this is from now on. It is
        enabled, and has no tasks."""
        super().__init__(login._stream, login._inline_size, login._receive_data)
        self.user = login.user
        self.on_unfinished = login.on_unfinished
        self.losses = login.losses
        self._allocation = login._allocation
        self.notice_key_values(login._parameters)
        self._exp_stat_sn = login._exp_stat_sn
        self._rx = login._rx
        self._rx.recover(self._place, self._deliver, self._discarded)
        self._tx = login._tx
        login._tx = PduSender(login._stream)  # it may be at the end of its ``progress`` still
        # What the tasks had moved when the connection was terminated, for their reassignment.
        self.left: dict[int, Transfer] = {}
        self._arrivals = Arrivals(self._exp_stat_sn)
        self._awaited: dict[int, Awaited] = {}  # by ITT, as of the last tick
        self._snacks = Transfer(None, None, bhs.NO_TAG)  # stands for them where PDUs are counted

    # -- down -------------------------------------------------------------------------------------

    def _begin(self, itt: int, transfer: Transfer) -> None:
        """A task that sends data begins. Where its command is sent again, Data-Outs of the first
        time may not have left yet: ``transfer`` owns them now, so that none refers to the buffer
        when the task has ended."""
        before = self._tasks.get(itt)
        if before is not None:
            self._tx.hand_over(before, transfer)
            before.forget()
        self._tasks[itt] = transfer

    def reassign(self, slot: PduSlot, control: PduSlot, before: InitiatorDatamover) -> None:
        """See the seam. ExpDataSN is the number of the first Data-In that has not come; what has
        come behind it does not count, and comes once more (RFC 7143 section 11.5.6). R2Ts ask for
        what the target lacks, and go on with their numbers."""
        (itt,) = bhs.ITT.unpack_from(slot.bhs, bhs.ITT_OFFSET)
        data = slot.data
        transfer: Transfer | None = None
        if slot.direction == BIDIRECTIONAL:
            transfer = Transfer(data or NOWHERE, slot.data_in or NOWHERE, itt)
        elif slot.direction == READ and data:
            transfer = Transfer(None, data, itt)
        elif slot.direction == WRITE and data:
            transfer = Transfer(data, None, itt)
            transfer.sn = _ANY_SN
        if transfer is not None and transfer.sink is not None:
            assert isinstance(
                before, RecoveringTcpInitiator
            )  # all connections of a session are alike
            left = before.left.get(itt)
            if left is not None:
                transfer.sn, transfer.placed, transfer.moved = left.contiguous()
            _WORD.pack_into(control.bhs, bhs.EXP_DATA_SN_OFFSET, transfer.sn)
        if transfer is not None:
            self._tasks[itt] = transfer
        self._tx.queued.append(self._tx.frame(bytes(control.bhs), None))

    def deallocate_task_resources(self, slot: PduSlot, invalidated: int) -> None:
        if self._arrivals.waiting:
            (itt,) = bhs.ITT.unpack_from(slot.bhs, bhs.ITT_OFFSET)
            self._forget_status(itt)
        super().deallocate_task_resources(slot, invalidated)

    def connection_terminate(self) -> None:
        placing = self._placing
        if placing is not None and placing.itt in self._tasks:  # its last Data-In is cut off
            placing.sn -= 1
            placing.moved -= placing.size
            placing.placed -= placing.size
        if self._tasks:
            self.left = self._tasks
        super().connection_terminate()

    # -- up ---------------------------------------------------------------------------------------

    def _place(self, message: memoryview, at: int) -> memoryview | None:
        """Where to place the data of the PDU at ``at``, for PduReceiver."""
        self._placing = None
        if message[at] & bhs.OPCODE_MASK != bhs.DATA_IN:
            return None
        lengths, itt, data_sn, offset = bhs.DATA_IN_PLACE.unpack_from(message, at)
        transfer = self._tasks.get(itt)
        if transfer is None:
            return NOWHERE  # of a task that has ended: it was asked for twice
        sink = transfer.sink
        size = lengths & 0xFFFFFF
        if sink is None or offset + size > len(sink):
            raise RemoteProtocolError(
                "iSCSI", f"Data-In of {size} bytes at {offset} for task {itt:#x}, which has no room"
            )
        if not self._is_new(transfer, data_sn, offset, size):
            return NOWHERE
        transfer.moved += size
        transfer.size = size
        self._placing = transfer
        return sink[offset : offset + size]

    def _is_new(self, transfer: Transfer, sn: int, offset: int = 0, size: int = 0) -> bool:
        """Take in the number of a Data-In or R2T, and ask for those that it shows to be missing.
        False: it came before (7.9). ``offset``, ``size``: of the bytes of a Data-In, which no other
        has: otherwise a read that lacks data would count as whole."""
        if sn < transfer.sn:
            gaps = transfer.gaps
            if gaps is None or not gaps.fill(sn, offset, size):
                return False
            transfer.placed = max(transfer.placed, offset + size)
            return True
        if size and offset < transfer.placed:
            raise RemoteProtocolError(
                "iSCSI", f"Data-In {sn} at {offset}: {transfer.placed} came before"
            )
        if sn > transfer.sn:
            self._miss(transfer, sn, False)
        transfer.sn = sn + 1
        if size:
            if transfer.gaps is not None:
                transfer.gaps.part(len(transfer.gaps.runs), offset, offset)
            transfer.placed = offset + size
        return True

    def _miss(self, transfer: Transfer, end: int, rest: bool) -> None:
        """All Data-In and R2Ts from the next up to ``end`` are missing. ``rest``: there are no
        others behind them."""
        begin = transfer.sn
        size = max(0 if each is None else len(each) for each in (transfer.sink, transfer.source))
        if end - begin > size:  # each has a byte at least
            raise RemoteProtocolError("iSCSI", f"DataSN or R2TSN {end}, expected {begin}")
        room = 0 if transfer.sink is None else len(transfer.sink)
        self._add_gap(transfer, begin, end, transfer.placed, room, rest)
        transfer.sn = end

    def _add_gap(
        self, transfer: Transfer, begin: int, end: int, low: int, high: int, rest: bool
    ) -> None:
        """Note what is missing, and ask for it. ``rest``: nothing follows; then all that follows is
        asked for, because LIO takes the number behind the last Data-In for one too high."""
        gaps = transfer.gaps
        if gaps is None:
            gaps = transfer.gaps = Gaps(begin, low, transfer.moved)
        gaps.add(begin, end, low, high)
        gaps.rest |= rest
        if len(gaps.runs) > MOST_RUNS:
            raise RemoteProtocolError("iSCSI", f"task {transfer.itt:#x}: more is lost than comes")
        if gaps.damaged > MOST_DAMAGED:
            gaps.failed = True
        else:
            self._ask_for_data(transfer, begin, 0 if rest else end - begin)

    def _ask_for_data(self, transfer: Transfer, begin: int, length: int) -> None:
        self._snack(pdu.SNACK_DATA, begin, length, itt=transfer.itt)

    def _snack(
        self,
        kind: int,
        beg_run: int,
        run_length: int,
        *,
        itt: int = bhs.NO_TAG,
        ttt: int = bhs.NO_TAG,
        lun: bytes = bytes(8),
    ) -> None:
        """Queue a SNACK. A target that does not take them, and goes on to bring them about, must
        not fill our memory."""
        snacks = self._snacks
        if snacks.unsent >= _MOST_SNACKS:
            self._settle_sent()
            if snacks.unsent >= _MOST_SNACKS:
                raise RemoteProtocolError("iSCSI", "the target does not take our SNACKs")
        snacks.unsent += 1
        if kind != pdu.SNACK_DATA_ACK:
            self.losses.snacks += 1
        header = pdu.SnackRequest(
            kind=kind,
            lun=lun,
            itt=itt,
            ttt=ttt,
            exp_stat_sn=self._exp_stat_sn,
            beg_run=beg_run,
            run_length=run_length,
        ).pack()
        unit = self._tx.frame(header, None, None, snacks)
        unit.owner = snacks  # they have a bound of their own
        self._tx.queued.append(unit)

    def _discarded(self, head: memoryview) -> None:
        """A PDU with a wrong data digest was dropped (7.8). Its header has a digest of its own, or
        is as good as any."""
        self.losses.damaged += 1
        transfer, self._placing = self._placing, None
        opcode = head[0] & bhs.OPCODE_MASK
        if transfer is not None:
            lengths, _, data_sn, offset = bhs.DATA_IN_PLACE.unpack_from(head)
            size = lengths & 0xFFFFFF
            transfer.moved -= size
            if transfer.gaps is not None:
                transfer.gaps.damaged += 1
            sink = transfer.sink
            last = head[1] & bhs.DATA_IN_STATUS != 0 or (
                sink is not None and offset + size == len(sink)
            )
            self._add_gap(transfer, data_sn, data_sn + 1, offset, offset + size, last)
        elif opcode not in (bhs.DATA_IN, bhs.R2T):
            (stat_sn,) = _WORD.unpack_from(head, _STAT_SN_OFFSET)
            (itt,) = bhs.ITT.unpack_from(head, bhs.ITT_OFFSET)
            takes_one = opcode != bhs.NOP_IN or itt != bhs.NO_TAG
            self._status_exists((stat_sn + takes_one) & 0xFFFFFFFF)

    def _deliver(self, message: memoryview, placed: bool) -> None:
        opcode = message[0] & bhs.OPCODE_MASK
        if opcode == bhs.DATA_IN:
            self._take_data_in(message, placed)
        elif opcode == bhs.R2T:
            self._r2t(pdu.ReadyToTransfer.unpack_from(message))
        elif opcode == bhs.NOP_IN and bhs.ITT.unpack_from(message, 16)[0] == bhs.NO_TAG:
            self._status_exists(_WORD.unpack_from(message, _STAT_SN_OFFSET)[0])
            self.user.control_notify(message, 0, 0)
        else:
            if opcode == bhs.REJECT:
                self._snack_rejected(message)
            self._numbered(message)

    def _take_data_in(self, message: memoryview, placed: bool) -> None:
        if not placed:  # it has no data, but may carry a status
            self._place(message, 0)
        transfer, self._placing = self._placing, None
        flags = message[1]
        filled = False
        if transfer is not None:
            gaps = transfer.gaps
            if flags & bhs.DATA_IN_ACKNOWLEDGE:
                lun, (ttt,) = bytes(message[8:16]), bhs.ITT.unpack_from(message, 20)
                if gaps is None:
                    self._snack(pdu.SNACK_DATA_ACK, transfer.sn, 0, ttt=ttt, lun=lun)
                else:
                    gaps.acknowledge = (lun, ttt)
            if gaps is not None and not gaps.runs:
                filled = True
                gaps.whole(transfer.sn, transfer.placed, transfer.moved)
                if gaps.acknowledge is not None:  # before the status is acknowledged (11.7.2)
                    lun, ttt = gaps.acknowledge
                    gaps.acknowledge = None
                    self._snack(pdu.SNACK_DATA_ACK, transfer.sn, 0, ttt=ttt, lun=lun)
        if flags & bhs.DATA_IN_STATUS:
            self._numbered(message)
        if filled:
            self._give_on()

    def _r2t(self, r2t: pdu.ReadyToTransfer) -> None:
        transfer = self._tasks.get(r2t.itt)
        if transfer is None:
            return  # of a task that has ended: it was sent twice
        source = transfer.source
        if source is None:
            raise RemoteProtocolError("iSCSI", f"R2T for task {r2t.itt:#x}: no such write")
        if transfer.sn == _ANY_SN:
            transfer.sn = r2t.r2t_sn
        if self._is_new(transfer, r2t.r2t_sn):
            # A recovery R2T asks again for what was sent before.
            self._answer_r2t(r2t, transfer, source, 0, _MOST_RECOVERIES)

    # Statuses, in the order of their StatSN.

    def _status_exists(self, end: int) -> None:
        """All statuses up to StatSN ``end`` have been sent: ask for those that are missing."""
        arrivals = self._arrivals
        if arrivals.ahead(end) > 0:
            for begin, length in arrivals.exists(end):
                self._snack(pdu.SNACK_STATUS, begin, length)

    def _numbered(self, message: memoryview) -> None:
        """A PDU that takes a StatSN: give it on now, or in its turn."""
        arrivals = self._arrivals
        (stat_sn,) = _WORD.unpack_from(message, _STAT_SN_OFFSET)
        ahead = arrivals.ahead(stat_sn)
        if ahead < 0:
            return  # it came before
        if not ahead and not arrivals.waiting and self._complete(message):
            self._give(message)
            return
        arrivals.keep(stat_sn, message)
        if ahead:
            self._status_exists(stat_sn)
        self._give_on()

    def _give_on(self) -> None:
        """Notify what has its turn now."""
        arrivals = self._arrivals
        while True:
            message = arrivals.head()
            if message is None or (message and not self._complete(message)):
                return
            arrivals.take()
            self._exp_stat_sn = arrivals.expected
            if message:
                self._notify(message)

    def _complete(self, message: memoryview) -> bool:
        """Whether a numbered PDU may be given on: all data of its task has come. Asks for what the
        PDU shows to be missing."""
        opcode = message[0] & bhs.OPCODE_MASK
        if opcode not in (bhs.DATA_IN, bhs.SCSI_RESPONSE):
            return True
        (itt,) = bhs.ITT.unpack_from(message, bhs.ITT_OFFSET)
        transfer = self._tasks.get(itt)
        sink = None if transfer is None else transfer.sink
        if transfer is None or sink is None:
            return True
        if transfer is self._placing:
            return False  # at a tick: some bytes of its last Data-In have not come yet
        if opcode == bhs.SCSI_RESPONSE:
            if message[2]:
                return True  # the other fields mean nothing
            (exp_data_sn,) = _WORD.unpack_from(message, bhs.EXP_DATA_SN_OFFSET)
            if exp_data_sn > transfer.sn:
                self._miss(transfer, exp_data_sn, True)
            elif not exp_data_sn and not message[3]:
                self._ask_for_rest(message, transfer, sink)
        gaps = transfer.gaps
        return gaps is None or gaps.failed or not gaps.runs

    def _ask_for_rest(self, message: memoryview, transfer: Transfer, sink: memoryview) -> None:
        """A response with GOOD that does not say how many Data-In there were: not all targets do.
        Ask for what follows the last where bytes are missing that it does not report."""
        gaps = transfer.gaps
        if (gaps is not None and gaps.runs) or not self._lacks_data(message, transfer, sink):
            return
        if gaps is None:
            gaps = transfer.gaps = Gaps(transfer.sn, transfer.placed, transfer.moved)
        gaps.add(transfer.sn, transfer.sn + 1, transfer.placed, len(sink))  # one at least
        if not gaps.rest:
            gaps.rest = True
            self._ask_for_data(transfer, transfer.sn, 0)
        transfer.sn += 1

    def _lacks_data(self, message: memoryview, transfer: Transfer, sink: memoryview) -> bool:
        """Whether bytes are missing that the response does not report."""
        both = transfer.source is not None
        place = bhs.BIDI_RESIDUAL_OFFSET if both else bhs.RESIDUAL_OFFSET
        reported = 0
        if message[1] & (bhs.BIDI_UNDERFLOW if both else bhs.RESIDUAL_UNDERFLOW):
            (reported,) = _WORD.unpack_from(message, place)
        lacks: bool = transfer.moved + reported < len(sink)
        return lacks

    def _notify(self, message: memoryview) -> None:
        """Give a numbered PDU to the layer above."""
        opcode = message[0] & bhs.OPCODE_MASK
        if opcode in (bhs.DATA_IN, bhs.SCSI_RESPONSE):
            (itt,) = bhs.ITT.unpack_from(message, bhs.ITT_OFFSET)
            transfer = self._tasks.get(itt)
            if transfer is not None and self._failed(message, transfer):
                message = self._crc_error(message)
            elif opcode == bhs.DATA_IN:
                if transfer is not None:
                    self._data_in(message)
                return
            else:
                self._check_moved(message)
        self.user.control_notify(message, 0, 0)

    def _failed(self, message: memoryview, transfer: Transfer) -> bool:
        """Whether the response is GOOD, and data does not come. A bidirectional task may lack only
        an R2T, in whose place the target has sent another."""
        gaps, sink = transfer.gaps, transfer.sink
        if gaps is None or sink is None or not gaps.failed or not gaps.runs:
            return False
        if message[2] or message[3]:
            return False
        return self._lacks_data(message, transfer, sink)

    def _crc_error(self, message: memoryview) -> memoryview:
        """The SCSI Response in place of ``message``, a GOOD of a read whose data does not come
        (7.8, a.2)."""
        header = bytearray(message[: bhs.BHS_LENGTH])
        header[:4] = bytes((bhs.SCSI_RESPONSE, bhs.FLAG_FINAL, 0, _CHECK_CONDITION))
        header[4:16] = bytes(12)
        bhs.LENGTHS.pack_into(header, bhs.LENGTHS_OFFSET, len(_CRC_ERROR))
        header[20:24] = bytes(4)
        header[36:48] = bytes(12)
        return memoryview(header + _CRC_ERROR)

    def _snack_rejected(self, message: memoryview) -> None:
        """A Reject has come. Of a SNACK it means that what is missing will not come."""
        header = bhs.data_segment_untrusted(message)
        if len(header) < bhs.BHS_LENGTH or header[0] & bhs.OPCODE_MASK != bhs.SNACK_REQUEST:
            return
        snack = pdu.SnackRequest.unpack_from(header)
        arrivals = self._arrivals
        if snack.kind == pdu.SNACK_STATUS:
            for begin, _ in arrivals.missing():
                distance = (begin - snack.beg_run) & 0xFFFFFFFF
                if not snack.run_length or distance < snack.run_length:
                    raise RemoteProtocolError("iSCSI", f"status {begin} is lost for good")
        transfer = self._tasks.get(snack.itt)
        if snack.kind == pdu.SNACK_DATA and transfer is not None and transfer.sink is not None:
            gaps = transfer.gaps
            if gaps is not None and gaps.runs:
                gaps.failed = True
                self._give_on()

    def _forget_status(self, itt: int) -> None:
        """The task with this tag has ended: give no status of it on."""
        for stat_sn, message in self._arrivals.held():
            if (
                message
                and message[0] & bhs.OPCODE_MASK in (bhs.DATA_IN, bhs.SCSI_RESPONSE)
                and bhs.ITT.unpack_from(message, bhs.ITT_OFFSET)[0] == itt
            ):
                self._arrivals.forget(stat_sn)

    def tick(self) -> None:
        """See the seam."""
        for begin, length in self._arrivals.ask_again():
            self._snack(pdu.SNACK_STATUS, begin, length)
        self._settle_sent()
        awaited: dict[int, Awaited] = {}
        for transfer in list(self._tasks.values()):
            gaps = transfer.gaps
            if gaps is None or gaps.failed or not gaps.runs:
                self._await_r2t(transfer, awaited)
                continue
            gaps.age += 1
            if gaps.age < PATIENCE:
                continue
            gaps.age = 0
            gaps.asked += 1
            if gaps.asked > MOST_ASKED:
                gaps.failed = True
                continue
            for begin, end, _, _ in gaps.runs:
                last = end == transfer.sn
                self._ask_for_data(transfer, begin, 0 if last and gaps.rest else end - begin)
        self._awaited = awaited
        self._give_on()

    def _await_r2t(self, transfer: Transfer, awaited: dict[int, Awaited]) -> None:
        """A tick of a task with nothing missing: if the target has all that it has asked for, but
        not all data, ask for its next R2T, after a while. It rejects that if it has not sent it
        (11.16). Not of a bidirectional task: a Reject could not be told from one about its
        Data-In."""
        source = transfer.source
        if source is None or transfer.sink is not None:
            return
        if transfer.asked >= len(source) or transfer.unsent:
            return
        r2t = self._awaited.get(transfer.itt)
        if r2t is None or r2t.sn != transfer.sn:
            r2t = Awaited(transfer.sn)
        if r2t.due():
            self._ask_for_data(transfer, max(transfer.sn, 0), 0)
        awaited[transfer.itt] = r2t

    def _give(self, message: memoryview) -> None:
        arrivals = self._arrivals
        arrivals.next()
        self._exp_stat_sn = arrivals.expected
        self._notify(message)
        if arrivals.waiting:
            self._give_on()
