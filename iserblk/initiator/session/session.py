"""The full feature phase of a session with one connection at a time (RFC 7143 sections 4.2, 11).

Threads and who may do what:

- ``take``, ``submit`` and ``release`` may be called from any thread at any time. A short lock
  keeps CmdSN order and wire order the same; nobody waits inside it.
- Everything that ends a task happens in ``progress`` and ``tick``, and only the one who runs them
  at the moment (a driver sees to that it is one at a time) changes a slot that was submitted. So
  completion takes no lock at all.
- A failed send is not an error of ``submit``: the connection is over, and the next ``progress``
  finds out, in one place.

A connection that is lost **suspends** a session that somebody keeps (``on_loss``): no buffer is
touched any more, what was in flight waits in the queue, in CmdSN order, and later commands behind
it. Whoever keeps it logs in again and **offers** what he has, a fresh session; the next
``progress`` **adopts** its connection, and sends what waits. A session that nobody keeps has failed
instead.
"""

from __future__ import annotations

import logging
from collections import deque
from time import monotonic

from iserblk.datamover.seam import INLINE, WRITE
from iserblk.errors import (
    CommandRejected,
    CommandTimeout,
    ConnectionLost,
    IserblkError,
    RemoteProtocolError,
)
from iserblk.initiator.session.logout import ANSWER_S, DRAIN_S, MOST_WAIT_S, fill_logout
from iserblk.initiator.session.sending import CONTROL_SLOTS as CONTROL_SLOTS  # noqa: PLC0414
from iserblk.initiator.session.sending import NO_ANSWER, Submitting
from iserblk.initiator.session.sending import ignore_closing as ignore_closing  # noqa: PLC0414
from iserblk.initiator.session.slots import INDEX_MASK, QUEUED, SENT, TAKEN, TaskSlot
from iserblk.iscsi import bhs, pdu, reasons
from iserblk.iscsi.serial import serial_lt
from iserblk.scsi import luns
from iserblk.scsi import sense as sense_data
from iserblk.scsi import status as sam

log = logging.getLogger(__name__)

UNEXPECTED = 32  # receives for PDUs that answer nothing: NOP-In, Async Message, Reject
_NO_TAG = 0xFFFFFFFF


class Parting:
    """A logout from a session that goes on: commands in flight may end, new ones wait for the next
    connection. Implements Waiter for the Logout Response."""

    def __init__(self, session: Session, by: float, why: str = "as the target had asked") -> None:
        """``by``: when the Logout Request must have been sent. ``why``: for messages."""
        self._session = session
        self._by = by
        self.why = why
        self.pending = 0

    def tick(self, now: float) -> None:
        session = self._session
        if self.pending:
            if now >= self._by:
                session.disconnect()  # no answer
            return
        if session.sent and now < self._by:
            return
        control = session.take_control()
        if control is None:
            if now >= self._by:
                session.disconnect()
            return
        fill_logout(control)
        self.pending = 1
        self._by = now + ANSWER_S
        session.send_immediate(control, self)

    def task_done(self) -> None:
        """The answer (``parted`` tells what it means), or the connection is lost."""


