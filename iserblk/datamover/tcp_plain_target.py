"""The tcp datamover of a target: Traditional iSCSI (RFC 7143 sections 4.2.5, 11.4, 11.7, 11.8).

Put_Data becomes Data-In PDUs before the response of the task; the last of them carries the status
where that is allowed. Get_Data becomes an R2T; its Data-Outs are received straight into the sink.
Immediate data and unsolicited Data-Outs are notified to the layer above as they come. Whatever is
missing or damaged ends the connection; see ``tcp_recovering_target``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from struct import Struct
from typing import Final

from iserblk.datamover.allocation import Allocation, Event
from iserblk.datamover.data_in import DataIns
from iserblk.datamover.seam import (
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

TTT_MASK: Final = 0x7FFFFFFF  # never 0xFFFFFFFF, which means unsolicited data
_COPIED: Final = 512  # bytes of a PDU in its slot, up to which it is copied

# Of a SCSI Response: StatSN, ExpCmdSN, MaxCmdSN.
_NUMBERS: Final = Struct(">III")
_NUMBERS_OFFSET: Final = 24
_WORD: Final = Struct(">I")


class Task:
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


class Burst:
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


class PlainTcpTarget:
    """Implements TargetDatamover for one connection, without recovery."""

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
        self._tasks: dict[TargetSlot, Task] = {}
        self._bursts: dict[int, Burst] = {}  # by Target Transfer Tag
        self._next_ttt = 0
        self._placing: Burst | None = None
        self._command = Task(b"", bhs.NO_TAG, False)

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
        """See the seam."""
        raise LocalProtocolError("TASK REASSIGN needs ErrorRecoveryLevel 2")

    def put_data(
        self,
        slot: TargetSlot,
        data: memoryview,
        buffer_offset: int,
        notify_enable: bool = False,
        acknowledge: bool = False,
    ) -> None:
        """See the seam. The data leaves with the response, the next PDU in ``slot``."""
        if acknowledge:
            raise LocalProtocolError("the A-bit needs an ErrorRecoveryLevel above 0")
        slot.notices = NOTIFY if notify_enable else 0
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
        burst = Burst(slot, task.itt, sink, buffer_offset, notify_enable)
        slot.busy += 1
        self._ask(task, burst)

    def _ask(self, task: Task, burst: Burst) -> None:
        """Queue the next R2T of ``task``, for what ``burst`` lacks."""
        self._next_ttt = ttt = (self._next_ttt + 1) & TTT_MASK
        self._bursts[ttt] = burst
        task.ttt = ttt
        r2t_sn = task.sn
        task.sn = burst.slot.first_sn = r2t_sn + 1
        self._queue_r2t(task, burst, r2t_sn, ttt, burst.at)

    def _queue_r2t(
        self, task: Task, burst: Burst, r2t_sn: int, ttt: int, at: int, token: object = None
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

    def _data_in(self, slot: TargetSlot, task: Task, data: memoryview, response: bytes) -> bool:
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
            self._left(sent.popleft())

    def _left(self, slot: object) -> None:
        """All of a PDU has left whose token is ``slot``."""
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
            self._command = Task(bytes(message[8:16]), itt, both)
        elif opcode == bhs.TASK_MANAGEMENT_REQUEST:  # for ``map_task``: not the last command's
            self._command = Task(b"", bhs.NO_TAG, False)
        elif opcode == bhs.DATA_OUT and pdu.DataOut.unpack_from(message).ttt != bhs.NO_TAG:
            if self._place(message, 0) is NOWHERE:
                return
            raise RemoteProtocolError("iSCSI", "a Data-Out without data")
        self.user.control_notify(message, 0, 0)

    def _filled(self, burst: Burst) -> None:
        slot = burst.slot
        task = self._tasks[slot]
        assert task.ttt is not None
        del self._bursts[task.ttt]
        task.ttt = None
        slot.busy -= 1
        if burst.notify:
            self.user.data_completion_notify(slot, task.sn - 1)

    def retransmit(self, snack: pdu.SnackRequest) -> tuple[int, int]:
        """See the seam."""
        return pdu.REJECT_PROTOCOL_ERROR, 0

    @property
    def kept_bytes(self) -> int:
        return 0

    def forget_kept(self) -> None:
        """See the seam: nothing is kept."""

    @property
    def unacknowledged(self) -> int | None:
        return None

    def tick(self) -> None:
        """See the seam: nothing is asked for again."""

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
