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

import logging
import threading
from collections import deque
from collections.abc import Callable
from time import monotonic

from iserblk.datamover.seam import INLINE, NO_DATA, InitiatorDatamover
from iserblk.errors import (
    Busy,
    ConnectionLost,
    IserblkError,
    RemoteProtocolError,
    TransportError,
)
from iserblk.initiator import controls
from iserblk.initiator.task import (
    ABORTING,
    FREE,
    INDEX_BITS,
    INDEX_MASK,
    ITT_MASK,
    QUEUED,
    SENT,
    TAKEN,
    Operation,
    TaskSlot,
    Waiter,
)
from iserblk.iscsi import bhs, pdu
from iserblk.iscsi.keys import SessionParameters
from iserblk.iscsi.serial import serial_lt

log = logging.getLogger(__name__)

CONTROL_SLOTS = 16  # for NOP, task management and logout: enough for a ladder on several tasks
UNEXPECTED = 32  # receives for PDUs that answer nothing: NOP-In, Async Message, Reject
_STEP = 1 << INDEX_BITS
_NO_TAG = 0xFFFFFFFF


def _nothing() -> None:
    pass


def ignore_closing(_fd: int) -> None:
    """For drivers whose waits end by themselves when their descriptor is closed."""


class Session:
    """One logged-in session. Implements InitiatorUser.

    ``corked``: a driver sets it while more submissions are about to come, and calls ``flush``
    itself. ``last_heard``: when anything was received, for the keep-alive.
    """

    def __init__(
        self,
        datamover: InitiatorDatamover,
        slots: list[TaskSlot],
        parameters: SessionParameters,
        portal: str,
        io_timeout: float,
    ) -> None:
        """``slots``: allocated by the datamover; the last CONTROL_SLOTS are for control PDUs."""
        self._dm = datamover
        self._table = slots
        self.tasks = slots[:-CONTROL_SLOTS]
        self._free = list(reversed(self.tasks))
        self._free_controls = slots[-CONTROL_SLOTS:]
        self.parameters = parameters
        self.portal = portal
        self.io_timeout = io_timeout
        self.provider_reason = ""  # why the connection is by the provider that it has
        self.corked = False
        self.error: IserblkError | None = None
        self.last_heard = monotonic()
        self.new_waiter: Callable[[], Waiter]  # set by the driver
        # What a write may carry in its command; 0 where immediate data was not negotiated.
        self.immediate_limit = (
            min(
                parameters.first_burst_length,
                parameters.target_recv_data_segment_length,
                len(slots[0].inline),
            )
            if parameters.immediate_data
            else 0
        )
        self._lock = threading.Lock()
        self._flush_lock = threading.Lock()
        self._queued: deque[TaskSlot] = deque()  # submitted, behind a closed window
        self._takers: deque[Waiter] = deque()
        self.unsent_pongs = 0  # answers to pings since the wire was last seen free
        self._cmd_sn = 0
        self._exp_cmd_sn = 0
        self._open = 0  # commands that the target's window still takes
        self._exp_stat_sn = 0
        # What ``submit`` calls when its command is to leave; a driver may gather a few.
        self.flush_soon: Callable[[], None] = self.flush
        self.on_blocked: Callable[[], None] = _nothing  # the socket is full: wait for it, driver
        self.on_closing: Callable[[int], None] = (
            ignore_closing  # the descriptor is about to be closed
        )
        self.on_logout_request: Callable[[], None] | None = None
        # By LUN field: who hears of each command that brings sense data, before its waiter does.
        self.on_sense: dict[bytes, Callable[[TaskSlot], None]] = {}
        # What is to be run before the logout, by whoever logs out. They raise nothing.
        self.farewells: list[Callable[[], Operation[None]]] = []

    def start(self, cmd_sn: int, exp_cmd_sn: int, max_cmd_sn: int, exp_stat_sn: int) -> None:
        """Full feature phase begins with these numbers, from the final Login Response."""
        self._cmd_sn = cmd_sn
        self._exp_cmd_sn = exp_cmd_sn
        self._open = max(0, bhs.window_size(cmd_sn, max_cmd_sn))
        self._max_cmd_sn = max_cmd_sn
        self._exp_stat_sn = exp_stat_sn
        for slot in self._table:
            slot.cdb = slot.bhs[bhs.CDB_OFFSET : bhs.CDB_OFFSET + 16]
        self._dm.user = self
        self._dm.notice_key_values(self.parameters)
        self._dm.enable_datamover()

    # -- submitting: any thread -------------------------------------------------------------------

    def take(self, waiter: Waiter) -> TaskSlot | None:
        """A free slot, or None: then ``waiter.pending`` was raised by one; wait and try again.

        Raises the session's error once it has failed.
        """
        if self.error is not None:
            raise self._ended()
        try:
            slot = self._free.pop()
        except IndexError:
            with self._lock:
                if self.error is not None:
                    raise self._ended() from None
                # Known as waiting before looking again: who gives a slot back meanwhile sees it.
                waiter.pending += 1
                self._takers.append(waiter)
                try:
                    slot = self._free.pop()
                except IndexError:
                    return None
                self._takers.pop()
                waiter.pending -= 1
        slot.state = TAKEN
        return slot

    def take_now(self) -> TaskSlot | None:
        """A free slot if there is one and the session lives, without waiting."""
        if self.error is not None:
            return None
        try:
            slot = self._free.pop()
        except IndexError:
            return None
        slot.state = TAKEN
        return slot

    def forget(self, waiter: Waiter) -> None:
        """``waiter`` no longer waits for a free slot."""
        with self._lock:
            if waiter in self._takers:
                self._takers.remove(waiter)
                waiter.pending -= 1

    def release(self, slot: TaskSlot) -> None:
        """Give back a slot that was taken and is not in flight."""
        slot.state = FREE
        slot.data = None
        slot.error = None  # with its traceback, and the buffers that are named there
        slot.last = -1
        slot.deadline = 0.0
        self._free.append(slot)
        if self._takers:
            with self._lock:
                taker = self._takers.popleft() if self._takers else None
            if taker is not None:
                taker.task_done()

    def submit(self, slot: TaskSlot) -> None:
        """Send the command of ``slot``, or queue it in order while the window is closed.

        ``slot.waiter.pending`` already counts it. Never raises: a failed session ends the slot
        with its error at once. Its deadline is ``slot.deadline``; 0: the time for one request, from
        now.
        """
        if not slot.deadline:
            slot.deadline = monotonic() + self.io_timeout
        with self._lock:
            failed = self.error is not None
            if not failed and (self._open <= 0 or self._queued or not self._send(slot)):
                slot.state = QUEUED
                self._queued.append(slot)
                return
        if failed:
            self._end(slot, self._ended())
        elif not self.corked:
            # If the session fails from here on, ``fail`` ends the slot: it is in flight.
            self.flush_soon()

    def _send(self, slot: TaskSlot) -> bool:
        """Number the command and hand it down. False, and nothing has changed: there is nothing to
        advertise its data from until another task ends. Under the lock."""
        slot.itt = itt = (slot.itt + _STEP) & ITT_MASK
        bhs.SCSI_COMMAND_HOT.pack_into(
            slot.bhs,
            0,
            bhs.SCSI_COMMAND,
            slot.flags,
            slot.inline_length if slot.direction == INLINE else 0,
            slot.lun,
            itt,
            slot.length,
            self._cmd_sn,
            self._exp_stat_sn,
        )
        slot.cmd_sn = self._cmd_sn
        before, slot.state = slot.state, SENT
        try:
            self._dm.send_control(slot)
        except Busy:
            slot.state = before
            return False
        self._cmd_sn = (self._cmd_sn + 1) & 0xFFFFFFFF
        self._open -= 1
        return True

    def flush(self) -> None:
        """Send what is queued. Whoever is at it takes along what others queued meanwhile."""
        dm = self._dm
        while dm.queued:
            if not self._flush_lock.acquire(blocking=False):
                return
            try:
                dm.flush()
            except TransportError as error:
                log.debug("%s: send failed: %s", self.portal, error)
                return
            finally:
                self._flush_lock.release()
            if dm.wants_write():
                self.on_blocked()

    # -- control PDUs: the runner of progress and tick --------------------------------------------

    @property
    def free_controls(self) -> int:
        return len(self._free_controls)

    def take_control(self) -> TaskSlot | None:
        """A slot for an immediate PDU of ours; None when all are in flight."""
        if self.error is not None or not self._free_controls:
            return None
        slot = self._free_controls.pop()
        slot.state = TAKEN
        slot.direction = NO_DATA
        slot.inline_length = 0
        slot.error = None
        return slot

    def send_immediate(self, slot: TaskSlot, waiter: Waiter) -> None:
        """Send the PDU whose BHS is in ``slot.bhs``, as an immediate one: it uses up no CmdSN and
        passes the window. ITT, CmdSN and ExpStatSN are filled in here; ``slot.waiter`` hears of
        the answer, and the slot goes back by itself."""
        slot.waiter = waiter
        with self._lock:
            slot.itt = itt = (slot.itt + _STEP) & ITT_MASK
            bhs.ITT.pack_into(slot.bhs, bhs.ITT_OFFSET, itt)
            bhs.CMD_SN_EXP_STAT_SN.pack_into(
                slot.bhs, bhs.CMD_SN_OFFSET, self._cmd_sn, self._exp_stat_sn
            )
            slot.state = SENT
            self._dm.send_control(slot)
        self.flush()

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

    def _send_queued(self) -> None:
        """Commands that waited, as far as the window and the memory allow."""
        with self._lock:
            while self._queued and self._open > 0 and self._send(self._queued[0]):
                self._queued.popleft()
        if not self.corked:
            self.flush()

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

    def send_pong(self, slot: TaskSlot, lun: bytes, ttt: int) -> None:
        """Send a NOP-Out that nothing answers. The slot goes back at once, to the far end."""
        with self._lock:
            pdu.NopOut(
                lun=lun, itt=_NO_TAG, ttt=ttt, cmd_sn=self._cmd_sn, exp_stat_sn=self._exp_stat_sn
            ).pack_into(slot.bhs)
            self._dm.send_control(slot)
        self.flush()
        slot.state = FREE
        self._free_controls.insert(0, slot)

    def end_rejected(self, slot: TaskSlot, error: Exception) -> None:
        """The target has rejected the PDU of ``slot``, which is in flight."""
        if slot in self.tasks:
            self._dm.deallocate_task_resources(slot, 0)
            self._end(slot, error)
        else:
            slot.response = 0xFF
            self._end_control(slot)

    def _end(self, slot: TaskSlot, error: Exception) -> None:
        slot.error = error
        slot.state = TAKEN
        slot.waiter.task_done()

    def end_aborted(self, slot: TaskSlot, error: Exception) -> None:
        """End a task that the target has given up, or that never went out. For the ladder."""
        if slot.state == QUEUED:
            with self._lock:
                if slot not in self._queued:  # it went out a moment ago
                    return
                self._queued.remove(slot)
        elif slot.state in (SENT, ABORTING):
            self._dm.deallocate_task_resources(slot, 0)
        else:
            return
        self._end(slot, error)

    # -- ending -----------------------------------------------------------------------------------

    def _ended(self) -> IserblkError:
        """The session's error, fresh: one exception object must not be raised in many threads."""
        error = self.error
        assert error is not None  # callers have looked
        if isinstance(error, RemoteProtocolError):
            return RemoteProtocolError(
                error.layer, str(error).removeprefix(f"{error.layer}: "), error.terminate
            )
        return type(error)(str(error))

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

    def disconnect(self) -> None:
        """Ask for the end from any thread: the next ``progress`` finds the connection lost."""
        self._dm.disconnect()

    @property
    def unsent(self) -> int:
        """PDUs that wait for ``flush``."""
        return len(self._dm.queued)

    @property
    def busy(self) -> int:
        """Slots that are taken, in flight or not: cheap, for heuristics."""
        return len(self.tasks) - len(self._free)

    @property
    def in_flight(self) -> int:
        return sum(slot.state >= QUEUED for slot in self.tasks)

    def describe(self) -> dict[str, object]:
        return {**self._dm.describe(), "provider_reason": self.provider_reason}

    def fileno(self) -> int:
        return self._dm.fileno()

    def wants_write(self) -> bool:
        return self._dm.wants_write()
