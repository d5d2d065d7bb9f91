"""The full feature phase of a session with one connection (RFC 7143 sections 4.2, 11).

Threads and who may do what:

- ``take``, ``submit`` and ``release`` may be called from any thread at any time. A short lock
  keeps CmdSN order and wire order the same; nobody waits inside it.
- Everything that ends a task happens in ``progress`` and ``tick``, and only the one who runs them
  at the moment (a driver sees to that it is one at a time) changes a slot that was submitted. So
  completion takes no lock at all.
- A failed send is not an error of ``submit``: the connection is over, and the next ``progress``
  finds out and ends every task, in one place.
"""

from __future__ import annotations

from iserblk.errors import ConnectionLost, IserblkError, RemoteProtocolError
from iserblk.initiator import controls
from iserblk.initiator.submitting import CONTROL_SLOTS as CONTROL_SLOTS  # noqa: PLC0414
from iserblk.initiator.submitting import Submitting
from iserblk.initiator.submitting import ignore_closing as ignore_closing  # noqa: PLC0414
from iserblk.initiator.task import FREE, INDEX_MASK, QUEUED, SENT, TAKEN, TaskSlot
from iserblk.iscsi import bhs, pdu
from iserblk.iscsi.serial import serial_lt

UNEXPECTED = 32  # receives for PDUs that answer nothing: NOP-In, Async Message, Reject
_NO_TAG = 0xFFFFFFFF


