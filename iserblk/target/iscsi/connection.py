"""The iSCSI layer of the target, for one connection of a session. No trio, no socket.

Login comes first, then commands. Each SCSI Command becomes a ScsiTask of the device server. Its
data moves by ``put_data`` and ``get_data``. Its response carries StatSN, ExpCmdSN and MaxCmdSN
(RFC 7143 sections 4.2, 11). Tasks that may wait for a disk go to ``offload``.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import Final

from iserblk.datamover.seam import PduSlot, Resumption, TargetDatamover
from iserblk.errors import Busy, ConnectionLost, RemoteProtocolError, TransportError
from iserblk.iscsi import bhs, keys, pdu
from iserblk.iscsi.keys import SessionParameters
from iserblk.iscsi.login_target import FIRST_BURST, Joinable, LoginTarget
from iserblk.iscsi.serial import MASK32, serial_lt
from iserblk.iscsi.text import MAXIMUM_TEXT
from iserblk.scsi import luns, sense
from iserblk.scsi import status as sam
from iserblk.target.iscsi.buffers import DataBudget
from iserblk.target.iscsi.control import (
    CID_NOT_FOUND,
    CLEANUP_FAILED,
    CLOSED,
    RECOVERY_NOT_SUPPORTED,
    ControlAnswers,
)
from iserblk.target.iscsi.numbers import Numbers
from iserblk.target.iscsi.owing import Owed
from iserblk.target.iscsi.owners import ConnectionDriver, ConnectionOwner, Undriven
from iserblk.target.iscsi.session import RECOVERY, TargetSession
from iserblk.target.iscsi.slot import (
    AT_ONCE,
    COMPLETED,
    DORMANT,
    ENDED,
    FETCHING,
    HAS_COME,
    IDLE,
    RUNNING,
    SUSPENDED,
    UNSOLICITED,
    WAITING,
    WAITS,
    Allegiance,
    TargetTask,
    pack_response,
)
from iserblk.target.ports import ONLY_PORT, TargetPort
from iserblk.target.seam import (
    BIDIRECTIONAL,
    DATA_IN,
    DATA_OUT,
    NO_DATA,
    DeviceServer,
    ScsiTask,
)
from iserblk.target.task_set import ACA, HEAD_OF_QUEUE
from iserblk.target.task_set import AT_ONCE as NEVER_DORMANT

log = logging.getLogger(__name__)

QUEUE_DEPTH: Final = 128  # commands that an initiator may have outstanding
UNEXPECTED: Final = 32  # immediate PDUs in addition to these (MaxOutstandingUnexpectedPDUs)
PINGS: Final = 1  # answers to pings of ours, in addition to these
LOGIN_SLOTS: Final = 4
# Of one connection: a slot is free only when the datamover reports its response as sent.
TASK_SLOTS: Final = 2 * QUEUE_DEPTH
BATCH_SLOTS: Final = 16  # that are made at a time
# Bytes that are set aside for the slots that are still to be made. They take 0.6 MiB, and Python
# takes memory from the system by the MiB.
RESERVE: Final = 1 << 20
FEW_COMMANDS: Final = 16  # between two calls of ``trim``: the session is idle
ACKNOWLEDGED: Final = 65536  # bytes of Data-In for which an acknowledgement is asked for (A-bit)
CONTROL_SLOTS: Final = QUEUE_DEPTH + UNEXPECTED  # for answers to NOP, text, task management
UNANSWERED: Final = 64  # task management requests of a connection, until more are rejected
CONTROL_INLINE: Final = 8192
SENSE_INLINE: Final = 256
# A LUN has one task set for all sessions (TST 0 in the Control mode page).
_OF_ALL_SESSIONS: Final = (pdu.TMF_CLEAR_TASK_SET, pdu.TMF_LOGICAL_UNIT_RESET)
_OF_THE_TARGET: Final = (pdu.TMF_TARGET_WARM_RESET, pdu.TMF_TARGET_COLD_RESET)
_OF_A_LUN: Final = (pdu.TMF_ABORT_TASK_SET, *_OF_ALL_SESSIONS)
# PDUs with a CmdSN, SCSI Commands excepted.
_NUMBERED: Final = (
    bhs.NOP_OUT,
    bhs.TASK_MANAGEMENT_REQUEST,
    bhs.TEXT_REQUEST,
    bhs.LOGOUT_REQUEST,
)
_NOT_SIMPLE: Final = 0x06  # a bit of ATTR that neither UNTAGGED nor SIMPLE has
_AT_ANY_TIME: Final = ("MaxRecvDataSegmentLength", "InitiatorAlias")
# The OUI in the ISIDs of open-iscsi. Over iSER, its kernel takes no more than 128 bytes of data in
# a control-type PDU of full feature phase, whatever InitiatorRecvDataSegmentLength says.
_OPEN_ISCSI: Final = bytes.fromhex("00023d")
_OPEN_ISCSI_DATA: Final = 128
_LONG_AGO: Final = 1 << 30  # StatSNs
PATIENCE: Final = 3  # ticks, after which unsolicited data counts as lost


class TargetConnection:
    """One connection of ``session``, with its login. Implements TargetUser and Allegiance.

    ``done``: the connection has ended, by a logout or otherwise; the owner then calls ``close``,
    and where ``kept``, some time later ``TargetSession.expire``. ``cut``: what is still queued will
    never leave. ``driver``: set by what drives the connection.
    """

    def __init__(
        self,
        datamover: TargetDatamover,
        device: DeviceServer,
        login: LoginTarget,
        owner: ConnectionOwner,
        *,
        portal: str,
        port: TargetPort = ONLY_PORT,
        budget: DataBudget | None = None,
        at_once: bool = True,
        address: str = "",
    ) -> None:
        """``at_once``: the memory of slots is registered with a device, and there is little of it:
        all that the depth may need is allocated at login. False: it is any memory of the process,
        is allocated when it is needed, and ``trim`` gives it back. ``address``: of the peer; ""
        if it is not known."""
        self._dm = datamover
        self._device = device
        self._task_sets = device.task_sets
        self.login = login
        self._owner = owner
        self.driver: ConnectionDriver = Undriven()
        self._attempt: tuple[bytes, bytes, str] | None = None  # a Login Request that waits
        self.on_closed: list[Callable[[], None]] = []
        self.cid = 0
        self.recovered = False
        self.cut = False
        self._closed = False
        self._portal, self.port = portal, port
        self.parameters: SessionParameters | None = None
        self.done = False
        self._recovers = False
        # At the last tick: the oldest status that was kept, and the first task that waited.
        self._unacknowledged: int | None = None
        self._waited: TargetTask | None = None
        # Bits of the owner, which clears all of them when the initiator is heard.
        self.silent = 0
        self._leaving = False  # a Logout was received
        self._early_text = False  # a Text Request waits for its turn
        self._ignored = 0  # commands outside of the window
        self._unanswered = 0  # task management requests that wait for tasks to end
        self._budget = budget or DataBudget()
        self.session = session = TargetSession(device, self._budget, address)
        session.connections.append(self)
        # Of the session, which has them for all of its connections. ``_join`` replaces them.
        self._window = session.window
        self._tasks = session.tasks
        self._deferred = session.deferred
        self._pool = session.pool
        self._free: list[TargetTask] = []
        self._slots: list[TargetTask] = []  # free or not
        self._at_once = at_once
        self._reserve: mmap | None = None
        self._looked = 0  # ExpCmdSN at the last ``trim``
        # At the last look: data of a command, room for answers, commands before others.
        self._owed_data, self._owed_room, self._owed_command = Owed(True), Owed(), Owed()
        # What the initiator has acknowledged, where that matters.
        self._notes = False
        self._keeps = False  # responses until they are acknowledged
        self._acknowledged = 0  # its ExpStatSN
        self._kept: deque[TargetTask] = deque()  # in the order of their StatSN
        self._beside = 0  # bytes that ``_pool`` has been told of
        self._awaited: list[tuple[int, Callable[[], None]]] = []  # StatSN, and what waits for it
        self._numbers = Numbers(session.window)
        slots = [TargetTask(index, True) for index in range(LOGIN_SLOTS)]
        self._answers = ControlAnswers(datamover, self._numbers, slots, self._declare, self._hold)
        self._data_limit = CONTROL_INLINE
        datamover.user = self
        datamover.on_unfinished = self._unfinished
        datamover.notice_numbers(self._numbers)
        datamover.allocate_connection_resources(slots, CONTROL_INLINE, LOGIN_SLOTS)

    # -- driven by the owner ----------------------------------------------------------------------

    def progress(self, now: float) -> None:
        """Process what has arrived, and send the answers. Raises TransportError when the
        connection has ended."""
        self._dm.progress(now)
        self.flush()

    def _unfinished(self) -> None:
        """See TargetDatamover.on_unfinished."""
        self.driver.unfinished()

    def flush(self) -> None:
        """Send what is queued, and start deferred tasks with the buffers that this frees. Raises
        TransportError when the connection has ended."""
        while True:
            before = -1
            while len(self._deferred) != before:
                before = len(self._deferred)
                if before:
                    self.session.resume(self)
                self._dm.flush()
            if not self._task_sets.ready or not self._task_sets.enable_ready():
                break
        if self._budget.waiting:
            self._budget.wake()

    def tick(self) -> None:
        """Call it about once a second, from the end of login on, where ``recovers``: what was lost
        is asked for again. If a status is not acknowledged for two ticks, a ping shows the
        initiator that there is one. If a task waits so long for memory, what is kept for
        retransmission gives way. Raises TransportError as ``flush``."""
        if not self._recovers or self.done:
            return
        self._dm.tick()
        for slot in list(self._tasks.values()):
            if slot.state == UNSOLICITED and slot.connection is self:
                slot.age += 1
                if slot.age >= PATIENCE:
                    self._begin(slot)  # the rest is fetched by R2Ts
        self._count_beside()
        oldest = self._dm.unacknowledged
        if oldest is not None and oldest == self._unacknowledged:
            self._answers.ping()
        self._unacknowledged = oldest
        waits = self._deferred[0] if self._deferred and not self.session.held else None
        if waits is not None and waits is self._waited:
            self._budget.press()
        self._waited = waits
        self.flush()
        self.driver.output_waits()

    def overdue(self, now: float) -> str:
        """Call it about twice a minute. What the initiator has owed for too long, for the log: then
        the connection is to be given up, also if the initiator answers pings, as tasks of others
        wait for it, or for the memory that it holds. "": nothing. ``now``: seconds of any clock."""
        fetching = [
            slot
            for slot in self._tasks.values()
            if slot.connection is self and slot.state in (FETCHING, UNSOLICITED)
        ]
        length = fetching[0].task.length if fetching else 0
        # Tasks of SCSI, as slots are used again.
        if self._owed_data.overdue([slot.task for slot in fetching], length, now):
            for slot in fetching:
                self._end_owed(slot)
            return "the data of a command did not come"
        leaving: list[ScsiTask] = []
        if not self._recovers or self._dm.wants_write():  # else they may be kept
            leaving = [slot.task for slot in self._slots if slot.state == ENDED and slot.busy]
        length = max((each.length for each in leaving), default=0)
        if self._owed_room.overdue(leaving, length, now):
            return "its answers were not taken"
        if self._owed_command.overdue(self.session.missing_for(self), 0, now):
            return "a command before others did not come"
        return ""

    def _end_owed(self, slot: TargetTask) -> None:
        """End a task whose data has not come, even where the tasks of a lost connection are kept:
        it holds up no others any more."""
        slot.task.cancel()
        slot.task.status = sam.TASK_ABORTED
        slot.task.transferred = 0
        self._task_sets.leave(slot.lun, slot)

    def _count_beside(self) -> None:
        """Tell the budget what this connection holds beside data buffers."""
        held = 0 if self._closed else self._dm.kept_bytes + self._answers.held
        self._pool.hold(held - self._beside)
        self._beside = held

    def _hold(self, length: int) -> bool:
        """Have so many bytes more count that are held beside data buffers. False: there is no
        memory."""
        if not self._pool.may_hold(length):
            return False
        self._pool.hold(length)
        self._beside += length
        return True

    def _forget_kept(self) -> None:
        """Memory is wanted: nothing is kept for retransmission any more, as far as may be."""
        self._dm.forget_kept()
        self._count_beside()

    @property
    def recovers(self) -> bool:
        """Whether the session has an ErrorRecoveryLevel above 0, over TCP: then ``tick`` is
        called."""
        return self._recovers

    def ping(self) -> None:
        """Send a ping to a silent initiator (RFC 7143 section 11.19). Nothing is sent in a
        discovery session, where the initiator expects only answers."""
        if self.session.attached:
            self._answers.ping()
            self.flush_quietly()

    def tell(
        self,
        event: int,
        *,
        lun: bytes = bytes(8),
        sense: bytes = b"",
        parameter1: int = 0,
        parameter2: int = 0,
        parameter3: int = 0,
    ) -> bool:
        """Send an Asynchronous Message. Arguments as for ``ControlAnswers.async_message``. False:
        nothing was sent, because the initiator takes no more of them, or expects none, as in a
        discovery session, or before its Hello."""
        if not self.session.attached or self.done or self._leaving or not self._dm.greeted:
            return False
        told = self._answers.async_message(
            event,
            lun=lun,
            sense=sense,
            parameter1=parameter1,
            parameter2=parameter2,
            parameter3=parameter3,
        )
        self.flush_quietly()
        return told

    def give_up(self) -> None:
        """The target drops the connection: tell the initiator on another one (RFC 7143 section
        11.9.1), then ``abandon``."""
        session = self.session
        for each in session.connections:
            if each is not self and each.tell_of_drop(
                self.cid, session.parameters.default_time2wait, session.time2retain
            ):
                break
        self.abandon()
        self._task_sets.enable_ready()

    def tell_of_drop(self, cid: int, time2wait: int, time2retain: int) -> bool:
        """Implements Allegiance."""
        return self.tell(
            pdu.ASYNC_CONNECTION_DROP,
            parameter1=cid,
            parameter2=time2wait,
            parameter3=time2retain,
        )

    def abandon(self) -> None:
        """The connection has failed, or is given up. Its tasks are kept, or end; with the last
        connection the session ends, unless it is kept. The owner calls ``close`` later, when no
        task waits for the descriptor."""
        if self.done:
            self.disconnect()
        else:
            self.done = True
            self.session.lose(self)

    def disconnect(self) -> None:
        """Implements Allegiance."""
        self.done = self.cut = True
        self._dm.disconnect()

    def close(self) -> None:
        """Let go of the descriptor and of all memory that the connection uses. A thread may be
        running a task of it."""
        if not self.done:
            self.abandon()
        self._dm.connection_terminate()
        self._budget.keepers.pop(self._forget_kept, None)
        self._give_up_reserve()
        self._closed = True
        self._count_beside()
        self.session.leave(self)
        self._end_awaiting()

    @property
    def kept(self) -> bool:
        """The connection is closed, but its session keeps tasks of it, or itself."""
        return self in self.session.lost

    def release(self) -> None:
        """Implements Allegiance."""
        if not self._closed:
            return
        session = self.session
        for slot in self._slots:
            if slot.connection is not self:
                continue
            if self._tasks.get(slot.itt) is slot:
                if slot.aborted and slot.state != RUNNING:
                    self.drop(slot)  # it waited for data
                elif slot.buffer is not None:
                    self._give_back(slot, slot.buffer)
            elif session.answered.get(slot.itt) is not slot and slot.buffer is not None:
                self._pool.give(slot.buffer)
                slot.buffer = None

    def _give_back(self, slot: TargetTask, buffer: memoryview) -> None:
        """Give back what a task that is kept can do without: the initiator may never come back, and
        R2Ts can fetch the data of a write again. Not what came unsolicited: immediate data is not
        advertised again over iSER (RFC 7145 section 10.2.2)."""
        if slot.state == COMPLETED and not slot.task.direction & DATA_IN:
            slot.filled = 0  # it is carried out
        elif slot.state in (SUSPENDED, DORMANT):
            slot.filled = min(slot.filled, FIRST_BURST)
        else:
            return
        if not slot.filled:
            self._pool.give(buffer)
            slot.buffer = None
        elif len(buffer) > slot.filled:
            slot.buffer = self._pool.grow(buffer, slot.filled, slot.filled)

    @property
    def kept_data(self) -> int:
        """Bytes of data of the tasks that are allegiant to this connection."""
        return sum(
            len(slot.buffer)
            for slot in self._slots
            if slot.connection is self and slot.buffer is not None
        )

    # -- notifications ----------------------------------------------------------------------------

    def control_notify(self, message: memoryview, at: int, invalidated: int) -> None:
        if self.done or self._leaving:
            # The PDU came before the session ended, perhaps because a new session took its name:
            # an old write must not land now.
            return
        opcode = message[at] & bhs.OPCODE_MASK
        if self._notes:
            self._note_acknowledgement(message, at)
        if self._answers.unexpected.outstanding:
            self._answers.heard(message, at)
        if self.parameters is None:
            self._login(message, at, opcode)
        elif opcode == bhs.SCSI_COMMAND:
            self._scsi_command(message, at)
        elif opcode == bhs.DATA_OUT and not self.parameters.initial_r2t:
            self._data_out(message, at)
        elif opcode in _NUMBERED and (
            self._lacks_tag(message, at, opcode) or self._must_wait(message, at)
        ):
            pass
        elif opcode == bhs.NOP_OUT:
            self._answers.nop_in(message, at, self._data_limit)
        elif opcode == bhs.TASK_MANAGEMENT_REQUEST and self.session.attached:
            self._task_management(pdu.TaskManagementRequest.unpack_from(message, at))
        elif opcode == bhs.TEXT_REQUEST:
            addresses = self.port.ports.target_addresses(self._portal, self.port)
            self._answers.text(message, at, {self.login.target_name: addresses}, self._data_limit)
        elif opcode == bhs.LOGOUT_REQUEST:
            self._log_out(pdu.LogoutRequest.unpack_from(message, at))
        elif opcode == bhs.SNACK_REQUEST and self._recovers:
            reason, data_sn = self._dm.retransmit(pdu.SnackRequest.unpack_from(message, at))
            if reason:
                self._answers.reject(
                    message, at, reason, in_place_of_a_response=False, data_sn=data_sn
                )
        elif opcode in (bhs.SNACK_REQUEST, bhs.LOGIN_REQUEST):
            # Neither is allowed in full feature phase: not in iSER (RFC 7145 sections 7.3.9,
            # 7.3.11), nor in Traditional iSCSI at ErrorRecoveryLevel 0.
            self._reject(message, at, pdu.REJECT_PROTOCOL_ERROR, False)
        else:
            self._reject(message, at, pdu.REJECT_COMMAND_NOT_SUPPORTED, False)
        if self._window.waiting:
            self.session.drain()

    def _lacks_tag(self, message: memoryview, at: int, opcode: int) -> bool:
        """Whether a PDU that is no SCSI command, and is to have an answer, has the ITT that is
        reserved (11.2.1.8). Then it is rejected, unless its CmdSN has it ignored."""
        (itt,) = bhs.ITT.unpack_from(message, at + bhs.ITT_OFFSET)
        if itt != bhs.NO_TAG or opcode == bhs.NOP_OUT:
            return False
        window = self._window
        (cmd_sn, _) = bhs.CMD_SN_EXP_STAT_SN.unpack_from(message, at + bhs.CMD_SN_OFFSET)
        if window.is_next(message[at], cmd_sn) or window.may_wait(cmd_sn):
            self._reject(message, at, pdu.REJECT_INVALID_FIELD, True)
        return True

    def _must_wait(self, message: memoryview, at: int) -> bool:
        """Whether a PDU that is no SCSI command has come before others with a smaller CmdSN. Then a
        copy of it waits for its turn: a Text Request whole, as a part of a question is another one,
        any other with no more data than an answer could have. A connection has one Text Request
        outstanding (RFC 7143 section 11.10), so a second one that would wait is rejected, and does
        not count as received. Raises RemoteProtocolError as for a text that is too long in turn,
        and ConnectionLost where there is no memory."""
        (cmd_sn, _) = bhs.CMD_SN_EXP_STAT_SN.unpack_from(message, at + bhs.CMD_SN_OFFSET)
        if (
            message[at] & bhs.IMMEDIATE
            or cmd_sn == self._window.exp_cmd_sn
            or not self._window.may_wait(cmd_sn)
        ):
            return False
        data = bhs.data_segment_untrusted(message, at)
        if message[at] & bhs.OPCODE_MASK != bhs.TEXT_REQUEST:
            data = data[:CONTROL_INLINE]
        elif len(data) > MAXIMUM_TEXT:
            raise RemoteProtocolError("iSCSI", f"a text of more than {MAXIMUM_TEXT} bytes")
        elif self._early_text:
            self._reject(message, at, pdu.REJECT_PROTOCOL_ERROR, True)
            return True
        else:
            self._early_text = True
        if not self._pool.may_hold(bhs.BHS_LENGTH + len(data)):
            raise ConnectionLost("there is no memory for what comes before its turn")
        copy = bytearray(message[at : at + bhs.BHS_LENGTH])
        bhs.LENGTHS.pack_into(copy, bhs.LENGTHS_OFFSET, len(data))
        whole = memoryview(copy + data)
        self.session.wait(cmd_sn, self, None, partial(self._control_turn_comes, whole), len(whole))
        return True

    def _control_turn_comes(self, whole: memoryview) -> None:
        """Take a PDU that came before its turn."""
        if whole[0] & bhs.OPCODE_MASK == bhs.TEXT_REQUEST:
            self._early_text = False
        self.control_notify(whole, 0, 0)

    def _reject(self, message: memoryview, at: int, reason: int, responds: bool) -> None:
        self._answers.reject(message, at, reason, in_place_of_a_response=responds)

    def discarded_notify(self, head: memoryview) -> None:
        """Tell the initiator (RFC 7143 section 7.8). A command uses up no CmdSN: it comes again.
        Unsolicited data is fetched by an R2T when its command has sent the last of it."""
        if self.done or self._leaving:
            return
        self._reject(head, 0, pdu.REJECT_DATA_DIGEST_ERROR, True)
        if head[0] & bhs.OPCODE_MASK == bhs.DATA_OUT:
            data_out = pdu.DataOut.unpack_from(head)
            slot = self._tasks.get(data_out.itt)
            if (
                data_out.ttt == bhs.NO_TAG
                and slot is not None
                and slot.connection is self
                and (slot.state == UNSOLICITED or (slot.state == WAITING and slot.more))
            ):
                self._miss_data_out(slot, data_out)

    def data_completion_notify(self, slot: PduSlot, sn: int) -> None:
        assert isinstance(slot, TargetTask)
        if self.done:
            return
        if slot.aborted:
            self.drop(slot)
        elif slot.task.status:
            self.respond(slot)  # ended by another session's reset
        else:
            slot.filled += slot.fetching
            self.start(slot)

    def data_ack_notify(self, slot: PduSlot, data_sn: int) -> None:
        """As ``sent_notify``: the acknowledgement may come behind the response."""
        assert isinstance(slot, TargetTask)
        slot.acknowledged = True
        self.sent_notify(slot)

    def sent_notify(self, slot: PduSlot) -> None:
        assert isinstance(slot, TargetTask)
        if slot.state == ENDED and not slot.busy:
            if not slot.kept:
                self.recycle(slot)
            elif slot.acknowledged and slot.buffer is not None:
                self._pool.give(slot.buffer)  # only its status may be needed again
                slot.buffer = None

    def recycle(self, slot: TargetTask) -> None:
        """Implements Allegiance."""
        if self.done and not self._closed:
            return  # its buffer may be in use still; ``release`` gives it back
        if slot.buffer is not None:
            self._pool.give(slot.buffer)
            slot.buffer = None
        self._dm.deallocate_task_resources(slot)
        slot.state = IDLE
        slot.filled = 0
        slot.arrived = 0
        slot.overflow = 0
        slot.read_length = 0
        slot.data_sn = 0
        slot.age = 0
        slot.reassigned = False
        slot.losses = 0
        slot.acknowledged = False
        slot.resume_at = 0
        slot.turn = AT_ONCE
        slot.aborted = False
        if slot.control:
            self._answers.give_back(slot)
        else:
            self._free.append(slot)

    # -- login ------------------------------------------------------------------------------------

    def _login(self, message: memoryview, at: int, opcode: int) -> None:
        if opcode != bhs.LOGIN_REQUEST:
            raise RemoteProtocolError("iSCSI", f"opcode {opcode:#x} before the end of login")
        if self._attempt is not None:
            raise RemoteProtocolError("iSCSI", "a login request before the answer to the last one")
        if not self.login.begun:
            self._owner.login_begun()
        header = bytes(message[at : at + bhs.BHS_LENGTH])
        data = bhs.data_segment_untrusted(message, at)
        user = self.login.claimed_user(header, data)
        if user and self._owner.hold_attempt(user, self._resume_login):
            self._attempt = (header, bytes(data), user)
        else:
            self._take_login(header, data, user)

    def _resume_login(self) -> None:
        """The attempt that was held has its turn."""
        attempt, self._attempt = self._attempt, None
        if attempt is None or self.done:
            return
        try:
            self._take_login(*attempt)
        except TransportError as error:
            log.info("a login failed: %s", error)
            self.abandon()
        self.driver.unfinished()  # ``progress`` sends the answer

    def _take_login(self, header: bytes, data: bytes | memoryview, user: str) -> None:
        """``user``: whom the initiator claims to be with a response of CHAP, or ""."""
        answers = self.login.receive(header, data)
        if user:
            self._owner.attempt_ended(user, self.login.user == user)
        if self.login.done:
            try:
                self._owner.take_place()
                self._allocate()
            except (Busy, OSError, MemoryError) as error:
                answers = [self.login.out_of_resources(str(error) or "no memory")]
        if self.login.done:
            self._enter_full_feature_phase(*answers[0])
            return
        for answer, text in answers:
            self._answers.login(answer, text)
        if self.login.failed:
            self.done = True

    def _allocate(self) -> None:
        """Allocate what the session needs beside the login buffers, before the final Login Response
        promises it (RFC 7145 section 5.1.2).

        Where slots are made later, their memory is promised nevertheless: a mapping as large as all
        of them is made now. The system counts it against every limit that could refuse memory to
        this process (address space, data, commit limit), though pages that nothing touches take no
        memory. So the login fails where it always did. Should memory be refused later, the mapping
        is given up and all slots are made in its place."""
        login = self.login
        self._dm.notice_key_values(login.parameters)
        if not login.discovery:
            if not self._at_once:
                self._reserve = _set_aside_memory()
            self._make_slots(TASK_SLOTS if self._at_once else BATCH_SLOTS, QUEUE_DEPTH)
        unasked = login.depth * login.unsolicited_of_each
        self._dm.add_resources([], 0, UNEXPECTED + PINGS + unasked)
        self._answers.enlarge(CONTROL_INLINE, CONTROL_SLOTS)

    def _make_slots(self, count: int, receives: int = 0) -> None:
        """Add ``count`` slots. Raises as ``add_resources``; then nothing has changed."""
        made = len(self._slots)
        fresh = [TargetTask(index) for index in range(made, made + count)]
        for slot in fresh:
            slot.connection = self
        self._dm.add_resources(fresh, SENSE_INLINE, receives)
        self._slots += fresh
        self._free += fresh

    def _more_slots(self) -> None:
        """Make slots when none is free. Raises RemoteProtocolError when the initiator has begun
        more than it may; and ConnectionLost when there is no memory after all, because another
        thread has taken what the reserve had held."""
        left = TASK_SLOTS - len(self._slots)
        if left <= 0:
            raise RemoteProtocolError("iSCSI", "more commands than MaxCmdSN allows")
        try:
            try:
                self._make_slots(min(left, BATCH_SLOTS))
            except (OSError, MemoryError):
                self._give_up_reserve()
                self._make_slots(left)
        except (OSError, MemoryError):
            raise ConnectionLost("there is no memory for the commands of the session") from None
        if len(self._slots) >= TASK_SLOTS:
            self._give_up_reserve()

    def _give_up_reserve(self) -> None:
        reserve, self._reserve = self._reserve, None
        if reserve is not None:
            reserve.close()

    def trim(self) -> None:
        """Call it about twice a minute: if the session is idle, give back memory that only a busy
        one needs."""
        self._count_beside()
        before, self._looked = self._looked, self._window.exp_cmd_sn
        if (self._looked - before) & MASK32 > FEW_COMMANDS:
            return
        self._pool.trim()
        free = self._free
        if self._at_once or len(free) <= BATCH_SLOTS or len(free) < len(self._slots):
            return
        if any(slot.busy for slot in free):
            return
        if self._reserve is None:
            try:
                self._reserve = _set_aside_memory()
            except OSError:
                return  # what login has promised stays where it is
        for slot in self._slots[BATCH_SLOTS:]:
            slot.request.token = slot.transfer.token = None  # else each would refer to itself
        del self._slots[BATCH_SLOTS:]
        self._free = list(self._slots)

    def _enter_full_feature_phase(self, header: bytes, data: bytes) -> None:
        """Apply the result of the login, whose final response is given."""
        login = self.login
        self._numbers.stat_sn = login.stat_sn
        self._acknowledged = login.stat_sn
        self.cid = login.cid
        self.parameters = login.parameters
        self._limit_data(login.parameters.initiator_recv_data_segment_length)
        if login.joined is not None:
            self._join(login.joined)
        else:
            self._window.first_cmd_sn = self._window.exp_cmd_sn = login.exp_cmd_sn
            self._window.max_cmd_sn = login.max_cmd_sn
            if not login.discovery:
                self.session.attach(
                    login.initiator_name,
                    login.isid,
                    self.port,
                    login.user,
                    login.depth,
                    login.parameters,
                )
        if self.session.recovers:
            self._keeps = True
            self._notes = True
        if login.parameters.rdma_extensions:
            self._answers.unexpected.limit = login.parameters.max_outstanding_unexpected_pdus
        self._dm = self._answers.enable_datamover(header, data)
        if login.parameters.error_recovery_level and not login.parameters.rdma_extensions:
            self._recovers = True
            self._budget.keepers[self._forget_kept] = None
        self._owner.logged_in()

    def _join(self, joined: Joinable) -> None:
        """Become a connection of a session that there is."""
        assert isinstance(joined, TargetSession)
        self._pool.hold(-self._beside)
        self._beside = 0
        self.session.leave(self)
        self.session = joined
        self._window = joined.window
        self._tasks = joined.tasks
        self._deferred = joined.deferred
        self._pool = joined.pool
        self._numbers.window = joined.window
        joined.join(self)

    # -- acknowledgements -------------------------------------------------------------------------

    def note_acknowledgements(self) -> None:
        """Implements Allegiance. What was acknowledged before is not known, as far as StatSN has
        moved since the login; it lies less than half of the range behind."""
        if not self._notes and self._acknowledged != self._numbers.stat_sn:
            self._acknowledged = (self._numbers.stat_sn - _LONG_AGO) & MASK32
        self._notes = True

    def _note_acknowledgement(self, message: memoryview, at: int) -> None:
        """Take the ExpStatSN of a PDU: responses before it need not be kept."""
        (_, exp_stat_sn) = bhs.CMD_SN_EXP_STAT_SN.unpack_from(message, at + bhs.CMD_SN_OFFSET)
        if not serial_lt(self._acknowledged, exp_stat_sn) or serial_lt(
            self._numbers.stat_sn, exp_stat_sn
        ):
            return
        self._acknowledged = exp_stat_sn
        kept = self._kept
        while kept and serial_lt(kept[0].stat_sn, exp_stat_sn):
            slot = kept.popleft()
            slot.kept = False
            self.session.acknowledged(slot)
            if slot.state == ENDED and not slot.busy:
                self.recycle(slot)
        if self._awaited:
            self._tell_acknowledged()

    def _tell_acknowledged(self) -> None:
        done = [each for each in self._awaited if not serial_lt(self._acknowledged, each[0])]
        self._awaited = [each for each in self._awaited if each not in done]
        for _, tell in done:
            tell()
        if self._awaited:
            self.ask_for_acknowledgement()

    def ask_for_acknowledgement(self) -> None:
        """Implements Allegiance."""
        if not self.done and self._acknowledged != self._numbers.stat_sn:
            self.ping()

    def await_acknowledgement(self, tell: Callable[[], None]) -> None:
        """Implements Allegiance."""
        if self.done or not serial_lt(self._acknowledged, self._numbers.stat_sn):
            tell()
            return
        self._awaited.append((self._numbers.stat_sn, tell))
        self.ask_for_acknowledgement()

    def _end_awaiting(self) -> None:
        """Nothing is acknowledged any more, and nothing comes, either."""
        awaited, self._awaited = self._awaited, []
        for _, tell in awaited:
            tell()

    # -- parameters -------------------------------------------------------------------------------

    def _limit_data(self, most: int) -> None:
        """Limit answers to ``most`` bytes of data in one PDU: the initiator takes no more."""
        login = self.login
        if (
            login.parameters.rdma_extensions
            and not login.discovery
            and login.isid.startswith(_OPEN_ISCSI)
        ):
            most = min(most, _OPEN_ISCSI_DATA)
        self._data_limit = min(CONTROL_INLINE, most)

    def _declare(self, key: str, value: str) -> str | None:
        """Take a key that a Text Request declares in full feature phase. Returns the answer, or
        None. No later PDU is longer than the initiator declares (RFC 7143 section 13.12)."""
        if key not in _AT_ANY_TIME or self.parameters is None:
            return keys.NOT_UNDERSTOOD
        parameters = self.parameters
        answer = keys.answer(parameters, key, value, self.login.discovery)
        if answer is None and not parameters.rdma_extensions:  # iSER has a key of its own
            most = parameters.max_recv_data_segment_length
            parameters.initiator_recv_data_segment_length = most
            self._limit_data(most)
        return answer

    # -- SCSI commands ----------------------------------------------------------------------------

    def _scsi_command(self, message: memoryview, at: int) -> None:
        fields: bhs.ScsiCommandFields = bhs.unpack_scsi_command(message, at)
        first, flags, lengths, lun_field, itt, edtl, cmd_sn, _, cdb = fields
        if not self.session.attached:
            self._reject(message, at, pdu.REJECT_PROTOCOL_ERROR, True)
            return
        window = self._window
        if (itt in self._tasks or itt == bhs.NO_TAG) and (
            window.is_next(first, cmd_sn) or window.may_wait(cmd_sn)
        ):
            taken = itt != bhs.NO_TAG  # which is reserved (11.2.1.8)
            reason = pdu.REJECT_TASK_IN_PROGRESS if taken else pdu.REJECT_INVALID_FIELD
            self._reject(message, at, reason, True)
            return
        in_order = window.accept(first, cmd_sn)
        if not in_order and not window.may_wait(cmd_sn):
            self._ignore(cmd_sn)
            return
        if not self._free:
            self._more_slots()
        slot = self._free.pop()
        slot.itt = itt
        slot.edtl = edtl
        slot.flags = flags
        slot.immediate = first & bhs.IMMEDIATE
        slot.lun = luns.decode(lun_field)
        self._dm.map_task(slot)
        if lengths >> 24:
            cdb += bhs.extended_cdb_untrusted(message, at)
            if flags & bhs.FLAGS_BIDIRECTIONAL == bhs.FLAGS_BIDIRECTIONAL:
                slot.read_length = bhs.bidirectional_read_length_untrusted(message, at)
        self._tasks[itt] = slot
        immediate = lengths & 0xFFFFFF
        if immediate and not self.parameters.immediate_data:  # type: ignore[union-attr]
            raise RemoteProtocolError("iSCSI", f"{immediate} bytes of immediate data")
        slot.immediate_data = immediate
        more = flags & (bhs.FLAG_WRITE | bhs.FLAG_FINAL) == bhs.FLAG_WRITE
        if in_order:
            self._deliver(slot, cdb)
        else:
            slot.task = ScsiTask(cdb)  # a stand-in, until its turn comes
            slot.state = WAITING
            slot.more = more
            self.session.wait(cmd_sn, self, slot, partial(self._turn_comes, slot, first, cmd_sn))
        if immediate:
            # A copy: the receive buffer is valid only until the next ``progress``.
            self._take_unsolicited(slot, bhs.data_segment_untrusted(message, at), not more)
        if not in_order:
            return
        if more and not self.parameters.initial_r2t:  # type: ignore[union-attr]
            slot.state = UNSOLICITED  # more data is on its way
        else:
            self._begin(slot)

    def _ignore(self, cmd_sn: int) -> None:
        """Log that, as it may explain why an initiator waits; rarely, where it goes on."""
        self._ignored += 1
        if not self._ignored & (self._ignored - 1):
            words = f" ({self._ignored} so far)" if self._ignored > 1 else ""
            log.warning("%s: command with CmdSN %d ignored%s", self._portal, cmd_sn, words)

    def _deliver(self, slot: TargetTask, cdb: bytes) -> None:
        """Make the task known to SCSI: all commands before it are."""
        flags, edtl = slot.flags, slot.edtl
        task = slot.task = self._device.begin(self.session.nexus, slot.lun, cdb)
        if task.direction != DATA_IN:
            if not flags & bhs.FLAG_WRITE or task.direction == BIDIRECTIONAL:
                _check_direction(slot)
            sends = edtl if flags & bhs.FLAG_WRITE else 0
            if sends != task.length:
                slot.overflow = max(task.length - sends, 0)
                self._device.fit(task, sends)
        if (flags & _NOT_SIMPLE or self._task_sets.active) and not task.status:
            self._enter_task_set(slot)

    def _turn_comes(self, slot: TargetTask, first: int, cmd_sn: int) -> None:
        """Deliver a command that came before its turn, with the unsolicited data that has come."""
        self._window.accept(first, cmd_sn)
        slot.state = IDLE
        refused = slot.task.status
        self._deliver(slot, slot.task.cdb)
        task, buffer = slot.task, slot.buffer
        if refused and not task.status:
            _refuse_for_now(task)
        if buffer is not None:
            if not task.direction & DATA_OUT or task.status or not task.length:
                self._pool.give(buffer)
                slot.buffer = None
                slot.filled = 0
            elif len(buffer) > task.length:
                slot.buffer = buffer[: task.length]
                slot.filled = min(slot.filled, task.length)
        if slot.more and not self.parameters.initial_r2t:  # type: ignore[union-attr]
            slot.state = UNSOLICITED
        else:
            self._begin(slot)

    def _enter_task_set(self, slot: TargetTask) -> None:
        """Let the task wait for older tasks of its LUN, as its attribute asks for."""
        task = slot.task
        attribute = slot.flags & bhs.ATTR_MASK
        if attribute == ACA:
            # There is no ACA condition, as no command may ask for one (NACA).
            _refuse(task, sense.INVALID_MESSAGE_ERROR)
        elif task.cdb[0] not in NEVER_DORMANT and not self._task_sets.enter(
            slot.lun, slot, attribute, partial(self.session.enabled, slot)
        ):
            slot.turn = WAITS

    def enabled(self, slot: TargetTask) -> None:
        """Implements Allegiance."""
        slot.turn = HAS_COME
        if slot.state != DORMANT:
            return  # its unsolicited data is on its way
        if self.done:
            slot.state = SUSPENDED  # until it is reassigned
            return
        try:
            self._begin(slot)
        except TransportError as error:
            log.info("a connection ended: %s", error)
            self.abandon()
        self.flush_quietly()

    def _begin_anew(self, slot: TargetTask) -> None:
        """Begin a task that was dormant. What it depends on (unit attentions, reservations, the
        data of its answer) may have changed: the tasks that it waited for have ended since."""
        old = slot.task
        task = slot.task = self._device.begin(self.session.nexus, slot.lun, old.cdb)
        if not task.status and task.direction != DATA_IN and task.length != old.length:
            self._device.fit(task, old.length)

    def _data_out(self, message: memoryview, at: int) -> None:
        """Take unsolicited data that comes after its command (RFC 7143 section 11.7)."""
        data_out = pdu.DataOut.unpack_from(message, at)
        slot = self._tasks.get(data_out.itt)
        if slot is not None and slot.connection is not self:
            slot = None  # the tag of an aborted task is in use again, on another connection
        if slot is not None and self._recovers and data_out.ttt == bhs.NO_TAG:
            if slot.state != UNSOLICITED and not (slot.state == WAITING and slot.more):
                return  # it was given up, and is fetched by R2Ts
            if data_out.data_sn != slot.data_sn or data_out.buffer_offset != slot.arrived:
                self._miss_data_out(slot, data_out)
                return
        if data_out.ttt != bhs.NO_TAG or (
            slot is not None
            and slot.state != UNSOLICITED
            and not (slot.state == WAITING and slot.more)
        ):
            raise RemoteProtocolError("iSCSI", "a Data-Out that the target did not ask for")
        if slot is None:
            return  # of an aborted task
        slot.check_data_out(data_out)
        slot.data_sn += 1
        slot.age = 0
        last = data_out.flags & bhs.FLAG_FINAL != 0
        self._take_unsolicited(slot, bhs.data_segment_untrusted(message, at), last)
        if last:
            slot.more = False
            if slot.state != WAITING:
                self._begin(slot)

    def _miss_data_out(self, slot: TargetTask, data_out: pdu.DataOut) -> None:
        """Unsolicited data is missing, or lies behind what is missing: R2Ts fetch it."""
        if data_out.flags & bhs.FLAG_FINAL:
            slot.more = False
            if slot.state != WAITING:
                self._begin(slot)

    def _take_unsolicited(self, slot: TargetTask, data: memoryview, last: bool) -> None:
        """``last``: none of it comes behind this; ``_begin`` is to follow."""
        assert self.parameters is not None
        most = min(self.parameters.first_burst_length, slot.edtl)
        at = slot.arrived
        slot.arrived = at + len(data)
        if slot.arrived > most:
            raise RemoteProtocolError(
                "iSCSI", f"{slot.arrived} bytes of unsolicited data, of {most} at most"
            )
        task = slot.task
        length = task.length
        if task.status:
            return  # the data is not needed: the command has failed
        if slot.state == WAITING:
            length = most  # what the command takes is not known yet
        elif not task.direction & DATA_OUT:
            return
        if slot.buffer is None:
            # Only for the unsolicited data, unless the task can have a buffer of its whole length
            # now: for that it may have to wait, and the data would be copied once more.
            if length > most and not (last and self._has_turn(slot)):
                length = most
            if not self.session.may_take(length):
                _refuse_for_now(task)  # nothing can have its data wait
                return
            slot.buffer = self._pool.take(max(length, 1))
        data = data[: max(0, len(slot.buffer) - at)]  # EDTL may promise more than the CDB takes
        if data:
            slot.buffer[at : at + len(data)] = data
            slot.filled = at + len(data)

    def _begin(self, slot: TargetTask) -> None:
        """Start the task, or defer it: all of its unsolicited data has arrived."""
        task = slot.task
        if slot.turn and not task.status:
            if slot.turn == WAITS:
                slot.state = DORMANT
                return
            self._begin_anew(slot)
            slot.turn = AT_ONCE
            task = slot.task
        if task.status:
            self.respond(slot)
            return
        if self._has_turn(slot):
            self.start(slot)
        else:
            self.session.defer(slot, slot.flags & bhs.ATTR_MASK == HEAD_OF_QUEUE)

    def _has_turn(self, slot: TargetTask) -> bool:
        """Whether ``_begin`` starts the task now, and does not defer it."""
        session = self.session
        return (
            slot.turn == AT_ONCE
            and not session.held
            and not self._deferred
            and session.has_room(slot)
        )

    def wake(self) -> None:
        """Implements Allegiance. Tasks of other connections call this."""
        if self.done:
            return
        try:
            self.flush()
        except TransportError as error:
            log.info("a connection ended: %s", error)
            self.abandon()
        self.driver.output_waits()

    def start(self, slot: TargetTask) -> None:
        """Implements Allegiance."""
        task = slot.task
        if task.length and (slot.buffer is None or len(slot.buffer) < task.length):
            slot.buffer = self._pool.grow(slot.buffer, slot.filled, task.length)
        if task.direction & DATA_OUT and slot.filled < task.length:
            self._fetch(slot)
        else:
            self._execute(slot)

    def _fetch(self, slot: TargetTask) -> None:
        """Fetch with R2Ts the data that did not come unsolicited. Existing initiators advertise the
        first byte that they did not send; that is TaggedBufferForSolicitedDataOnly=Yes of RFC
        7145. No: an STag begins with the first byte of all."""
        assert slot.buffer is not None and self.parameters is not None
        at = slot.filled
        if slot.state != FETCHING:
            slot.state = FETCHING
            # Traditional iSCSI has no tagged buffers: offsets count from byte 0 of Data-Out.
            whole = (
                not self.parameters.rdma_extensions
                or self.parameters.tagged_buffer_for_solicited_data_only is False
            )
            # For a task that is reassigned, also what was to come unsolicited is solicited, and
            # advertised: all but the immediate data (RFC 7145 section 10.2.2).
            first = slot.immediate_data if slot.reassigned else at
            slot.advertised_from = 0 if whole else first
        # One R2T at a time asks for one burst at most (RFC 7143 section 13.13).
        slot.fetching = min(slot.task.length - at, self.parameters.max_burst_length)
        self._dm.get_data(slot, slot.buffer[at : at + slot.fetching], at - slot.advertised_from)

    def _execute(self, slot: TargetTask) -> None:
        task = slot.task
        if task.status:
            self.respond(slot)
        elif task.may_block or not self._device.run(task, slot.buffer, True):
            # A thread waits for the disk; the owner then calls ``finish``.
            slot.state = RUNNING
            self.session.running += 1
            self._owner.offload(slot)
        else:
            self.respond(slot)

    def finish(self, slot: TargetTask) -> None:
        """Answer an offloaded task: its ``run`` has ended."""
        self.session.finished(slot)

    def respond(self, slot: TargetTask) -> None:
        """Implements Allegiance."""
        task = slot.task
        edtl = slot.edtl
        if slot.flags & bhs.FLAGS_BIDIRECTIONAL == bhs.FLAGS_BIDIRECTIONAL:
            self._put_bidirectional(slot)
            moved = task.length if task.direction & DATA_OUT and not task.status else 0
            self._end(slot, moved)
            return
        moved = task.transferred if task.direction == DATA_IN or task.status else task.length
        if slot.acknowledged:
            pass  # its data is there, and not here any more
        elif task.direction == DATA_IN and moved and edtl:
            if slot.flags & bhs.FLAG_READ:
                assert slot.buffer is not None
                data = slot.buffer if moved == len(slot.buffer) else slot.buffer[:moved]
                self._put(slot, data if moved <= edtl else data[:edtl])
            else:
                moved = 0  # the PDU has not asked for data: the residual count tells that none came
        self._end(slot, moved)

    def _put(self, slot: TargetTask, data: memoryview) -> None:
        """Send the Data-In of a task, or what of it has not been acknowledged."""
        if not self._keeps:
            self._dm.put_data(slot, data, 0)
            return
        offset = slot.resume_at
        if offset >= len(data):
            return
        if self._dm.acknowledges and len(data) >= ACKNOWLEDGED:
            # Its memory need not be kept until the status is acknowledged.
            self._dm.put_data(slot, data[offset:], offset, False, True)
        else:
            self._dm.put_data(slot, data[offset:], offset)

    def _put_bidirectional(self, slot: TargetTask) -> None:
        """Send the Data-In of a command with both R and W: EDTL is about its Data-Out only."""
        task = slot.task
        given = min(task.transferred, slot.read_length)
        if given and task.direction & DATA_IN and not slot.acknowledged:
            assert slot.buffer is not None
            self._put(slot, slot.buffer[:given])

    def _end(self, slot: TargetTask, moved: int) -> None:
        """Send the SCSI Response. ``moved``: see ``pack_response``."""
        self._window.ended(slot.immediate)
        if self._keeps:
            self._keep(slot)
        pack_response(slot, moved, self._numbers)
        del self._tasks[slot.itt]
        slot.state = ENDED
        self._dm.send_control(slot, True)
        if self._task_sets.active:
            self._task_sets.leave(slot.lun, slot)
        if slot.task.status:
            slot.task.was_answered()

    def _keep(self, slot: TargetTask) -> None:
        """Keep a task that is being answered until the initiator acknowledges its status: it may be
        reassigned. Data that was written is not needed again."""
        slot.kept = True
        slot.stat_sn = self._numbers.stat_sn
        self._kept.append(slot)
        self.session.answered[slot.itt] = slot
        if slot.buffer is not None and not slot.task.direction & DATA_IN:
            self._pool.give(slot.buffer)
            slot.buffer = None

    # -- task management --------------------------------------------------------------------------

    def _task_management(self, request: pdu.TaskManagementRequest) -> None:
        window = self._window
        if not window.accept(request.opcode, request.cmd_sn):
            return
        if request.function == pdu.TMF_TASK_REASSIGN:
            self._task_reassign(request)
        elif (
            request.function in _OF_A_LUN
            and (len(self.session.connections) > 1 or self.session.parameters.error_recovery_level)
            and serial_lt(window.exp_cmd_sn, request.cmd_sn)
        ):
            # It is about all commands before it: some of them are still to come (4.2.3.3).
            if not self.session.fence(request.cmd_sn, self, partial(self._manage, request)):
                self._answers.task_management(request, pdu.TMF_REJECTED)
        else:
            self._manage(request)

    def _manage(self, request: pdu.TaskManagementRequest) -> None:
        """Carry out a task management function. All tasks of the session are meant, whatever
        connection they are allegiant to."""
        session = self.session
        lun = luns.decode(request.lun)
        if self._unanswered >= UNANSWERED:
            self._answers.task_management(request, pdu.TMF_REJECTED)
        elif request.function == pdu.TMF_ABORT_TASK:
            slot = self._tasks.get(request.referenced_task_tag)
            answered = None if slot is not None else self._lost_answer(request.referenced_task_tag)
            if answered is not None:
                self._abort_answered(answered, request)
            elif slot is not None and slot.state == WAITING:
                session.discard(slot)
                self._answers.task_management(request, pdu.TMF_COMPLETE)
            elif slot is None and not self._window.give_up(request.ref_cmd_sn, request.cmd_sn):
                self._answers.task_management(request, pdu.TMF_TASK_DOES_NOT_EXIST)
            else:
                self._abort([slot] if slot else [], request)
        elif (
            request.function == pdu.TMF_TARGET_COLD_RESET
            and session.attached
            and self._device.hides_luns(session.nexus)
        ):
            # It would end sessions that use what this initiator has no access to.
            self._answers.task_management(request, pdu.TMF_NOT_AUTHORIZED)
        elif request.function in _OF_THE_TARGET and session.attached:
            everything = self._device.luns(session.nexus)
            for each in everything:
                self._device.reset_lun(each)
            self._abort(session.tasks_on(*everything), request, everything)
        elif request.function not in _OF_A_LUN or not session.attached:
            self._answers.task_management(request, pdu.TMF_NOT_SUPPORTED)
        elif not self._device.has_lun(session.nexus, lun):
            self._answers.task_management(request, pdu.TMF_LUN_DOES_NOT_EXIST)
        else:
            if request.function == pdu.TMF_LOGICAL_UNIT_RESET:
                self._device.reset_lun(lun)
            others = (lun,) if request.function in _OF_ALL_SESSIONS else ()
            self._abort(session.tasks_on(lun), request, others)

    def _lost_answer(self, itt: int) -> TargetTask | None:
        """The task with this tag, if it was answered on a connection that has been logged out for
        recovery since, and the initiator has not acknowledged the answer. Of a connection that
        works it does not exist any more: what was sent there comes, or is asked for by SNACK."""
        slot = self.session.answered.get(itt)
        return slot if slot is not None and slot.connection.recovered else None

    def _abort_answered(self, slot: TargetTask, request: pdu.TaskManagementRequest) -> None:
        """Carry out an ABORT TASK of a ``_lost_answer``: the task becomes allegiant to this
        connection, its status is sent again, and then the response (RFC 7143 section 11.5.1). Over
        iSER an ABORT TASK advertises no buffer: a read whose data may not have come ends without a
        status, as it would not be true."""
        session = self.session
        old = slot.connection
        if old in session.connections:  # as in ``_reassign``
            self._unanswered += 1
            old.on_closed.append(partial(self._later, partial(self._abort_answered_later, request)))
            return
        assert self.parameters is not None
        reads = slot.task.direction & DATA_IN and slot.task.transferred and not slot.acknowledged
        if reads and self.parameters.rdma_extensions:
            session.acknowledged(slot)
            if slot.buffer is not None:
                self._pool.give(slot.buffer)
                slot.buffer = None
            session.let_go(old)
        elif not self._free and len(self._slots) >= TASK_SLOTS:
            self._answers.task_management(request, pdu.TMF_REJECTED)
            return
        else:
            if not self._free:
                self._more_slots()
            self._take_over(slot, self._free.pop(), 0)
        self._answers.task_management(request, pdu.TMF_COMPLETE)

    def _abort_answered_later(self, request: pdu.TaskManagementRequest) -> None:
        self._unanswered -= 1
        self._manage(request)

    def _abort(
        self,
        slots: list[TargetTask],
        request: pdu.TaskManagementRequest,
        luns_of_others: Sequence[int] = (),
    ) -> None:
        """End tasks without a response, then answer the task management function. The answer waits
        until the last task has ended: after it, none touches the initiator's buffers or the medium.
        A function other than ABORT TASK also waits for data that R2Ts have asked for, over TCP,
        too: the initiator goes on answering R2Ts (RFC 7143 section 4.2.3.3)."""
        left = 1 + len(slots)
        flush_after = False
        self._unanswered += 1

        def answer() -> None:
            self._unanswered -= 1
            if self.done:
                return
            self._answers.task_management(request, pdu.TMF_COMPLETE)
            if request.function == pdu.TMF_TARGET_COLD_RESET:
                self._end_all_sessions()
            elif flush_after:
                self.flush_quietly()

        def one_ended(flush: bool = False) -> None:
            nonlocal left, flush_after
            left -= 1
            flush_after |= flush
            if not left and not self.done:
                if request.function == pdu.TMF_ABORT_TASK or len(self.session.connections) == 1:
                    answer()
                else:
                    flush_after = True
                    self._fence_response(answer)

        for lun in luns_of_others:
            left += self._device.end_tasks_of_others(
                lun, self.session.nexus, partial(one_ended, True)
            )
        # Except after ABORT TASK, the initiator still sends the data of R2Ts (RFC 7143, 4.2.3.3).
        self.session.end_each(slots, one_ended, cancel=request.function == pdu.TMF_ABORT_TASK)
        one_ended()

    def _fence_response(self, answer: Callable[[], None]) -> None:
        """Call ``answer`` when the initiator has acknowledged all responses on the other
        connections of the session: those of the tasks that it is about come before it (RFC 7143
        section 4.2.2.3.2)."""
        others = [each for each in self.session.connections if each is not self]
        left = 1 + len(others)

        def one_acknowledged() -> None:
            nonlocal left
            left -= 1
            if not left:
                answer()

        for each in others:
            each.await_acknowledgement(one_acknowledged)
        one_acknowledged()

    def _end_all_sessions(self) -> None:
        """Finish a TARGET COLD RESET, which is a power-on event (RFC 7143 section 11.5.1): its
        response still leaves, then this session has ended as well."""
        self._owner.end_other_sessions()
        self._end_session()

    def _end_session(self) -> None:
        """The session has ended. What is queued on this connection still leaves."""
        self.done = True
        self.session.abandon(self)
        self.flush_quietly()
        for each in self.session.connections:
            each.notify_ended()

    # -- the end of connections -------------------------------------------------------------------

    def _log_out(self, request: pdu.LogoutRequest) -> None:
        """End, or set aside, all that the logout is about, then answer it (RFC 7143 section 11.14).
        When it has the answer, the initiator may let another connection or session write."""
        session = self.session
        if not self._window.accept(request.opcode, request.cmd_sn):
            return  # as every PDU with a number outside of the window (4.2.2.1)
        recovery = request.reason == pdu.LOGOUT_FOR_RECOVERY
        if recovery and session.parameters.error_recovery_level != RECOVERY:
            self._answers.logout(request, RECOVERY_NOT_SUPPORTED)  # the session goes on
        elif request.reason == pdu.LOGOUT_CLOSE_SESSION:
            for each in [*session.lost, *session.connections]:
                if each is not self:
                    session.log_out(each, False)
            self._leave(request, True)
        elif request.reason > pdu.LOGOUT_FOR_RECOVERY:
            self._answers.logout(request, CLEANUP_FAILED)
        elif request.cid != self.cid:
            other = session.find(request.cid)
            if other is None:
                self._answers.logout(request, CID_NOT_FOUND)
            else:
                session.log_out(other, recovery)
                self._answer_when_closed(request, other)
        elif recovery:
            self._set_aside(request)
        else:
            self._leave(request, False)

    def _leave(self, request: pdu.LogoutRequest, whole_session: bool) -> None:
        """Log this connection out, or the session, whose other connections are being closed."""
        session = self.session
        self._leaving = True
        # Others of them, which wait for data, end when their connection is closed.
        running = [
            slot
            for slot in self._tasks.values()
            if slot.connection is not self and slot.state == RUNNING
        ]
        session.discard_waiting(self)
        mine = session.tasks_allegiant_to(self)
        left = 1 + len(mine)

        def one_ended() -> None:
            nonlocal left
            left -= 1
            if left or self.done:
                return
            self._answers.logout(request, CLOSED)
            if whole_session or not session.has_others(self):
                self._end_session()
            else:
                self.done = True
                self.flush_quietly()
                self.notify_ended()

        if whole_session:
            for slot in running:
                left += 1
                slot.on_ended.append(one_ended)
            for each in session.connections:
                if each is not self:
                    left += 1
                    each.on_closed.append(one_ended)
        luns_of_mine = {slot.lun for slot in mine}
        session.end_each(mine, one_ended, cancel=True)
        if session.attached and mine:
            self._device.tasks_cleared(session.nexus, luns_of_mine)
        one_ended()

    def _set_aside(self, request: pdu.LogoutRequest) -> None:
        """Log this connection out for recovery: its tasks wait for a new allegiance."""
        session = self.session
        self._leaving = True
        self._answers.logout(
            request, CLOSED, session.parameters.default_time2wait, session.time2retain
        )
        self.done = True
        session.set_aside(self)
        self.flush_quietly()
        self.notify_ended()

    def _answer_when_closed(self, request: pdu.LogoutRequest, other: Allegiance) -> None:
        """Answer the logout of another connection, when nothing of that touches the initiator's
        buffers any more, and no thread carries out a task that has ended with it."""
        session = self.session
        ending = [
            slot
            for slot in session.tasks_allegiant_to(other)
            if slot.aborted and slot.state == RUNNING  # else it ends when ``other`` is closed
        ]
        left = 1 + len(ending)

        def one_ended() -> None:
            nonlocal left
            left -= 1
            if left or self.done:
                return
            self._answers.logout(
                request, CLOSED, session.parameters.default_time2wait, session.time2retain
            )
            self.flush_quietly()

        for slot in ending:
            slot.on_ended.append(one_ended)
        if other in session.connections:
            left += 1
            other.on_closed.append(one_ended)
        one_ended()

    # -- a new allegiance -------------------------------------------------------------------------

    def _task_reassign(self, request: pdu.TaskManagementRequest) -> None:
        """Take the buffers that the request advertises, then carry it out. It has to be immediate
        (RFC 7143 section 11.5.1): of one that has waited for its turn it is not known any more what
        it advertised."""
        if not request.opcode & bhs.IMMEDIATE:
            self._answers.task_management(request, pdu.TMF_REJECTED)
            return
        if not self._free:
            self._more_slots()
        fresh = self._free.pop()
        self._dm.map_task(fresh)
        self._reassign(request, fresh)

    def _reassign(self, request: pdu.TaskManagementRequest, fresh: TargetTask) -> None:
        """Make a task allegiant to this connection, and go on with it (RFC 7143 section 7.2.2).
        ``fresh``: a slot with the buffers that the initiator advertises."""
        session = self.session
        slot = session.reassignable(request.referenced_task_tag)
        response = pdu.TMF_COMPLETE
        if not self._keeps:
            response = pdu.TMF_REASSIGN_NOT_SUPPORTED
        elif slot is None:
            response = pdu.TMF_TASK_DOES_NOT_EXIST
        elif not slot.connection.recovered:
            response = pdu.TMF_STILL_ALLEGIANT
        elif slot.connection in session.connections:
            # It is logged out, but its buffers may be in use until it is closed.
            reassign = partial(self._reassign, request, fresh)
            slot.connection.on_closed.append(partial(self._later, reassign))
            return
        self._answers.task_management(request, response)
        if slot is None or response:
            self.recycle(fresh)
            return
        self._take_over(slot, fresh, request.exp_data_sn)

    def _take_over(self, slot: TargetTask, fresh: TargetTask, exp_data_sn: int) -> None:
        """Make a task of a connection that is closed one of this connection, with the memory of
        ``fresh``, and go on with it, or answer it again."""
        session = self.session
        old = slot.connection
        answered = session.answer_again(slot)
        both = slot.flags & bhs.FLAGS_BIDIRECTIONAL == bhs.FLAGS_BIDIRECTIONAL
        sent = 0
        if answered and slot.task.direction & DATA_IN and not slot.acknowledged:
            sent = min(slot.task.transferred, slot.read_length if both else slot.edtl)
        slot.resume_at = self._dm.reassign_task(
            slot,
            fresh,
            Resumption(
                luns.encode(slot.lun) if slot.lun >= 0 else bytes(8),
                slot.itt,
                both,
                exp_data_sn,
                sent,
                slot.resume_at,
            ),
        )
        slot.adopt(fresh, self)
        self._slots[self._slots.index(fresh)] = slot
        session.let_go(old)
        if slot.state == SUSPENDED:
            self._begin(slot)
        elif answered or slot.state == COMPLETED:
            if answered:
                slot.immediate = bhs.IMMEDIATE  # its CmdSN has moved the window already
            self.respond(slot)

    def _later(self, run: Callable[[], None]) -> None:
        """The old connection of a task is closed."""
        if self.done:
            return
        try:
            run()
        except TransportError as error:
            log.info("a connection ended: %s", error)
            self.abandon()
        self.flush_quietly()

    def notify_ended(self) -> None:
        """Implements Allegiance."""
        self.driver.ended()

    def notify_recovery(self) -> None:
        """Implements Allegiance."""
        self._owner.recovery_begins()

    def notify_released(self) -> None:
        """Implements Allegiance."""
        self._owner.released()

    def cancel_data(self, slot: TargetTask) -> bool:
        """Implements Allegiance."""
        return self._dm.cancel_data(slot)

    def drop(self, slot: TargetTask) -> None:
        """Implements Allegiance."""
        self._tasks.pop(slot.itt, None)
        self._task_sets.leave(slot.lun, slot)
        self._window.ended(slot.immediate)
        callbacks, slot.on_aborted = slot.on_aborted, []
        self.recycle(slot)
        for callback in callbacks:
            callback()

    def flush_quietly(self) -> None:
        """Send what is queued, outside of ``progress``. An error is only logged: the next
        ``progress`` finds that the connection has ended."""
        try:
            self._dm.flush()
        except TransportError as error:
            log.debug("a connection ended: %s", error)
        self.driver.output_waits()

    @property
    def answered(self) -> int:
        """The present StatSN: it grows by 1 with each response, modulo 2^32."""
        return self._numbers.stat_sn

    @property
    def greeted(self) -> bool:
        """False while the Hello of the initiator is awaited."""
        return self._dm.greeted

    def describe(self) -> dict[str, object]:
        return self._dm.describe()

    def fileno(self) -> int:
        return self._dm.fileno()

    def wants_write(self) -> bool:
        """Whether to call ``progress`` when the descriptor takes more bytes. True also while
        commands wait for buffers that output already sent has to give back, as perhaps no other
        event comes."""
        if self._deferred and self._dm.next_deadline() is not None:
            return True
        return self._dm.wants_write()


def _set_aside_memory() -> mmap:
    """Raises OSError when the system has not that much."""
    return mmap(-1, RESERVE, MAP_PRIVATE | MAP_ANONYMOUS)


def _check_direction(slot: TargetTask) -> None:
    """Refuse a command that writes, and whose PDU expects data to go the other way: none can come,
    and GOOD would say that it was written. A bidirectional CDB needs the R bit: its Data-In could
    not be sent, and no residual count could tell that; its Data-Out is for ``fit``. (What only
    reads ends with GOOD, and EDTL as its residual count, as libiscsi's tests want it.)"""
    task, flags = slot.task, slot.flags
    if task.direction == BIDIRECTIONAL:
        lacks = not flags & bhs.FLAG_READ
    else:
        lacks = slot.edtl > 0 and task.direction == DATA_OUT and not flags & bhs.FLAG_WRITE
    if lacks:
        _refuse(task, sense.INVALID_FIELD_IN_COMMAND_IU)


def _refuse_for_now(task: ScsiTask) -> None:
    """End a task that has not begun with TASK SET FULL: hosts repeat it."""
    task.status = sam.TASK_SET_FULL
    task.direction = NO_DATA
    task.length = 0


def _refuse(task: ScsiTask, code: int) -> None:
    """End a task that has not begun with CHECK CONDITION, ILLEGAL REQUEST; ``code``: ASC, ASCQ."""
    task.status = sam.CHECK_CONDITION
    task.sense = sense.encode_fixed(sense.ILLEGAL_REQUEST, code >> 8, code & 0xFF)
    task.direction = NO_DATA
    task.length = 0
