"""The iSCSI layer of the target, for one session with one connection. No trio, no socket.

Login, then commands: each SCSI Command becomes a ScsiTask of the device server; its data moves by
``put_data`` and ``get_data``; its response carries StatSN, ExpCmdSN and MaxCmdSN
(RFC 7143 sections 4.2, 11). What may wait for a disk is handed to ``offload``.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

from iserblk.datamover.iser_target import IserTarget, TargetSlot
from iserblk.datamover.seam import PduSlot
from iserblk.errors import IserblkError, RemoteProtocolError
from iserblk.iscsi import bhs, pdu
from iserblk.iscsi.keys import SessionParameters
from iserblk.iscsi.login_target import LoginTarget
from iserblk.iscsi.serial import serial_lt
from iserblk.iscsi.text import send_targets_answer
from iserblk.scsi import luns
from iserblk.scsi import sense as sense_data
from iserblk.scsi import status as sam
from iserblk.target.buffers import BufferPool
from iserblk.target.seam import DATA_IN, DATA_OUT, DeviceServer, ScsiTask

log = logging.getLogger(__name__)

QUEUE_DEPTH = 128  # commands that an initiator may have outstanding
UNEXPECTED = 32  # immediate PDUs beside them
LOGIN_SLOTS = 4
CONTROL_SLOTS = 32  # for answers to NOP, text, task management
CONTROL_INLINE = 8192
SENSE_INLINE = 256
DATA_BUDGET = 64 << 20  # bytes of buffers in use, above which commands wait
_NO_TAG = 0xFFFFFFFF

# What a task is doing.
_IDLE = 0
_DEFERRED = 1  # waits for buffer space
_FETCHING = 2  # get_data is under way
_RUNNING = 3  # in a thread
_ENDED = 4  # response queued


class TargetTask(TargetSlot):
    """One SCSI command at the target, with the slot of its response."""

    __slots__ = (
        "aborted",
        "advertised_from",
        "buffer",
        "control",
        "edtl",
        "fetching",
        "filled",
        "flags",
        "itt",
        "lun",
        "on_aborted",
        "state",
        "task",
    )

    def __init__(self, index: int, control: bool = False) -> None:
        """``control``: not for a command, but for the answer to another PDU."""
        super().__init__(index)
        self.control = control
        self.itt = _NO_TAG
        self.lun = 0
        self.edtl = 0
        self.filled = 0  # bytes of Data-Out that have come
        self.fetching = 0  # bytes that get_data is fetching behind them
        self.advertised_from = 0  # the byte of Data-Out that the Write Base Offset names
        self.flags = 0
        self.task: ScsiTask
        self.buffer: memoryview | None = None
        self.state = _IDLE
        self.aborted = False
        self.on_aborted: list[Callable[[], None]] = []


class TargetConnection:
    """Implements TargetUser. ``done``: logged out, or ended; the owner then closes it.

    ``offload(slot)``: the owner runs ``device.run(slot.task, slot.buffer)`` in a thread and then
    calls ``finish(slot)`` and ``flush()``. ``on_login(self)``: called when login is complete.
    ``on_reset(lun, self)``: a LOGICAL UNIT RESET was asked for; end the tasks of other sessions.
    """

    def __init__(
        self,
        datamover: IserTarget,
        device: DeviceServer,
        login: LoginTarget,
        *,
        on_login: Callable[[TargetConnection], None],
        on_reset: Callable[[int, TargetConnection], None],
        portal: str,
    ) -> None:
        self._dm = datamover
        self._device = device
        self.login = login
        self.offload: Callable[[TargetTask], None]  # set by the owner before ``progress``
        self._on_login = on_login
        self._on_reset = on_reset
        self._portal = portal
        self.parameters: SessionParameters | None = None
        self.done = False
        self.nexus = object()
        self._attached = False
        self.running = 0  # tasks in threads
        self._held = False
        self._pool = BufferPool()
        self._tasks: dict[int, TargetTask] = {}  # by ITT: not yet ended
        self._deferred: deque[TargetTask] = deque()
        self._control = [TargetTask(index, True) for index in range(LOGIN_SLOTS)]
        self._free: list[TargetTask] = []
        self._stat_sn = 0
        self._exp_cmd_sn = 0
        self._max_cmd_sn = 0
        datamover.user = self
        datamover.allocate_connection_resources(self._control, CONTROL_INLINE, LOGIN_SLOTS)

    # -- driven by the owner ----------------------------------------------------------------------

    def progress(self, now: float) -> None:
        """Take in what has come and send what it leads to. Raises TransportError at the end."""
        self._dm.progress(now)
        if self._deferred:
            self._resume()
        self._dm.flush()

    def flush(self) -> None:
        self._dm.flush()

    def hold(self) -> None:
        """Start no command until ``unhold``: tasks of the session that this one reinstates are
        still writing, and an old write must not land after a new one."""
        self._held = True

    def unhold(self) -> None:
        """Raises TransportError as ``flush``."""
        self._held = False
        self._resume()
        self._dm.flush()

    def abandon(self) -> None:
        """The session is over, from now on: no command of it starts any more, and the peer is cut
        off. ``close`` follows when nothing waits for the descriptor."""
        self.done = True
        for task in self._tasks.values():
            task.aborted = True
        self._tasks.clear()
        self._deferred.clear()
        self._dm.disconnect()

    def close(self) -> None:
        """Give everything back. No thread may be running a task of this connection."""
        self.done = True
        self._dm.connection_terminate()
        if self._attached:
            self._attached = False
            self._device.detach(self.nexus)

    # -- notifications ----------------------------------------------------------------------------

    def control_notify(self, message: memoryview, at: int, invalidated: int) -> None:
        opcode = message[at] & bhs.OPCODE_MASK
        if self.parameters is None:
            self._login(message, at, opcode)
        elif opcode == bhs.SCSI_COMMAND:
            self._scsi_command(message, at)
        elif opcode == bhs.NOP_OUT:
            self._nop_out(message, at)
        elif opcode == bhs.TASK_MANAGEMENT_REQUEST:
            self._task_management(pdu.TaskManagementRequest.unpack_from(message, at))
        elif opcode == bhs.TEXT_REQUEST:
            self._text(message, at)
        elif opcode == bhs.LOGOUT_REQUEST:
            self._logout(pdu.LogoutRequest.unpack_from(message, at))
        elif opcode == bhs.SNACK_REQUEST:
            self._reject(message, at, pdu.REJECT_PROTOCOL_ERROR)
        else:
            self._reject(message, at, pdu.REJECT_COMMAND_NOT_SUPPORTED)

    def data_completion_notify(self, slot: PduSlot) -> None:
        assert isinstance(slot, TargetTask)
        if slot.aborted:
            self._drop(slot)
        elif slot.task.status:
            self._respond(slot)  # ended by another session's reset
        else:
            slot.filled += slot.fetching
            self._start(slot)

    def sent_notify(self, slot: PduSlot) -> None:
        assert isinstance(slot, TargetTask)
        if slot.state == _ENDED and not slot.busy:
            self._recycle(slot)

    def connection_terminate_notify(self, error: Exception) -> None:
        self.done = True

    def _recycle(self, slot: TargetTask) -> None:
        """Everything of the task has left: its memory may be used again."""
        if slot.buffer is not None:
            self._pool.give(slot.buffer)
            slot.buffer = None
        self._dm.deallocate_task_resources(slot)
        slot.state = _IDLE
        slot.filled = 0
        slot.aborted = False
        (self._control if slot.control else self._free).append(slot)

    def _control_slot(self) -> TargetTask:
        if not self._control:
            raise RemoteProtocolError("iSCSI", "flood of control PDUs: answers are not taken")
        slot = self._control.pop()
        slot.state = _ENDED
        slot.inline_length = 0
        return slot

    def _send_control(self, slot: TargetTask) -> None:
        self._dm.send_control(slot)

    def _next_stat_sn(self) -> int:
        stat_sn = self._stat_sn
        self._stat_sn = (stat_sn + 1) & 0xFFFFFFFF
        return stat_sn

    # -- login ------------------------------------------------------------------------------------

    def _login(self, message: memoryview, at: int, opcode: int) -> None:
        if opcode != bhs.LOGIN_REQUEST:
            raise RemoteProtocolError("iSCSI", f"opcode {opcode:#x} before the end of login")
        header = bytes(message[at : at + bhs.BHS_LENGTH])
        answers = self.login.receive(header, bhs.data_segment_untrusted(message, at))
        for answer, data in answers:
            slot = self._control_slot()
            slot.bhs[:] = answer
            slot.inline[: len(data)] = data
            slot.inline_length = len(data)
            self._send_control(slot)
        if self.login.failed:
            self.done = True
        elif self.login.done:
            self._enter_full_feature_phase()

    def _enter_full_feature_phase(self) -> None:
        """Resources beyond the login buffers come into being only now."""
        login = self.login
        self._stat_sn = login.stat_sn
        self._exp_cmd_sn = login.exp_cmd_sn
        self._max_cmd_sn = login.max_cmd_sn
        self.parameters = login.parameters
        if not login.discovery:
            # Twice the depth: a slot is free again only when its response is known to have left.
            self._free = [TargetTask(i) for i in range(2 * QUEUE_DEPTH)]
            self._dm.allocate_connection_resources(self._free, SENSE_INLINE, QUEUE_DEPTH)
            self._device.attach(self.nexus)
            self._attached = True
        controls = [TargetTask(i, True) for i in range(CONTROL_SLOTS)]
        self._dm.allocate_connection_resources(controls, CONTROL_INLINE, UNEXPECTED)
        self._control += controls
        self._dm.notice_key_values(self.parameters)
        self._dm.enable_datamover()
        self._on_login(self)

    # -- SCSI commands ----------------------------------------------------------------------------

    def _accept_cmd_sn(self, opcode_byte: int, cmd_sn: int) -> bool:
        """Commands of one connection come in order: anything else than the expected number is a
        duplicate, or outside of the window, and ignored (RFC 7143 section 4.2.2.1)."""
        if opcode_byte & bhs.IMMEDIATE:
            return True
        if cmd_sn != self._exp_cmd_sn or serial_lt(self._max_cmd_sn, cmd_sn):
            log.warning(
                "%s: CmdSN %d ignored (expected %d, at most %d)",
                self._portal,
                cmd_sn,
                self._exp_cmd_sn,
                self._max_cmd_sn,
            )
            return False
        self._exp_cmd_sn = (cmd_sn + 1) & 0xFFFFFFFF
        return True

    def _scsi_command(self, message: memoryview, at: int) -> None:
        (first, flags, lengths, lun_field, itt, edtl, cmd_sn, _, cdb) = (
            bhs.SCSI_COMMAND_FIELDS.unpack_from(message, at)
        )
        if not self._attached:
            self._reject(message, at, pdu.REJECT_PROTOCOL_ERROR)
            return
        if not self._accept_cmd_sn(first, cmd_sn):
            return
        if itt in self._tasks:
            self._reject(message, at, pdu.REJECT_TASK_IN_PROGRESS)
            return
        if not self._free:
            raise RemoteProtocolError("iSCSI", "more commands than MaxCmdSN allows")
        slot = self._free.pop()
        slot.itt = itt
        slot.edtl = edtl
        slot.flags = flags
        slot.lun = lun = luns.decode(lun_field)
        self._tasks[itt] = slot
        self._dm.map_task(slot)
        if lengths >> 24:
            cdb += bhs.extended_cdb_untrusted(message, at)
        task = slot.task = self._device.begin(self.nexus, lun, cdb)
        immediate = lengths & 0xFFFFFF
        if task.direction == DATA_OUT:
            if immediate > edtl or (
                immediate and self.parameters is not None and not self.parameters.immediate_data
            ):
                raise RemoteProtocolError("iSCSI", f"{immediate} bytes of immediate data")
            if (edtl if flags & bhs.FLAG_WRITE else 0) < task.length:
                task.status = sam.CHECK_CONDITION
                task.sense = sense_data.encode_fixed(sense_data.ILLEGAL_REQUEST, 0x24, 0x00)
                self._respond(slot)
                return
            if immediate:
                # Copied: the receive buffer is good until the next progress only.
                data = bhs.data_segment_untrusted(message, at)
                slot.filled = min(immediate, task.length)
                slot.buffer = self._pool.take(max(task.length, 1))
                slot.buffer[: slot.filled] = data[: slot.filled]
        used = self._pool.used
        if self._held or self._deferred or (used and used + task.length > DATA_BUDGET):
            slot.state = _DEFERRED
            self._deferred.append(slot)
        else:
            self._start(slot)

    def _resume(self) -> None:
        """Buffers came back: go on with what waited for them, in order."""
        while self._deferred and not self._held:
            slot = self._deferred[0]
            if self._pool.used and self._pool.used + slot.task.length > DATA_BUDGET:
                return
            self._deferred.popleft()
            self._start(slot)

    def _start(self, slot: TargetTask) -> None:
        """Get the buffer and the data that the task needs, and run it."""
        task = slot.task
        if slot.buffer is None and task.length:
            slot.buffer = self._pool.take(task.length)
        if task.direction == DATA_OUT and slot.filled < task.length:
            self._fetch(slot)
        else:
            self._execute(slot)

    def _fetch(self, slot: TargetTask) -> None:
        """R2T: what immediate data did not bring. Running code advertises the first byte that it
        did not send (RFC 7145 calls that TaggedBufferForSolicitedDataOnly=Yes)."""
        assert slot.buffer is not None and self.parameters is not None
        at = slot.filled
        if slot.state != _FETCHING:
            slot.state = _FETCHING
            whole = self.parameters.tagged_buffer_for_solicited_data_only is False
            slot.advertised_from = 0 if whole else at
        # One R2T at a time asks for one burst at most (RFC 7143 section 13.13).
        slot.fetching = min(slot.task.length - at, self.parameters.max_burst_length)
        self._dm.get_data(slot, slot.buffer[at : at + slot.fetching], at - slot.advertised_from)

    def _execute(self, slot: TargetTask) -> None:
        task = slot.task
        if task.status:
            self._respond(slot)
        elif task.may_block or not self._device.run(task, slot.buffer, True):
            # Disks are waited for elsewhere; the answer comes through ``finish``.
            slot.state = _RUNNING
            self.running += 1
            self.offload(slot)
        else:
            self._respond(slot)

    def finish(self, slot: TargetTask) -> None:
        """The offloaded ``run`` has ended."""
        self.running -= 1
        if self.done:
            return
        if slot.aborted:
            self._drop(slot)
        else:
            self._respond(slot)

    def _respond(self, slot: TargetTask) -> None:
        """Data-In, if any, and the SCSI Response, in one post."""
        task = slot.task
        edtl = slot.edtl
        moved = task.transferred if task.direction == DATA_IN else task.length
        if task.status:
            moved = task.transferred
        residual = edtl - moved
        flags = bhs.FLAG_FINAL
        if residual > 0:
            flags |= bhs.RESIDUAL_UNDERFLOW
        elif residual < 0:
            flags |= bhs.RESIDUAL_OVERFLOW
            residual = -residual
        if task.direction == DATA_IN and moved and slot.flags & bhs.FLAG_READ and edtl:
            assert slot.buffer is not None
            data = slot.buffer if moved == len(slot.buffer) else slot.buffer[:moved]
            self._dm.put_data(slot, data if moved <= edtl else data[:edtl], 0)
        sense = task.sense
        if sense:
            slot.inline[:2] = len(sense).to_bytes(2, "big")
            slot.inline[2 : 2 + len(sense)] = sense
            slot.inline_length = 2 + len(sense)
        else:
            slot.inline_length = 0
        self._max_cmd_sn = (self._max_cmd_sn + 1) & 0xFFFFFFFF
        stat_sn = self._stat_sn
        self._stat_sn = (stat_sn + 1) & 0xFFFFFFFF
        bhs.SCSI_RESPONSE_FIELDS.pack_into(
            slot.bhs,
            0,
            bhs.SCSI_RESPONSE,
            flags,
            0,
            task.status,
            slot.inline_length,
            slot.itt,
            0,
            stat_sn,
            self._exp_cmd_sn,
            self._max_cmd_sn,
            0,
            0,
            residual,
        )
        del self._tasks[slot.itt]
        slot.state = _ENDED
        self._dm.send_control(slot, True)

    # -- task management --------------------------------------------------------------------------

    def _task_management(self, request: pdu.TaskManagementRequest) -> None:
        if not self._accept_cmd_sn(request.opcode, request.cmd_sn):
            return
        lun = luns.decode(request.lun)
        if request.function == pdu.TMF_ABORT_TASK:
            slot = self._tasks.get(request.referenced_task_tag)
            if slot is None:
                self._answer_task_management(request, pdu.TMF_TASK_DOES_NOT_EXIST)
            else:
                self._abort([slot], request)
        elif request.function in (pdu.TMF_ABORT_TASK_SET, pdu.TMF_CLEAR_TASK_SET):
            self._abort([slot for slot in self._tasks.values() if slot.lun == lun], request)
        elif request.function == pdu.TMF_LOGICAL_UNIT_RESET:
            if not self._device.reset_lun(lun):
                self._answer_task_management(request, pdu.TMF_LUN_DOES_NOT_EXIST)
                return
            self._on_reset(lun, self)
            self._abort([slot for slot in self._tasks.values() if slot.lun == lun], request)
        else:
            self._answer_task_management(request, pdu.TMF_NOT_SUPPORTED)

    def _abort(self, slots: list[TargetTask], request: pdu.TaskManagementRequest) -> None:
        """End tasks without a response; the function is answered when the last has ended: none of
        them touches the initiator's buffers, or the medium, after that."""
        left = len(slots)
        if not left:
            self._answer_task_management(request, pdu.TMF_COMPLETE)
            return

        def one_ended() -> None:
            nonlocal left
            left -= 1
            if not left:
                self._answer_task_management(request, pdu.TMF_COMPLETE)

        for slot in slots:
            slot.aborted = True
            slot.on_aborted.append(one_ended)
            if slot.state == _DEFERRED:
                self._deferred.remove(slot)
                self._drop(slot)

    def _drop(self, slot: TargetTask) -> None:
        """An aborted task has come to its end."""
        self._tasks.pop(slot.itt, None)
        self._max_cmd_sn = (self._max_cmd_sn + 1) & 0xFFFFFFFF
        callbacks, slot.on_aborted = slot.on_aborted, []
        self._recycle(slot)
        for callback in callbacks:
            callback()

    def abort_lun(self, lun: int) -> None:
        """Another session reset the LUN: its tasks here end with TASK ABORTED."""
        for slot in list(self._tasks.values()):
            if slot.lun != lun or slot.state == _RUNNING:
                continue  # what runs already counts as having ended before the reset
            slot.task.status = sam.TASK_ABORTED
            slot.task.transferred = 0
            if slot.state == _DEFERRED:
                self._deferred.remove(slot)
                self._respond(slot)

    def _answer_task_management(self, request: pdu.TaskManagementRequest, response: int) -> None:
        slot = self._control_slot()
        pdu.TaskManagementResponse(
            response=response,
            itt=request.itt,
            stat_sn=self._next_stat_sn(),
            exp_cmd_sn=self._exp_cmd_sn,
            max_cmd_sn=self._max_cmd_sn,
        ).pack_into(slot.bhs)
        self._send_control(slot)

    # -- other PDUs -------------------------------------------------------------------------------

    def _nop_out(self, message: memoryview, at: int) -> None:
        request = pdu.NopOut.unpack_from(message, at)
        if request.itt == _NO_TAG:
            return  # the answer to a ping of ours, or news of ExpStatSN
        if not self._accept_cmd_sn(message[at], request.cmd_sn):
            return
        slot = self._control_slot()
        assert self.parameters is not None
        data = bhs.data_segment_untrusted(message, at)
        length = min(
            len(data), len(slot.inline), self.parameters.initiator_recv_data_segment_length
        )
        slot.inline[:length] = data[:length]
        slot.inline_length = length
        pdu.NopIn(
            lun=request.lun,
            itt=request.itt,
            ttt=_NO_TAG,
            data_length=length,
            stat_sn=self._next_stat_sn(),
            exp_cmd_sn=self._exp_cmd_sn,
            max_cmd_sn=self._max_cmd_sn,
        ).pack_into(slot.bhs)
        self._send_control(slot)

    def _text(self, message: memoryview, at: int) -> None:
        """SendTargets, in discovery sessions and in normal ones (RFC 7143 appendix C)."""
        request = pdu.TextRequest.unpack_from(message, at)
        if not self._accept_cmd_sn(message[at], request.cmd_sn):
            return
        data = bytes(bhs.data_segment_untrusted(message, at))
        answer = send_targets_answer(data, {self.login.target_name: [self._portal]})
        slot = self._control_slot()
        if len(answer) > len(slot.inline):
            raise RemoteProtocolError("iSCSI", "text request with too many keys")
        slot.inline[: len(answer)] = answer
        slot.inline_length = len(answer)
        pdu.TextResponse(
            flags=bhs.FLAG_FINAL,
            lun=bytes(8),
            itt=request.itt,
            ttt=_NO_TAG,
            data_length=len(answer),
            stat_sn=self._next_stat_sn(),
            exp_cmd_sn=self._exp_cmd_sn,
            max_cmd_sn=self._max_cmd_sn,
        ).pack_into(slot.bhs)
        self._send_control(slot)

    def _logout(self, request: pdu.LogoutRequest) -> None:
        slot = self._control_slot()
        pdu.LogoutResponse(
            response=0,
            itt=request.itt,
            stat_sn=self._next_stat_sn(),
            exp_cmd_sn=self._exp_cmd_sn,
            max_cmd_sn=self._max_cmd_sn,
            time2wait=0,
            time2retain=0,
        ).pack_into(slot.bhs)
        self._send_control(slot)
        self.done = True

    def _reject(self, message: memoryview, at: int, reason: int) -> None:
        """Reject the PDU at ``at``: its header goes back as data (RFC 7143 section 11.17)."""
        slot = self._control_slot()
        slot.inline[: bhs.BHS_LENGTH] = message[at : at + bhs.BHS_LENGTH]
        slot.inline_length = bhs.BHS_LENGTH
        pdu.Reject(
            reason=reason,
            data_length=bhs.BHS_LENGTH,
            stat_sn=self._next_stat_sn(),
            exp_cmd_sn=self._exp_cmd_sn,
            max_cmd_sn=self._max_cmd_sn,
        ).pack_into(slot.bhs)
        self._send_control(slot)

    def describe(self) -> dict[str, object]:
        return self._dm.describe()

    def fileno(self) -> int:
        return self._dm.fileno()

    def wants_write(self) -> bool:
        return self._dm.wants_write()


__all__ = ["IserblkError", "TargetConnection", "TargetTask"]