class Session(Submitting):
    """One logged-in session. Implements InitiatorUser.

    ``corked``: a driver sets it while more submissions are about to come, and calls ``flush``
    itself. ``last_heard``: when anything was received, for the keep-alive.
    """

    def start(self, cmd_sn: int, exp_cmd_sn: int, max_cmd_sn: int, exp_stat_sn: int) -> None:
        """Full feature phase begins with these numbers, from the final Login Response."""
        self._cmd_sn = cmd_sn
        self._exp_cmd_sn = exp_cmd_sn
        self._open = max(0, bhs.window_size(cmd_sn, max_cmd_sn))
        self._max_cmd_sn = max_cmd_sn
        self._exp_stat_sn = exp_stat_sn
        self._dm.user = self
        self._dm.notice_key_values(self.parameters)
        self._dm.enable_datamover()

    # -- completing: the runner of progress and tick ----------------------------------------------

    def progress(self, now: float) -> int:
        """Take in what has come and end the tasks that it ends; returns how many PDUs came.

        Never raises: an error ends the session, its tasks and its waiters (``error``).
        """
        if self.error is not None:
            return 0
        try:
            count = self._dm.progress(now)
        except IserblkError as error:
            self.fail(error)
            return 0
        if count:
            self.last_heard = now
        elif self._queued:
            self._send_queued()  # no answer, but perhaps memory that is free again
        return count

    def control_notify(self, message: memoryview, at: int, invalidated: int) -> None:
        (
            opcode,
            flags,
            response,
            status,
            lengths,
            itt,
            stat_sn,
            exp_cmd_sn,
            max_cmd_sn,
            residual,
        ) = bhs.RESPONSE_HOT.unpack_from(message, at)
        if opcode != bhs.SCSI_RESPONSE:
            self._control_response(message, at, opcode, invalidated)
            return
        index = itt & INDEX_MASK
        slot = self.tasks[index] if index < len(self.tasks) else None
        if slot is None or slot.itt != itt or slot.state < SENT:
            raise RemoteProtocolError("iSCSI", f"SCSI Response for task {itt:#x}: no such task")
        self._exp_stat_sn = (stat_sn + 1) & 0xFFFFFFFF
        self._dm.deallocate_task_resources(slot, invalidated)
        slot.status = status
        slot.response = response
        if flags & bhs.RESIDUAL_FLAGS:
            slot.residual = residual if flags & bhs.RESIDUAL_UNDERFLOW else -residual
        else:
            slot.residual = 0
        if lengths:
            slot.sense = bhs.sense_of_untrusted(message, at)
            if status and slot.lun in self.on_sense:
                self.on_sense[slot.lun](slot)
        elif status:
            slot.sense = b""
        if max_cmd_sn != self._max_cmd_sn or self._queued:
            self._window(exp_cmd_sn, max_cmd_sn)
        slot.state = TAKEN
        slot.waiter.task_done()

    def _window(self, exp_cmd_sn: int, max_cmd_sn: int) -> None:
        """ExpCmdSN and MaxCmdSN of a PDU (RFC 7143 section 4.2.2.1): only ever forward."""
        with self._lock:
            if serial_lt(max_cmd_sn, (exp_cmd_sn - 1) & 0xFFFFFFFF):
                return
            if serial_lt(self._max_cmd_sn, max_cmd_sn):
                self._max_cmd_sn = max_cmd_sn
                self._open = max(0, bhs.window_size(self._cmd_sn, max_cmd_sn))
            if serial_lt(self._exp_cmd_sn, exp_cmd_sn):
                self._exp_cmd_sn = exp_cmd_sn
            if not self._queued or self._open <= 0:
                return
        self._send_queued()

    def _control_response(
        self, message: memoryview, at: int, opcode: int, invalidated: int
    ) -> None:
        """Any PDU but the SCSI Response."""
        if invalidated:
            raise RemoteProtocolError("iSCSI", f"PDU {opcode:#x} invalidated an STag")
        head = pdu.TargetHeader.unpack_from(message, at)
        if opcode not in pdu.TARGET_OPCODES:
            raise RemoteProtocolError("iSCSI", f"opcode {opcode:#x} in full feature phase")
        if head.advances_stat_sn:
            self._exp_stat_sn = (head.stat_sn + 1) & 0xFFFFFFFF
        self._window(head.exp_cmd_sn, head.max_cmd_sn)
        if opcode == bhs.NOP_IN and head.itt == _NO_TAG:
            if head.ttt != _NO_TAG:
                controls.answer_ping(self, bytes(message[at + 8 : at + 16]), head.ttt)
        elif opcode == bhs.ASYNC_MESSAGE:
            controls.async_message(self, pdu.AsyncMessage.unpack_from(message, at))
        elif opcode == bhs.REJECT:
            controls.rejected(self, message, at)
        else:
            slot = self.find(head.itt)
            asked = slot is not None and slot.bhs[0] & bhs.OPCODE_MASK
            if slot is None or slot in self.tasks or asked != opcode - bhs.NOP_IN:
                raise RemoteProtocolError(
                    "iSCSI", f"PDU {opcode:#x} answers task {head.itt:#x}: no such task"
                )
            slot.response = head.response
            self._end_control(slot)

    def find(self, itt: int) -> TaskSlot | None:
        """The slot in flight that has this tag."""
        index = itt & INDEX_MASK
        if index < len(self._table):
            slot = self._table[index]
            if slot.itt == itt and slot.state >= SENT:
                return slot
        return None

    def _end_control(self, slot: TaskSlot) -> None:
        slot.state = FREE
        self._free_controls.append(slot)
        slot.waiter.task_done()

    def end_rejected(self, slot: TaskSlot, error: Exception) -> None:
        """The target has rejected the PDU of ``slot``, which is in flight."""
        if slot in self.tasks:
            self._dm.deallocate_task_resources(slot, 0)
            self._end(slot, error)
        else:
            slot.response = 0xFF
            self._end_control(slot)

    # -- ending -----------------------------------------------------------------------------------

    def fail(self, error: IserblkError) -> None:
        """The connection is over: end every task with ``error``. No buffer is touched any more."""
        with self._lock:
            if self.error is not None:
                return
            # Without its traceback: that names the buffers of whoever ran ``progress``.
            self.error = error.with_traceback(None)
            self._queued.clear()
            takers = list(self._takers)
            self._takers.clear()
        self.on_closing(self._dm.fileno())
        self._dm.connection_terminate()
        for slot in self._table:
            if slot.state >= QUEUED:
                slot.stag = 0  # went with the connection
                slot.data = None
                self._end(slot, self._ended())
        for taker in takers:
            taker.task_done()

    def connection_terminate_notify(self, error: Exception) -> None:
        self.fail(error if isinstance(error, IserblkError) else ConnectionLost(str(error)))