class Session(Submitting):
    """One logged-in session. Implements InitiatorUser.

    ``corked``: a driver sets it while more submissions are about to come, and calls ``flush``
    itself. ``last_heard``: when anything was received, for the keep-alive.
    """

    parting: Parting | None = None  # we are about to log out, and go on elsewhere
    left_nothing = False  # the connection that is lost ended in order, without tasks
    offered: Session | IserblkError | None = None  # a connection to go on with, or why never
    busy_poll_us = 0  # how long a driver may look for an answer before it sleeps
    _settled = True  # what a lost connection leaves behind is in order

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

        Never raises: an error ends the connection, and suspends the session or ends it, its tasks
        and its waiters (``error``).
        """
        if not self._live and not self._revived(now):
            return 0
        try:
            count = self._dm.progress(now)
        except IserblkError as error:
            self._lose(error)
            return 0
        if count:
            self.last_heard = now
        elif self._queued:
            self._send_queued()  # no answer, but perhaps memory that is free again
        if self.parting is not None:
            self.parting.tick(now)
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
            if status:
                self._hear_sense(slot)
        elif status:
            slot.sense = b""
        if max_cmd_sn != self._max_cmd_sn or self._queued:
            self._window(exp_cmd_sn, max_cmd_sn)
        slot.state = TAKEN
        slot.waiter.task_done()

    def _hear_sense(self, slot: TaskSlot) -> None:
        """A status other than GOOD came with ``slot.sense``. What was carried out all the same
        (RECOVERED ERROR, NO SENSE) has succeeded, for all who look at the slot from now on; its
        residual counts as ever."""
        self.listeners.hear(slot)
        if slot.status != sam.CHECK_CONDITION or not sense_data.tells_of_success(slot.sense):
            return
        slot.status = sam.GOOD
        sense = sense_data.decode(slot.sense)
        told = (slot.lun, sense.code)
        # A disk that wears out says so with each command: once is enough for the log.
        level = logging.DEBUG if told in self._recovered_told else logging.WARNING
        self._recovered_told.add(told)
        log.log(
            level,
            "%s: LUN %d: command %#04x was carried out, and the LUN says: %s",
            self.portal,
            luns.decode(slot.lun),
            slot.cdb[0],
            sense,
        )

    def _window(self, exp_cmd_sn: int, max_cmd_sn: int) -> None:
        """ExpCmdSN and MaxCmdSN of a PDU (RFC 7143 section 4.2.2.1): only ever forward."""
        with self._lock:
            if serial_lt(max_cmd_sn, (exp_cmd_sn - 1) & 0xFFFFFFFF):
                return
            if serial_lt(self._max_cmd_sn, max_cmd_sn):
                self._max_cmd_sn = max_cmd_sn
                if self.parting is None:
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
                self._answer_ping(bytes(message[at + 8 : at + 16]), head.ttt)
        elif opcode == bhs.ASYNC_MESSAGE:
            self._async_message(pdu.AsyncMessage.unpack_from(message, at))
        elif opcode == bhs.REJECT:
            self._rejected(message, at)
        else:
            slot = self.find(head.itt)
            asked = slot is not None and slot.bhs[0] & bhs.OPCODE_MASK
            if slot is None or slot in self.tasks or asked != opcode - bhs.NOP_IN:
                raise RemoteProtocolError(
                    "iSCSI", f"PDU {opcode:#x} answers task {head.itt:#x}: no such task"
                )
            slot.response = head.response
            self._end_control(slot)
            if opcode == bhs.LOGOUT_RESPONSE and self.parting is not None:
                self._parted(pdu.LogoutResponse.unpack_from(message, at), self.parting)

    def _answer_ping(self, lun: bytes, ttt: int) -> None:
        """A NOP-In that asks for an answer: echo its Target Transfer Tag (RFC 7143 section 11.18).

        Nothing answers the answer, so its slot may be used again only when it has left. Slots take
        turns; while the wire is full no more pings are answered than there are slots to go through.
        """
        self.unsent_pongs = self.unsent_pongs + 1 if self.wants_write() else 0
        slot = self.take_control() if self.unsent_pongs < self.free_controls else None
        if slot is None:
            raise RemoteProtocolError("iSCSI", "flood of NOP-In pings")
        self.send_pong(slot, lun, ttt)

    def _async_message(self, message: pdu.AsyncMessage) -> None:
        """RFC 7143 section 11.9. An announced drop is the end of the connection, at once."""
        words = reasons.async_event(message.event)
        log.warning("%s: asynchronous message: %s", self.portal, words)
        if message.event in (pdu.ASYNC_LOGOUT_REQUEST, pdu.ASYNC_NEGOTIATE):
            if self.on_loss is not None and self.parting is None:
                self.parting = Parting(self, monotonic() + min(message.parameter3, DRAIN_S))
                self.hold()
        elif message.event in (pdu.ASYNC_CONNECTION_DROP, pdu.ASYNC_SESSION_DROP):
            self._stay_away(message.parameter2)
            raise ConnectionLost(f"{self.portal}: the target announced: {words}")

    def _rejected(self, message: memoryview, at: int) -> None:
        """A Reject carries the header of the PDU that it rejects; end that task (section 11.17)."""
        reject = pdu.Reject.unpack_from(message, at)
        words = reasons.reject_reason(reject.reason)
        header = bhs.data_segment_untrusted(message, at)
        log.warning("%s: target rejected a PDU: %s", self.portal, words)
        slot = None
        if len(header) >= bhs.BHS_LENGTH:
            slot = self.find(bhs.ITT.unpack_from(header, bhs.ITT_OFFSET)[0])
        if slot is not None:
            self.end_rejected(
                slot, CommandRejected(f"{self.portal}: target rejected a command: {words}")
            )

    def _parted(self, message: pdu.LogoutResponse, parting: Parting) -> None:
        """The end of a connection that the target wanted to be rid of, or we."""
        self._stay_away(message.time2wait)
        self.left_nothing = not message.response and not self.sent
        raise ConnectionLost(f"{self.portal}: logged out, {parting.why}")

    def _stay_away(self, time2wait: int) -> None:
        """The target wants to be left alone for ``time2wait`` seconds."""
        self.reconnect_at = monotonic() + min(time2wait, MOST_WAIT_S)

    def find(self, itt: int) -> TaskSlot | None:
        """The slot in flight that has this tag."""
        index = itt & INDEX_MASK
        if index < len(self._table):
            slot = self._table[index]
            if slot.itt == itt and slot.state >= SENT:
                return slot
        return None

    def end_rejected(self, slot: TaskSlot, error: Exception) -> None:
        """The target has rejected the PDU of ``slot``, which is in flight."""
        if slot in self.tasks:
            self._dm.deallocate_task_resources(slot, 0)
            self._end(slot, error)
        else:
            slot.response = NO_ANSWER
            self._end_control(slot)

    # -- losing a connection, and going on with another: the runner of progress -------------------

    def _lose(self, error: IserblkError) -> None:
        """The connection is over."""
        if self.on_loss is None:
            self.fail(error)
            return
        text = str(error).removeprefix(f"{self.portal}: ").removeprefix("connection lost: ")
        log.warning("%s: connection lost: %s; reconnecting", self.portal, text)
        with self._lock:
            if self.error is not None:
                return
            self._settled = False
            self._live = False
            self._open = 0  # from here on nothing is sent
            self.suspended_at = monotonic()
            self.suspended = error.with_traceback(None)
        self._settle()

    def _settle(self) -> None:
        """Nobody touches a buffer any more, and what was in flight waits to be sent again. When
        this is interrupted, the next ``progress`` begins anew."""
        self._terminate()
        tasks = self.tasks
        with self._lock:
            sent = [slot for slot in tasks if slot.state == SENT and slot.complete]
            sent.sort(key=lambda slot: (slot.cmd_sn - self._cmd_sn) & 0xFFFFFFFF)  # oldest first
            self._again.update(sent)
            moved = set(sent)  # some may be there: of a turn that was interrupted
            self._queued = deque([*sent, *(slot for slot in self._queued if slot not in moved)])
            for slot in sent:
                slot.stag = 0  # went with the connection
                if slot.direction == INLINE:
                    slot.direction = WRITE  # the next connection may take less
                slot.state = QUEUED
            self.parting = None
        for slot in self._table:
            if slot.state >= SENT:
                slot.stag = 0
                slot.data = None
                if slot.index < len(tasks):
                    self._end(slot, self._unwanted(slot))
                else:
                    slot.response = NO_ANSWER
                    self._end_control(slot)
        self._settled = True
        lost = self.on_loss
        if lost is not None:
            lost()

    def _unwanted(self, slot: TaskSlot) -> IserblkError:
        """The error of a command that was being aborted when the connection was lost, or whose
        answer was being taken in when that was interrupted."""
        if slot.state == SENT:
            return ConnectionLost(
                f"{self.portal}: interrupted before command {slot.cdb[0]:#04x} had ended"
            )
        return CommandTimeout(
            f"{self.portal}: command {slot.cdb[0]:#04x} did not end within {self.io_timeout:g} s, "
            "nor was its abort answered; is the target slow? raise io-timeout"
        )

    def leave(self, why: str, patience: float) -> bool:
        """From any thread: log out when what is in flight has ended, or after ``patience`` seconds;
        whoever keeps the session then connects anew. False: there is no connection to leave, or
        that is under way already. It begins with the next ``progress``."""
        with self._lock:
            if not self._live or self.on_loss is None or self.parting is not None:
                return False
            self.parting = Parting(self, monotonic() + patience, why)
            self._open = 0
        return True

    def offer(self, outcome: Session | IserblkError) -> None:
        """From any thread, while the session is suspended: a fresh session, idle, whose driver has
        ended and whose connection is taken over; or why there will never be one. It comes into
        effect with the next ``progress``."""
        if isinstance(outcome, Session):
            outcome.on_closing = ignore_closing
        with self._lock:
            if self.error is None and self.suspended is not None:
                self.offered = outcome
                return
        if isinstance(outcome, Session):
            outcome.fail(ConnectionLost(f"{self.portal}: not wanted any more"))

    def _revived(self, now: float) -> bool:
        """Of a session without a connection: it has one again."""
        if self.error is not None:
            return False
        if not self._settled:
            self._settle()
        offered = self.offered
        if isinstance(offered, Session):
            self._adopt(offered, now)
            return True
        if offered is not None:
            self.fail(offered)
        return False

    def _adopt(self, fresh: Session, now: float) -> None:
        """Go on with the connection of ``fresh``. When this is interrupted, the next ``progress``
        begins anew."""
        with self._lock:
            for slot, other in zip(self._table, fresh._table, strict=True):
                slot.take_memory(other)
            self._free_controls = [self._table[other.index] for other in fresh._free_controls]
            self._dm = fresh._dm
            self.parameters = fresh.parameters
            self.immediate_limit = fresh.immediate_limit
            self.portal = fresh.portal
            self.provider_reason = fresh.provider_reason
            self._cmd_sn = fresh._cmd_sn
            self._exp_cmd_sn = fresh._exp_cmd_sn
            self._max_cmd_sn = fresh._max_cmd_sn
            self._exp_stat_sn = fresh._exp_stat_sn
            self.unsent_pongs = 0
            self.last_heard = now
        self._dm.user = self
        self.on_change()
        with self._lock:
            again = len(self._again)
            self._again.clear()
            self.offered = None
            self.suspended = None
            self.left_nothing = False
            self._open = fresh._open
            self._live = True
        self.reconnects += 1
        self.replayed += again
        log.warning(
            "%s: connected again after %.1f s, %d commands sent again",
            self.portal,
            max(0.0, now - self.suspended_at),
            again,
        )
        self._send_queued()

    # -- ending -----------------------------------------------------------------------------------

    def _terminate(self) -> None:
        fd = self._dm.fileno()
        if fd >= 0:
            self.on_closing(fd)
        self._dm.connection_terminate()

    def fail(self, error: IserblkError) -> None:
        """The session is over: end every task with ``error``. No buffer is touched any more."""
        with self._lock:
            if self.error is not None:
                return
            # Without its traceback: that names the buffers of whoever ran ``progress``.
            self.error = error.with_traceback(None)
            self._live = False
            self._open = 0
            self._queued.clear()
            self._again.clear()
            takers = list(self._takers)
            self._takers.clear()
            offered, self.offered = self.offered, None
        self._terminate()
        if isinstance(offered, Session):
            offered.fail(self._ended())
        for slot in self._table:
            if slot.state >= QUEUED:
                slot.stag = 0  # went with the connection
                slot.data = None
                self._end(slot, self._ended())
        for taker in takers:
            taker.task_done()
        self.on_change()

    def connection_terminate_notify(self, error: Exception) -> None:
        self._lose(error if isinstance(error, IserblkError) else ConnectionLost(str(error)))
