"""The tcp datamover of an initiator: Traditional iSCSI (RFC 7143 sections 4.2.5, 11.3 to 11.8).

Data-In is placed into the buffer of its task. A Data-In with a status is notified to the layer
above as the SCSI Response that it stands for. This module answers R2Ts with Data-Outs. Unsolicited
data (immediate data, and the rest of the first burst where InitialR2T=No) goes with the command.

**ErrorRecoveryLevel 1 or more** (RFC 7143 sections 7.8, 7.9, 11.16) is chosen when full feature
phase begins: then PDUs that come pass through other methods. A Data-In, R2T or status that is
damaged or missing is asked for by SNACK; so is an R2T that a write has waited for, because not all
targets send a lost one again by themselves. Statuses are notified in the order of their StatSN, and
none before the data of its task is whole: so the layer above acknowledges nothing too early, and a
buffer that a damaged Data-In was placed in is right before its command ends. What the target cannot
send again ends with CHECK CONDITION, protocol service CRC error; a status that it cannot send
again ends the connection.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from struct import Struct
from typing import Final

from iserblk.datamover.allocation import Allocation, Event
from iserblk.datamover.arrivals import (
    MOST_ASKED,
    MOST_DAMAGED,
    MOST_RUNS,
    PATIENCE,
    Arrivals,
    Awaited,
    Gaps,
)
from iserblk.datamover.seam import (
    INLINE,
    InitiatorDatamover,
    InitiatorUser,
    Losses,
    PduSlot,
    not_told,
)
from iserblk.datamover.tcp_stream import NOWHERE, ByteStream, OutPdu, PduReceiver, PduSender
from iserblk.errors import RemoteProtocolError
from iserblk.iscsi import bhs, pdu
from iserblk.iscsi.keys import SessionParameters
from iserblk.scsi.tasks import BIDIRECTIONAL, READ, WRITE

# Of one sequence, that are made; the others when these have left.
_MOST_DATA_OUTS: Final = 64
_MOST_SNACKS: Final = 32 * MOST_RUNS  # of all tasks, that have not left
_MOST_RECOVERIES: Final = 8  # R2Ts beyond MaxOutstandingR2T, at ErrorRecoveryLevel 1 or more

_unpack_data_in: Final = bhs.DATA_IN_PLACE.unpack_from  # bound once, and typed: see bhs
_DataInFields = tuple[int, int, int, int]
_STAT_SN_OFFSET: Final = 24
_WORD: Final = Struct(">I")
ANY_SN: Final = -1  # the first R2TSN of a write that was reassigned
_CHECK_CONDITION: Final = 0x02  # SAM-5; the session reads its sense data
# SenseLength, and fixed format sense data: ABORTED COMMAND, protocol service CRC error (11.4.7.2).
_CRC_ERROR: Final = bytes.fromhex("0012 70000b000000000a 00000000 4705 00000000")


class _Transfer:
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
    """The rest of a sequence of Data-Outs. Implements Rest."""

    __slots__ = (
        "data_sn",
        "datamover",
        "end",
        "lun",
        "offset",
        "source",
        "token",
        "transfer",
        "ttt",
    )

    def __init__(
        self,
        datamover: TcpInitiator,
        transfer: _Transfer,
        source: memoryview,
        ttt: int,
        offset: int,
        end: int,
        lun: bytes,
        token: object,
    ) -> None:
        """See ``TcpInitiator.data_outs``."""
        self.datamover = datamover
        self.transfer = transfer
        self.source = source
        self.ttt = ttt
        self.offset = offset
        self.end = end
        self.lun = lun
        self.token = token
        self.data_sn = 0

    def following(self) -> list[OutPdu]:
        return self.datamover.data_outs(self)


class TcpInitiator:
    """Implements InitiatorDatamover over a byte stream."""

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
        self._tasks: dict[int, _Transfer] = {}  # by ITT
        self._placing: _Transfer | None = None
        # What the tasks had moved when the connection was terminated, for their reassignment.
        self.left: dict[int, _Transfer] = {}
        self._exp_stat_sn = 0
        self._allocation = Allocation()
        self._parameters = SessionParameters()
        self._immediate = 0  # bytes of immediate data in a write command, at most
        self._unsolicited = 0  # bytes of unsolicited data of a write, immediate data included
        self.losses = Losses()
        self._arrivals: Arrivals | None = None  # at ErrorRecoveryLevel 1 or more
        self._awaited: dict[int, Awaited] = {}  # by ITT, as of the last tick
        self._snacks = _Transfer(None, None, bhs.NO_TAG)  # stands for them where PDUs are counted

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
        if self._parameters.error_recovery_level:
            self._arrivals = Arrivals(self._exp_stat_sn)
            self._rx.recover(self._place_recovering, self._deliver_recovering, self._discarded)
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
                transfer = _Transfer(data, None, itt)
                if self._arrivals is not None:
                    self._take_over(itt, transfer)
                self._tasks[itt] = transfer
                if self._unsolicited:
                    self._write_unsolicited(transfer, data, header)
                    return
            else:
                self._tasks[itt] = _Transfer(None, data, itt)
        elif direction == BIDIRECTIONAL:
            (itt,) = bhs.ITT.unpack_from(header, bhs.ITT_OFFSET)
            transfer = _Transfer(data or NOWHERE, slot.data_in or NOWHERE, itt)
            if self._arrivals is not None:
                self._take_over(itt, transfer)
            self._tasks[itt] = transfer
            header += slot.inline[: slot.inline_length]
        self._tx.queued.append(self._tx.frame(header, None))

    def reassign(self, slot: PduSlot, control: PduSlot, before: InitiatorDatamover) -> None:
        """See the seam. ExpDataSN is the number of the first Data-In that has not come; what has
        come behind it does not count, and comes once more (RFC 7143 section 11.5.6). R2Ts ask for
        what the target lacks, and go on with their numbers."""
        (itt,) = bhs.ITT.unpack_from(slot.bhs, bhs.ITT_OFFSET)
        data = slot.data
        transfer: _Transfer | None = None
        if slot.direction == BIDIRECTIONAL:
            transfer = _Transfer(data or NOWHERE, slot.data_in or NOWHERE, itt)
        elif slot.direction == READ and data:
            transfer = _Transfer(None, data, itt)
        elif slot.direction == WRITE and data:
            transfer = _Transfer(data, None, itt)
            transfer.sn = ANY_SN
        if transfer is not None and transfer.sink is not None:
            assert isinstance(before, TcpInitiator)  # all connections of a session are alike
            left = before.left.get(itt)
            if left is not None:
                transfer.sn, transfer.placed, transfer.moved = left.contiguous()
            _WORD.pack_into(control.bhs, bhs.EXP_DATA_SN_OFFSET, transfer.sn)
        if transfer is not None:
            self._tasks[itt] = transfer
        self._tx.queued.append(self._tx.frame(bytes(control.bhs), None))

    def _take_over(self, itt: int, transfer: _Transfer) -> None:
        """Where the command is sent again, Data-Outs of its first time may not have left yet:
        ``transfer`` owns them now, so that none refers to the buffer when the task has ended."""
        before = self._tasks.get(itt)
        if before is not None:
            self._tx.hand_over(before, transfer)
            before.forget()

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
        self._tx.queued.extend(pdus)

    def _data_outs(
        self,
        transfer: _Transfer,
        source: memoryview,
        ttt: int,
        offset: int,
        end: int,
        lun: bytes = bhs.NO_LUN,
        token: object = None,
    ) -> list[OutPdu]:
        """The Data-Outs of one sequence. ``token`` comes back when the last of them has left."""
        return self.data_outs(_DataOuts(self, transfer, source, ttt, offset, end, lun, token))

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
                self._exp_stat_sn,
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
        if self._arrivals is not None and self._arrivals.waiting:
            self._forget_status(itt, self._arrivals)
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
        placing = self._placing
        if placing is not None and placing.itt in self._tasks:  # its last Data-In is cut off
            placing.sn -= 1
            placing.moved -= placing.size
            placing.placed -= placing.size
        self._placing = None
        for transfer in self._tasks.values():
            transfer.forget()
        if self._tasks:
            self.left = self._tasks
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
        fields: _DataInFields = _unpack_data_in(message, at)
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
        if transfer.sn == ANY_SN:
            transfer.sn = r2t.r2t_sn
        if r2t.r2t_sn != transfer.sn:
            raise RemoteProtocolError("iSCSI", f"R2TSN {r2t.r2t_sn}, expected {transfer.sn}")
        self._answer_r2t(r2t, transfer, source, transfer.asked, 0)
        transfer.sn += 1

    def _answer_r2t(
        self,
        r2t: pdu.ReadyToTransfer,
        transfer: _Transfer,
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
            assert isinstance(transfer, _Transfer)
            transfer.unsent -= 1

    # -- ErrorRecoveryLevel 1 or more --------------------------------------------------------------

    def _place_recovering(self, message: memoryview, at: int) -> memoryview | None:
        """``_place`` at this level."""
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

    def _is_new(self, transfer: _Transfer, sn: int, offset: int = 0, size: int = 0) -> bool:
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

    def _miss(self, transfer: _Transfer, end: int, rest: bool) -> None:
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
        self, transfer: _Transfer, begin: int, end: int, low: int, high: int, rest: bool
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

    def _ask_for_data(self, transfer: _Transfer, begin: int, length: int) -> None:
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

    def _deliver_recovering(self, message: memoryview, placed: bool) -> None:
        """``_deliver`` at this level."""
        opcode = message[0] & bhs.OPCODE_MASK
        if opcode == bhs.DATA_IN:
            self._take_data_in(message, placed)
        elif opcode == bhs.R2T:
            self._r2t_recovering(pdu.ReadyToTransfer.unpack_from(message))
        elif opcode == bhs.NOP_IN and bhs.ITT.unpack_from(message, 16)[0] == bhs.NO_TAG:
            self._status_exists(_WORD.unpack_from(message, _STAT_SN_OFFSET)[0])
            self.user.control_notify(message, 0, 0)
        else:
            if opcode == bhs.REJECT:
                self._snack_rejected(message)
            self._numbered(message)

    def _take_data_in(self, message: memoryview, placed: bool) -> None:
        if not placed:  # it has no data, but may carry a status
            self._place_recovering(message, 0)
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

    def _r2t_recovering(self, r2t: pdu.ReadyToTransfer) -> None:
        transfer = self._tasks.get(r2t.itt)
        if transfer is None:
            return  # of a task that has ended: it was sent twice
        source = transfer.source
        if source is None:
            raise RemoteProtocolError("iSCSI", f"R2T for task {r2t.itt:#x}: no such write")
        if transfer.sn == ANY_SN:
            transfer.sn = r2t.r2t_sn
        if self._is_new(transfer, r2t.r2t_sn):
            # A recovery R2T asks again for what was sent before.
            self._answer_r2t(r2t, transfer, source, 0, _MOST_RECOVERIES)

    # Statuses, in the order of their StatSN.

    def _status_exists(self, end: int) -> None:
        """All statuses up to StatSN ``end`` have been sent: ask for those that are missing."""
        arrivals = self._arrivals
        assert arrivals is not None
        if arrivals.ahead(end) > 0:
            for begin, length in arrivals.exists(end):
                self._snack(pdu.SNACK_STATUS, begin, length)

    def _numbered(self, message: memoryview) -> None:
        """A PDU that takes a StatSN: give it on now, or in its turn."""
        arrivals = self._arrivals
        assert arrivals is not None
        (stat_sn,) = _WORD.unpack_from(message, _STAT_SN_OFFSET)
        ahead = arrivals.ahead(stat_sn)
        if ahead < 0:
            return  # it came before
        if not ahead and not arrivals.waiting and self._complete(message):
            self._give(message, arrivals)
            return
        arrivals.keep(stat_sn, message)
        if ahead:
            self._status_exists(stat_sn)
        self._give_on()

    def _give_on(self) -> None:
        """Notify what has its turn now."""
        arrivals = self._arrivals
        assert arrivals is not None
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

    def _ask_for_rest(self, message: memoryview, transfer: _Transfer, sink: memoryview) -> None:
        """A response with GOOD that does not say how many Data-In there were: not all targets do.
        Ask for what follows the last where bytes are missing that it does not report."""
        both = transfer.source is not None
        place = bhs.BIDI_RESIDUAL_OFFSET if both else bhs.RESIDUAL_OFFSET
        (residual,) = _WORD.unpack_from(message, place)
        if not message[1] & (bhs.BIDI_UNDERFLOW if both else bhs.RESIDUAL_UNDERFLOW):
            residual = 0
        gaps = transfer.gaps
        if transfer.moved + residual >= len(sink) or (gaps is not None and gaps.runs):
            return
        if gaps is None:
            gaps = transfer.gaps = Gaps(transfer.sn, transfer.placed, transfer.moved)
        gaps.add(transfer.sn, transfer.sn + 1, transfer.placed, len(sink))  # one at least
        if not gaps.rest:
            gaps.rest = True
            self._ask_for_data(transfer, transfer.sn, 0)
        transfer.sn += 1

    def _notify(self, message: memoryview) -> None:
        """Give a numbered PDU to the layer above."""
        opcode = message[0] & bhs.OPCODE_MASK
        if opcode in (bhs.DATA_IN, bhs.SCSI_RESPONSE):
            (itt,) = bhs.ITT.unpack_from(message, bhs.ITT_OFFSET)
            transfer = self._tasks.get(itt)
            gaps = None if transfer is None else transfer.gaps
            if gaps is not None and gaps.failed and gaps.runs and not message[2] | message[3]:
                message = self._crc_error(message)
            elif opcode == bhs.DATA_IN:
                if transfer is not None:
                    self._data_in(message)
                return
            else:
                self._check_moved(message)
        self.user.control_notify(message, 0, 0)

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
        assert arrivals is not None
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

    def _forget_status(self, itt: int, arrivals: Arrivals) -> None:
        """The task with this tag has ended: give no status of it on."""
        for stat_sn, message in arrivals.held():
            if (
                message
                and message[0] & bhs.OPCODE_MASK in (bhs.DATA_IN, bhs.SCSI_RESPONSE)
                and bhs.ITT.unpack_from(message, bhs.ITT_OFFSET)[0] == itt
            ):
                arrivals.forget(stat_sn)

    def tick(self) -> None:
        """See the seam."""
        arrivals = self._arrivals
        if arrivals is None:
            return
        for begin, length in arrivals.ask_again():
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

    def _await_r2t(self, transfer: _Transfer, awaited: dict[int, Awaited]) -> None:
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

    def _give(self, message: memoryview, arrivals: Arrivals) -> None:
        arrivals.next()
        self._exp_stat_sn = arrivals.expected
        self._notify(message)
        if arrivals.waiting:
            self._give_on()

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
