"""The full feature phase of a session (RFC 7143 sections 4.2, 11).

A session belongs to one thread: the one of the loop that runs its driver. Tasks end in
``progress``, in the ticks of their deadlines, and when the driver cancels them. ``submit`` raises
no error when a send fails: the connection is over, and the next ``progress`` finds out, in one
place.

A connection that is lost **suspends** a session whose driver can ``reconnect``: no buffer is
touched any more. What was in flight waits in the queue, in CmdSN order, and later commands behind
it. The reconnector logs in again and **offers** a fresh session; the next ``progress`` **adopts**
its connection, and sends what waits. Where the driver cannot reconnect, the session ends instead.
The table of ``life`` has all transitions.

A session may have several connections, if its leading login agreed on that. One that is lost while
others are left is the matter of a ``Recovery``, and the session goes on. A new one is logged in
beside the session (``Login.join``), and **offered**, too.

With ErrorRecoveryLevel 2 a target keeps the session without any connection for a while. So the last
one is **reinstated**: what was in flight waits in its slots, a connection that was logged in with
the session's TSIH is offered, and Recoveries do the rest. Where that fails, takes too long for a
command, or is not enough (``disconnect``), the session is suspended as above.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final

from iserblk.commands.command import SENT, TAKEN, Unanswered, Waiter
from iserblk.commands.listeners import LunListeners
from iserblk.datamover.seam import InitiatorDatamover, PduSlot
from iserblk.errors import (
    CommandRejected,
    CommandTimeout,
    ConnectionLost,
    IserblkError,
    RemoteProtocolError,
    without_frames,
)
from iserblk.initiator.session.connection import Connection
from iserblk.initiator.session.counts import Counts
from iserblk.initiator.session.driving import SessionDriver, Undriven
from iserblk.initiator.session.ending import Ending
from iserblk.initiator.session.life import Event, Life, State
from iserblk.initiator.session.logout import (
    ANSWER_S,
    AS_ASKED,
    DRAIN_S,
    LogoutWaiter,
    fill_logout,
)
from iserblk.initiator.session.respite import Respite
from iserblk.initiator.session.sending import SendQueue
from iserblk.initiator.session.several import Several
from iserblk.initiator.session.silence import Silence
from iserblk.initiator.session.slots import INDEX_MASK, TaskSlot
from iserblk.iscsi import bhs, pdu, reasons
from iserblk.iscsi.keys import SessionParameters
from iserblk.loop.clock import monotonic
from iserblk.scsi import luns
from iserblk.scsi import sense as sense_data
from iserblk.scsi import status as sam

log = logging.getLogger(__name__)

UNEXPECTED: Final = 32  # receives for PDUs that answer nothing: NOP-In, Async Message, Reject
STALLS: Final = 16  # times in which the process did not run, that are remembered
MOST_TOLD: Final = 1024  # kinds of sense data that the log has, and that are remembered


class SessionLogout:
    """A logout from a connection, after which the session goes on with another. Commands in flight
    may end, new ones wait for the next connection. Implements Waiter for the Logout Response."""

    def __init__(self, session: Session, by: float, why: str) -> None:
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
        if session.queue.sent and now < self._by:
            return
        control = session.queue.take_control()
        if control is None:
            if now >= self._by:
                session.disconnect()
            return
        fill_logout(control)
        session.life.leaving = True
        self.pending = 1
        self._by = now + ANSWER_S
        session.queue.send_immediate(control, self)

    def stalled(self, seconds: float) -> None:
        """See Session."""
        self._by += seconds

    def task_done(self) -> None:
        """The answer has come (see ``Session.logout_answered``), or the connection is lost."""


class Answers:
    """What comes on one connection. Implements InitiatorUser."""

    def __init__(self, session: Session, connection: Connection) -> None:
        self._session = session
        self._queue = session.queue
        self._connection = connection

    def control_notify(self, message: memoryview, at: int, invalidated: int) -> None:
        fields: bhs.ScsiResponseFields = bhs.unpack_scsi_response(message, at)
        word, lengths, itt, stat_sn, exp_cmd_sn, max_cmd_sn, residual = fields
        opcode = word >> 24
        if opcode != bhs.SCSI_RESPONSE:
            self._control_response(message, at, opcode, invalidated)
            return
        queue = self._queue
        connection = self._connection
        index = itt & INDEX_MASK
        slot = queue.tasks[index if index < len(queue.tasks) else 0]  # its ITT then is another
        if slot.itt != itt or slot.state < SENT or slot.connection is not connection:
            raise RemoteProtocolError("iSCSI", f"SCSI Response for task {itt:#x}: no such task")
        connection.exp_stat_sn = (stat_sn + 1) & 0xFFFFFFFF
        connection.datamover.deallocate_task_resources(slot, invalidated)
        connection.ended += 1
        flags = word >> 16 & 0xFF
        status = word & 0xFF
        slot.status = status
        slot.response = word >> 8 & 0xFF
        if flags & (bhs.RESIDUAL_FLAGS | bhs.BIDI_FLAGS):
            self._take_residuals(slot, message, at, flags, residual)
        else:
            slot.residual = 0
        if lengths:
            slot.sense = bhs.sense_of_untrusted(message, at)
            if status:
                self._session.hear_sense(slot)
        elif status:
            slot.sense = b""
            self._session.hear_sense(slot)
        if max_cmd_sn != queue.max_cmd_sn or queue.waiting.entries:
            queue.take_window(exp_cmd_sn, max_cmd_sn)
        slot.state = TAKEN
        slot.waiter.task_done()

    def sent_notify(self, slot: PduSlot) -> None:
        self._connection.data_outs.give_back(slot)

    def _take_residuals(
        self, slot: TaskSlot, message: memoryview, at: int, flags: int, residual: int
    ) -> None:
        slot.residual = 0
        if flags & bhs.RESIDUAL_FLAGS:
            slot.residual = residual if flags & bhs.RESIDUAL_UNDERFLOW else -residual
        if flags & bhs.BIDI_FLAGS:
            (bidi,) = bhs.BIDI_RESIDUAL.unpack_from(message, at + bhs.BIDI_RESIDUAL_OFFSET)
            slot.residual_in = bidi if flags & bhs.BIDI_UNDERFLOW else -bidi

    def _control_response(
        self, message: memoryview, at: int, opcode: int, invalidated: int
    ) -> None:
        """Handle any PDU but the SCSI Response."""
        if invalidated:
            raise RemoteProtocolError("iSCSI", f"PDU {opcode:#x} invalidated an STag")
        head = pdu.TargetHeader.unpack_from(message, at)
        if opcode not in pdu.TARGET_OPCODES:
            raise RemoteProtocolError("iSCSI", f"opcode {opcode:#x} in full feature phase")
        session, queue, connection = self._session, self._queue, self._connection
        if head.advances_stat_sn:
            connection.exp_stat_sn = (head.stat_sn + 1) & 0xFFFFFFFF
        queue.take_window(head.exp_cmd_sn, head.max_cmd_sn)
        if opcode == bhs.NOP_IN and head.itt == bhs.NO_TAG:
            if head.ttt != bhs.NO_TAG:
                queue.answer_ping(connection, bytes(message[at + 8 : at + 16]), head.ttt)
        elif opcode == bhs.ASYNC_MESSAGE:
            announced = pdu.AsyncMessage.unpack_from(message, at)
            if announced.event == pdu.ASYNC_SCSI:
                session.scsi_event(announced.lun, bhs.sense_of_untrusted(message, at))
            session.async_message(announced, connection)
        elif opcode == bhs.REJECT:
            session.rejected(message, at, connection)
        else:
            slot = queue.find(head.itt, connection)
            asked = slot is not None and slot.bhs[0] & bhs.OPCODE_MASK
            if slot is None or slot in queue.tasks or asked != opcode - bhs.NOP_IN:
                raise RemoteProtocolError(
                    "iSCSI", f"PDU {opcode:#x} answers task {head.itt:#x}: no such task"
                )
            slot.response = head.response
            if isinstance(slot.waiter, LogoutWaiter) and opcode == bhs.LOGOUT_RESPONSE:
                slot.waiter.take(pdu.LogoutResponse.unpack_from(message, at))
            if opcode == bhs.NOP_IN and session.loses_pdus:
                queue.plug_gap(slot)
            queue.end_control(slot)
            logout = session.logout
            if opcode == bhs.LOGOUT_RESPONSE and slot.waiter is logout and logout is not None:
                session.logout_answered(pdu.LogoutResponse.unpack_from(message, at), logout)


class Session:
    """One logged-in session.

    ``queue``: what is sent. ``life``: its state. ``listeners``: of its LUNs. ``parameters`` and
    ``provider_reason`` (why this provider carries the connection): of the present connection.
    ``io_timeout``: seconds for one request; ``math.inf``: no limit. ``command_timeout``: seconds
    for one command on a living connection; it is then aborted, and sent again while its request
    has time left. ``isid``: of the login; a reconnection uses it again.
    ``busy_poll_us``: how long a driver may look for an answer before it sleeps.

    ``tsih``: of the session at the target. ``more(session)``: logs in a further connection, to be
    offered to the session. ``wanted``: how many connections it should have.

    ``several``: what it has in addition where it may have several connections, or outlive its last
    one.

    ``perhaps_ended``: (task, its ITT) of commands that the target may have ended without a status,
    until the ``Ladder`` asks.

    ``ending``: whether its end was asked for, and so how long a target that is away is waited for.

    ``logout_asked``: until when the target wants the session to leave (monotonic seconds), while
    what is unflushed is flushed first; else 0.

    ``logout``: the logout, while it is LOGGING_OUT. ``suspended_at``: when the last connection was
    lost. ``respite``: when another login is welcome. ``counts``: for statistics.
    """

    def __init__(
        self,
        datamover: InitiatorDatamover,
        slots: list[TaskSlot],
        parameters: SessionParameters,
        portal: str,
        io_timeout: float,
    ) -> None:
        """``slots``: see SendQueue."""
        self.life = Life(portal)
        memory: list[PduSlot] = list(slots)
        # One connection after the other counts, too.
        several = parameters.max_connections > 1 or parameters.error_recovery_level == 2
        if several:  # then slots change their memory with each command
            memory = [PduSlot(slot.index) for slot in slots]
            for own, slot in zip(memory, slots, strict=True):
                own.take_memory(slot)
        connection = Connection(datamover, memory, parameters, portal)
        self.queue = SendQueue(connection, slots, io_timeout, self.life)
        self.several = Several(self) if several else None
        self.queue.descriptors = self.several.descriptors if self.several is not None else None
        self.listeners = LunListeners()
        self.silence = Silence()
        self.ending = Ending()
        self.parameters = parameters
        self.io_timeout = io_timeout
        self.command_timeout = io_timeout
        self.provider_reason = ""
        self.isid = b""
        self.tsih = 0
        self.more: Callable[[Session], Awaitable[Connection]] | None = None
        self.wanted = 1
        self.counts = Counts()
        self.respite = Respite()
        self.perhaps_ended: list[tuple[TaskSlot, int]] = []
        self.busy_poll_us = 0
        self.logout_asked = 0.0
        self.logout: SessionLogout | None = None
        self.suspended_at = 0.0
        # When the process went on after it had not run for a while, and for how long: of late.
        self._stalls: deque[tuple[float, float]] = deque(maxlen=STALLS)
        self._unfinished = False  # it has failed, and not all that ``fail`` does is done
        self._finishing = False
        # A session whose connection is to be adopted, or why there will never be one.
        self._offered: Session | IserblkError | None = None
        # Aborted although their requests have time left: the ITT of each.
        self._unanswered: dict[TaskSlot, int] = {}
        # Commands carried out with sense data that the log has already: (LUN field, code).
        self._recovered_told: set[tuple[bytes, int]] = set()

    def start(self, cmd_sn: int, exp_cmd_sn: int, max_cmd_sn: int, exp_stat_sn: int) -> None:
        """Begin full feature phase with these numbers, from the final Login Response."""
        connection = self.queue.connection
        datamover = connection.datamover
        self.queue.start(cmd_sn, exp_cmd_sn, max_cmd_sn)
        connection.exp_stat_sn = exp_stat_sn
        datamover.user = Answers(self, connection)
        datamover.notice_key_values(self.parameters)
        connection.datamover = datamover.enable_datamover()  # a Hello has a user of its own
        connection.datamover.losses = self.counts.losses
        connection.datamover.on_unfinished = self._again
        if self.several is not None:
            self.wanted = self.parameters.max_connections
            self.several.descriptors.add(connection)
        self.life.enter(Event.LOGIN)

    def attach(self, connection: Connection) -> Answers:
        """From now on the session hears what comes on ``connection``, and by what it is told."""
        answers = Answers(self, connection)
        datamover = connection.datamover
        datamover.user = answers
        datamover.losses = self.counts.losses
        datamover.on_unfinished = self._again
        return answers

    def drive(self, driver: SessionDriver) -> None:
        """From now on only ``driver`` runs the session."""
        self.queue.driver = driver

    @property
    def last_heard(self) -> float:
        """When anything was received last, for the keep-alive; 0.0 without a connection."""
        heard = [connection.last_heard for connection in self.queue.connections.copy()]
        return max(heard, default=0.0)

    @property
    def count(self) -> int:
        """How many connections there are."""
        return len(self.queue.connections)

    @property
    def missing(self) -> int:
        """How many connections there should be more, while there is one."""
        if not self.life.connected or self.life.leaving:
            return 0
        coming = len(self.several.joined) if self.several is not None else 0
        return max(0, self.wanted - len(self.queue.connections) - coming)

    @property
    def cids(self) -> set[int]:
        """Of the connections that there are, and of those that were offered."""
        used = {connection.cid for connection in self.queue.connections.copy()}
        return used | self.several.cids if self.several is not None else used

    def free_cid(self) -> int:
        """A CID that no connection of the session has, nor one that is being recovered from. While
        none is left: that of the last one, which is reinstated by a login with it."""
        used = self.cids
        if self.several is not None:
            return self.several.free_cid(used)
        return next(cid for cid in range(len(used) + 1) if cid not in used)

    @property
    def portal(self) -> str:
        return self.queue.portal

    @property
    def loses_pdus(self) -> bool:
        """A PDU may be lost, and its connection goes on: at ErrorRecoveryLevel 1 or more over TCP.
        The RCaP below iSER loses none (RFC 7145 section 10.2.1)."""
        agreed = self.parameters
        return agreed.error_recovery_level > 0 and not agreed.rdma_extensions

    @property
    def error(self) -> IserblkError | None:
        """Why the session has ended; None: it has not."""
        return self.life.error

    @property
    def suspended(self) -> IserblkError | None:
        """Why there is no connection, while the session goes on without one; else None."""
        return self.life.absence if self.life.absent else None

    @property
    def gives_up(self) -> bool:
        """Whether nothing waits for another connection any more: see ``ending``."""
        return self.queue.gives_up and self.life.absent

    @property
    def can_reconnect(self) -> bool:
        """Whether another connection takes the place of one that is lost."""
        return self.queue.driver.reconnect is not None

    @property
    def outlives_connections(self) -> bool:
        """Whether it may go on where its last connection has ended, with a reinstated one."""
        return (
            self.parameters.error_recovery_level == 2
            and self.more is not None
            and self.can_reconnect
            and not (self.life.spent or self.life.leaving or self.logout is not None)
        )

    @property
    def reinstating(self) -> bool:
        """Whether a connection is wanted for the session that the target has kept without any."""
        return self.life.state is State.REINSTATING

    @property
    def patience(self) -> float:
        """Seconds for commands that have no deadline of their own. Before the session is in use no
        request waits: then it is the limit for one command, and opening, or the attempt to connect
        again, fails."""
        return self.io_timeout if self.can_reconnect else min(self.io_timeout, self.command_timeout)

    @property
    def time_words(self) -> str:
        """How long a command that was aborted for good has had, for messages."""
        return f"{self.patience if self.patience < math.inf else self.command_timeout:g} s"

    @property
    def offered(self) -> bool:
        """Whether something was offered that has not come into effect yet."""
        joined = self.several is not None and bool(self.several.joined)
        return self._offered is not None or joined

    def new_waiter(self) -> Waiter:
        """A waiter for the calling thread or task."""
        return self.queue.driver.new_waiter()

    def fileno(self) -> int:
        descriptors = self.queue.descriptors
        if descriptors is not None:
            return descriptors.fileno()
        return self.queue.connection.datamover.fileno()

    def wants_write(self) -> bool:
        if self.queue.descriptors is not None:
            return False  # they watch it themselves
        return self.queue.connection.datamover.wants_write()

    def describe(self) -> dict[str, object]:
        described = {
            **self.queue.connection.datamover.describe(),
            "provider_reason": self.provider_reason,
            "chap": self.parameters.chap,
            "chap_algorithm": self.parameters.chap_algorithm or None,
        }
        if self.queue.descriptors is not None:
            described["connections"] = len(self.queue.connections)
            described["connections_wanted"] = self.wanted
        if self.parameters.error_recovery_level:
            described["error_recovery_level"] = self.parameters.error_recovery_level
        return described

    def disconnect(self) -> None:
        """Cut all connections. The next ``progress`` finds them lost, and session
        reinstatement follows: what calls this wants all tasks at the target to end, or its LUNs to
        be examined anew."""
        self.life.spent = True
        for connection in self.queue.connections.copy():
            connection.datamover.disconnect()

    # -- completing: the runner of progress and tick ----------------------------------------------

    def progress(self, now: float) -> int:
        """Take in the PDUs that have come, and end the tasks that they end; returns how many PDUs
        came.

        Never raises. An error ends the connection; then the session is suspended, or has ended
        (``error``) with its tasks and its waiters.
        """
        if not self.life.connected and not self._revived(now):
            return 0
        if self.several is not None:
            count = self.several.progress(now)
            if not self.life.connected:
                return count
        else:
            connection = self.queue.connection
            try:
                count = connection.datamover.progress(now)
            except IserblkError as error:
                self.lose(error)
                return 0
            if count:
                connection.last_heard = now
            elif self.queue.waiting.entries:
                self.queue.send_waiting()  # no answer, but perhaps memory that is free again
        if self.logout is not None:
            self.logout.tick(now)
        return count

    def _again(self) -> None:
        """See InitiatorDatamover.on_unfinished."""
        self.queue.driver.again()

    def stalled(self, seconds: float, now: float) -> None:
        """The runner of ``progress`` did not run for ``seconds``, until now: that is no silence of
        the target's. What the target itself counts (Time2Wait, Time2Retain) goes on."""
        self._stalls.append((now, seconds))
        for connection in self.queue.connections.copy():
            connection.last_heard = min(now, connection.last_heard + seconds)
        if self.several is not None:
            self.several.stalled(seconds)
        if self.logout is not None:
            self.logout.stalled(seconds)
        self.ending.stalled(seconds)

    def extended(self, deadline: float) -> float:
        """``deadline`` of an operation, ``patience`` after it began; later by the time since then
        in which this process did not run."""
        patience = self.patience
        for end, seconds in self._stalls.copy():
            if deadline - patience < end:
                deadline += seconds
        return deadline

    def hear_sense(self, slot: TaskSlot) -> None:
        """A status other than GOOD came with ``slot.sense``. A command that was carried out all the
        same (RECOVERED ERROR, NO SENSE) has succeeded, for all code that looks at the slot from now
        on; its residual counts as ever."""
        self.listeners.hear(slot)
        self._look_for_ended(slot)
        if slot.status != sam.CHECK_CONDITION or not sense_data.tells_of_success(slot.sense):
            return
        slot.status = sam.GOOD
        sense = sense_data.decode(slot.sense)
        told = (slot.lun, sense.code)
        # A disk that wears out says so with each command: once is enough for the log.
        level = logging.WARNING
        if told in self._recovered_told or len(self._recovered_told) >= MOST_TOLD:
            level = logging.DEBUG
        else:
            self._recovered_told.add(told)
        log.log(
            level,
            "%s: LUN %d: command %#04x was carried out, and the LUN says: %s",
            self.portal,
            luns.decode(slot.lun),
            slot.cdb[0],
            sense,
        )

    def _look_for_ended(self, heard: TaskSlot) -> None:
        """Note which commands the target may have ended without a status, by what ``heard`` has
        brought."""
        sense = sense_data.decode(heard.sense)
        if not sense.is_unit_attention or sense.code not in sense_data.TASKS_ENDED:
            return
        everywhere = sense.code == sense_data.NEXUS_LOST
        noted = set(self.perhaps_ended)  # by an earlier report: a target may send any number
        perhaps = [
            (task, task.itt)
            for task in self.queue.tasks
            if task.state == SENT
            and task is not heard
            and (everywhere or task.lun == heard.lun)
            and (task, task.itt) not in noted
        ]
        if perhaps:
            log.info(
                "%s: LUN %d: %s; commands that may have ended without a word: %d; they are "
                "aborted, and sent again",
                self.portal,
                luns.decode(heard.lun),
                sense,
                len(perhaps),
            )
            self.perhaps_ended += perhaps

    def scsi_event(self, lun: bytes, sense: bytes) -> None:
        """An Asynchronous Message brought sense data of ``lun``: it is heard as that of a command
        (RFC 7143 section 11.9.1)."""
        event = TaskSlot(0)
        event.lun = lun
        event.sense = sense
        event.status = sam.CHECK_CONDITION
        self.hear_sense(event)

    def async_message(self, message: pdu.AsyncMessage, connection: Connection) -> None:
        """Handle an Asynchronous Message (RFC 7143 section 11.9), which came on ``connection``. An
        announced drop ends the connection."""
        words = reasons.async_event(message.event)
        log.warning("%s: asynchronous message: %s", self.portal, words)
        if message.event in (pdu.ASYNC_LOGOUT_REQUEST, pdu.ASYNC_NEGOTIATE):
            self._log_out_one(connection, min(message.parameter3, DRAIN_S))
        elif (
            message.event == pdu.ASYNC_CONNECTION_DROP
            and self.parameters.error_recovery_level == 2
            and len(self.queue.connections) == 1
        ):
            self._drop(connection, message)
            self.respite.stay_away(message.parameter2)
            raise ConnectionLost(f"{connection.portal}: the target announced: {words}")
        elif message.event == pdu.ASYNC_CONNECTION_DROP and len(self.queue.connections) > 1:
            # Parameter1: the CID, which may be that of another connection (section 11.9.1).
            for each in self.queue.connections.copy():
                if each.cid == message.parameter1:
                    self._drop(each, message)
                    each.datamover.disconnect()
        elif message.event in (pdu.ASYNC_CONNECTION_DROP, pdu.ASYNC_SESSION_DROP):
            self.respite.stay_away(message.parameter2)
            self.life.over = True
            raise ConnectionLost(f"{self.portal}: the target announced: {words}")

    def _drop(self, connection: Connection, message: pdu.AsyncMessage) -> None:
        """The target is about to drop the connection, and says when it may be recovered from. (A
        recovery that has begun keeps its times, section 7.5.2.)"""
        connection.time2wait = message.parameter2
        connection.time2retain = message.parameter3

    def _log_out_one(self, connection: Connection, patience: float) -> None:
        """The target asks for a logout of ``connection``, within ``patience`` seconds: log it out.
        Where no connection would be left, the session is logged out, and goes on with another."""
        if connection.logging_out:
            return
        if self.several is None or not self.several.log_out(connection, patience):
            self.log_out_settled(patience)

    def rejected(self, message: memoryview, at: int, connection: Connection) -> None:
        """Handle a Reject, which carries the header of the rejected PDU: end that task (section
        11.17)."""
        reject = pdu.Reject.unpack_from(message, at)
        words = reasons.reject_reason(reject.reason)
        header = bhs.data_segment_untrusted(message, at)
        # (Over iSER no PDU is damaged: one that was sent again would advertise its buffer twice.)
        recovers = self.loses_pdus and reject.reason in pdu.REJECTS_OF_RECOVERY
        snack = len(header) > 0 and header[0] & bhs.OPCODE_MASK == bhs.SNACK_REQUEST
        level = logging.INFO if recovers or snack else logging.WARNING
        log.log(level, "%s: target rejected a PDU: %s", self.portal, words)
        slot = None
        if len(header) >= bhs.BHS_LENGTH:
            slot = self.queue.find(bhs.ITT.unpack_from(header, bhs.ITT_OFFSET)[0], connection)
        if slot is not None and (header[0] ^ slot.bhs[0]) & bhs.OPCODE_MASK:
            return  # some other PDU of the task, which goes on (7.3)
        if slot is not None and recovers and self.queue.number_of(slot) is not None:
            self.queue.send_again(slot)
        elif slot is not None:
            self.queue.end_rejected(
                slot, CommandRejected(f"{self.portal}: target rejected a command: {words}")
            )

    def logout_answered(self, message: pdu.LogoutResponse, logout: SessionLogout) -> None:
        """The Logout Response has come, to a logout that the target or we wanted: end the
        connection."""
        if message.response == pdu.LOGOUT_CID_NOT_FOUND:  # its Time2Wait means nothing (11.15.3)
            self.respite.stay_away(self.queue.connection.time2wait)
        else:
            self.respite.stay_away(message.time2wait)
        self.respite.left_nothing = not message.response and not self.queue.sent
        self.life.over = True
        raise ConnectionLost(f"{self.portal}: logged out, {logout.why}")

    def ask_again(self, now: float) -> None:
        """About once a second, while there is a connection: have the datamovers ask again for what
        was lost, at ErrorRecoveryLevel 1 or more."""
        if not self.parameters.error_recovery_level:
            return
        for connection in self.queue.connections.copy():
            try:
                connection.datamover.tick()
            except IserblkError as error:
                if self.several is not None:
                    self.several.lose(connection, error, now)
                else:
                    self.lose(error)
                if not self.life.connected:
                    return
        self.queue.flush()

    def offer_connection(self, connection: Connection) -> None:
        """Add a connection that was logged in to this session. It comes into
        effect with the next ``progress``; where it is not wanted any more, it is ended."""
        if self.several is not None:
            self.several.offer(connection)
        else:
            connection.datamover.connection_terminate()

    def recover(self, now: float) -> None:
        """Take the steps that are due for connections that were lost. Called about once a second,
        too."""
        if self.several is not None:
            self.several.recover(now)

    # -- losing a connection, and going on with another: the runner of progress -------------------

    def lose(self, error: IserblkError) -> None:
        """The connection is over: suspend the session, or end it where its driver cannot
        reconnect."""
        if self.queue.driver.reconnect is None:
            self.fail(error)
            return
        text = str(error).removeprefix(f"{self.portal}: ").removeprefix("connection lost: ")
        log.log(
            logging.INFO if self.silence.since else logging.WARNING,
            "%s: connection lost: %s; reconnecting",
            self.portal,
            text,
        )
        if self.error is not None:
            return
        if not self.reinstating:
            self.suspended_at = monotonic()
        if not self.life.over:  # nothing was announced
            for connection in self.queue.connections:
                self.respite.give(connection.time2wait)
        self.life.enter(Event.LOSS, without_frames(error))
        self.queue.close_window()
        self._clean_up()

    def _clean_up(self) -> None:
        """End the connection, so that no buffer is touched any more, and queue again what was in
        flight. When this is interrupted, the next ``progress`` begins it again."""
        self._terminate()
        self.queue.put_back()
        if self.several is not None:
            self.several.forget()
        self.logout = None
        self.logout_asked = 0.0
        self.queue.end_sent(self.unwanted)
        if self.error is not None:
            return
        self.life.enter(Event.CLEAN)
        if self.queue.driver.reconnect is not None:
            self.queue.driver.reconnect()

    def unwanted(self, slot: TaskSlot) -> IserblkError:
        """The error of a command that is not sent again: it must not be carried out twice, it was
        being aborted when the connection was lost, or the processing of its answer was
        interrupted."""
        if slot.state == SENT and slot.once:
            return ConnectionLost(
                f"{self.portal}: connection lost during command {slot.cdb[0]:#04x}, which may have "
                "been carried out, and is not sent again"
            )
        if slot.state == SENT:
            return ConnectionLost(
                f"{self.portal}: interrupted before command {slot.cdb[0]:#04x} had ended"
            )
        if self.is_unanswered(slot):
            return self.unanswered(slot, "nor was its abort")
        late = CommandTimeout(
            f"{self.portal}: command {slot.cdb[0]:#04x} did not end within {self.time_words}, nor "
            "was its abort answered; is the target slow? raise io-timeout"
        )
        late.logged = True
        return late

    def note_unanswered(self, slot: TaskSlot) -> None:
        """``slot``, which is in flight, is aborted although its request has time left."""
        self._unanswered[slot] = slot.itt

    def is_unanswered(self, slot: TaskSlot) -> bool:
        """Whether that was done to the command that ``slot`` has now."""
        return self._unanswered.get(slot) == slot.itt

    def unanswered(self, slot: TaskSlot, what: str) -> Unanswered:
        """The error of such a command; ``what`` ends its text."""
        error = Unanswered(
            f"{self.portal}: command {slot.cdb[0]:#04x} was not answered within "
            f"{self.command_timeout:g} s, {what}"
        )
        error.logged = True
        return error

    def log_out_settled(self, patience: float) -> None:
        """Log out, as the target had asked, within ``patience`` seconds. Where something is
        unflushed, the reconnector has it flushed first."""
        reconnect = self.queue.driver.reconnect
        if reconnect is not None and self.listeners.any_unflushed():
            self.logout_asked = monotonic() + patience
            reconnect()
        else:
            self.log_out(AS_ASKED, patience)

    def log_out(self, why: str, patience: float) -> bool:
        """Log out when what is in flight has ended, or after ``patience`` seconds;
        then the driver's ``reconnect`` is called. It begins with the next ``progress``. False:
        there is no connection, the driver cannot reconnect, or a logout is under way already."""
        if self.life.state is not State.LOGGED_IN or self.queue.driver.reconnect is None:
            return False
        self.life.enter(Event.LOG_OUT)
        self.logout_asked = 0.0
        self.logout = SessionLogout(self, monotonic() + patience, why)
        self.queue.close_window()
        return True

    def still_absent(self, why: IserblkError) -> None:
        """While there is no connection: note why an attempt to get one has failed.
        A command that cannot wait longer reports this."""
        if self.life.absent:
            self.life.still_absent(why)

    def offer(self, outcome: Session | IserblkError) -> None:
        """While the session is suspended: offer a fresh session, idle, whose
        driver has ended and whose connection is taken over; or an error that says why there will
        never be a connection. It comes into effect with the next ``progress``. A fresh session that
        is not wanted any more is ended."""
        if isinstance(outcome, Session):
            outcome.drive(Undriven(outcome.queue.flush))
        if self.life.absent:
            self._offered = outcome
            return
        if isinstance(outcome, Session):
            outcome.fail(ConnectionLost(f"{self.portal}: not wanted any more"))

    def _revived(self, now: float) -> bool:
        """Take up what was offered, without a connection; returns whether there is one again."""
        if self.several is not None and self.reinstating:
            return self.several.reinstated(now)
        if self.life.state is State.CLEANING_UP:
            self._clean_up()
        if self.life.state is not State.SUSPENDED:
            return False
        offered = self._offered
        if isinstance(offered, Session):
            self._adopt(offered, now)
            return True
        if offered is not None:
            self.fail(offered)
        return False

    def _adopt(self, fresh: Session, now: float) -> None:
        """Go on with the connection of ``fresh``. When this is interrupted, the next ``progress``
        begins it again."""
        queue = self.queue
        queue.take_connection(fresh.queue)
        self.parameters = fresh.parameters
        self.provider_reason = fresh.provider_reason
        self.tsih = fresh.tsih
        self.more = fresh.more
        self.wanted = fresh.wanted
        self.life.spent = fresh.life.spent
        self.several = fresh.several
        if self.several is not None:
            self.several.session = self
            self.several.forget()  # what ``fresh`` had lost already is not in this queue
        connection = queue.connection
        connection.last_heard = now
        self.attach(connection)
        queue.driver.changed()
        again = queue.reopen(fresh.queue)
        self._offered = None
        self.respite.left_nothing = False
        self.life.portal = self.portal
        self.life.enter(Event.ADOPT)
        self.counts.adopted(fresh.counts, again)
        silence = self.silence.end(now)
        log.warning(
            "%s: connected again after %.1f s, %d commands sent again%s",
            self.portal,
            max(0.0, now - self.suspended_at),
            again,
            silence and f"; {silence}",
        )
        queue.refuse_waiting()
        queue.send_waiting()

    # -- ending -----------------------------------------------------------------------------------

    def _terminate(self) -> None:
        fd = self.fileno()
        if fd >= 0:
            self.queue.driver.closing(fd)
        for connection in self.queue.connections.copy():
            connection.datamover.connection_terminate()
        if self.several is not None:
            self.several.terminate()

    def fail(self, error: IserblkError) -> None:
        """End the session, and every task with ``error``. No buffer is touched any more. Where this
        is interrupted, ``finish`` does the rest."""
        if self.error is None:
            self._unfinished = True
            # Without its frames, which refer to buffers.
            self.life.enter(Event.FAIL, without_frames(error))
        self.finish()

    def finish(self) -> bool:
        """Of a session that has failed: do what ``fail`` has not done. False: an earlier call is at
        it."""
        mine = False
        try:
            if self.error is None or not self._unfinished:
                return True
            if self._finishing:
                return False
            self._finishing = mine = True
            takers = self.queue.close()
            self._terminate()
            offered = self._offered
            if isinstance(offered, Session):
                offered.fail(self.queue.fresh_error())
            self._offered = None
            self.queue.end_all(takers)
            self.queue.driver.changed()
            self._unfinished = False
            return True
        finally:
            if mine:
                self._finishing = False
