"""The iSCSI layer of the target, for one connection of a session. No trio, no socket.

Login comes first (``ConnectionLogin``), then full feature phase: ``Commands`` for SCSI Commands,
``Requests`` for all else, each with what belongs to it. This module passes on to them what the
datamover notifies, and what the session and the owner ask for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from iserblk.datamover.seam import PduSlot, TargetDatamover
from iserblk.errors import TransportError
from iserblk.iscsi import bhs, pdu
from iserblk.iscsi.keys import SessionParameters
from iserblk.iscsi.login_target import Joinable, LoginTarget
from iserblk.target.iscsi.buffers import DataBudget
from iserblk.target.iscsi.control import CONTROL_INLINE, AnswerLimit, ControlAnswers
from iserblk.target.iscsi.login import LOGIN_SLOTS, ConnectionLogin
from iserblk.target.iscsi.logout import Logouts
from iserblk.target.iscsi.losses import Losses
from iserblk.target.iscsi.numbers import Numbers
from iserblk.target.iscsi.owing import Debts
from iserblk.target.iscsi.owners import ConnectionDriver, ConnectionOwner, Undriven
from iserblk.target.iscsi.requests import Requests
from iserblk.target.iscsi.session import TargetSession
from iserblk.target.iscsi.tasks.acknowledgements import Acknowledgements
from iserblk.target.iscsi.tasks.commands import Commands
from iserblk.target.iscsi.tasks.management import TaskManagement
from iserblk.target.iscsi.tasks.reassigning import Reassignments
from iserblk.target.iscsi.tasks.slot import DORMANT, ENDED, HAS_COME, SUSPENDED, TargetTask
from iserblk.target.iscsi.tasks.slots import TaskSlots
from iserblk.target.ports import ONLY_PORT, TargetPort
from iserblk.target.seam import DeviceServer

log = logging.getLogger(__name__)


class TargetConnection:
    """One connection of ``session``. Implements TargetUser and Allegiance.

    ``done``: the connection has ended, by a logout or otherwise; the owner then calls ``close``,
    and where ``kept``, some time later ``TargetSession.expire``. ``cut``: what is still queued will
    never leave. ``driver``: set by what drives the connection. ``slots``: for its tasks.
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
        self._owner = owner
        self.driver: ConnectionDriver = Undriven()
        self.on_closed: list[Callable[[], None]] = []
        self.cid = 0
        self.recovered = False
        self.cut = False
        self.done = False
        self.leaving = False
        self._closed = False
        # Bits of the owner, which clears all of them when the initiator is heard.
        self.silent = 0
        self._portal, self._port = portal, port
        self._budget = budget or DataBudget()
        # Login may replace the session by another one, which the connection joins.
        self.session = session = TargetSession(device, self._budget, address)
        session.connections.append(self)
        self._beside = 0  # bytes that the pool of the session has been told of
        self._numbers = Numbers(session.window)
        self._limit = AnswerLimit(login)
        slots = [TargetTask(index, True) for index in range(LOGIN_SLOTS)]
        self._answers = ControlAnswers(
            datamover, self._numbers, slots, self._limit.declare, self._hold
        )
        self._unexpected = self._answers.unexpected  # one look-up, for each PDU
        self.slots = TaskSlots(self, datamover, session.pool, self._answers, at_once)
        self._acknowledgements = Acknowledgements(self._numbers, self.slots)
        self._login = ConnectionLogin(login, owner, datamover, self.slots, self._answers)
        # In full feature phase.
        self._commands: Commands | None = None
        self._requests: Requests | None = None
        self._debts: Debts | None = None
        self._losses: Losses | None = None  # over TCP, at ErrorRecoveryLevel 1 or 2
        datamover.user = self
        datamover.on_unfinished = self._unfinished
        datamover.notice_numbers(self._numbers)
        datamover.allocate_connection_resources(slots, CONTROL_INLINE, LOGIN_SLOTS)

    @property
    def login(self) -> LoginTarget:
        return self._login.target

    @property
    def parameters(self) -> SessionParameters | None:
        """What login has agreed on; None before the end of login."""
        return None if self._commands is None else self._commands.parameters

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
        deferred = self.session.deferred
        while True:
            before = -1
            while len(deferred) != before:
                before = len(deferred)
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
        losses = self._losses
        if losses is None or self.done:
            return
        losses.ask_again()
        self._count_beside()
        losses.show()
        self.flush()
        self.driver.output_waits()

    def overdue(self, now: float) -> str:
        """Call it about twice a minute. What the initiator has owed for too long, for the log: then
        the connection is to be given up, also if the initiator answers pings, as tasks of others
        wait for it, or for the memory that it holds. "": nothing. ``now``: seconds of any clock."""
        return "" if self._debts is None else self._debts.overdue(now)

    def trim(self) -> None:
        """Call it about twice a minute: if the session is idle, give back memory that only a busy
        one needs."""
        self._count_beside()
        self.slots.trim(self.session.window.exp_cmd_sn)

    def _count_beside(self) -> None:
        """Tell the budget what this connection holds beside data buffers."""
        held = 0 if self._closed else self._dm.kept_bytes + self._answers.held
        self.session.pool.account(held - self._beside)
        self._beside = held

    def _hold(self, length: int) -> bool:
        """Have so many bytes more count that are held beside data buffers. False: there is no
        memory."""
        pool = self.session.pool
        if not pool.may_hold(length):
            return False
        pool.account(length)
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
        return self._losses is not None

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
        if not self.session.attached or self.done or self.leaving or not self._dm.greeted:
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
            self.stop()
            self.session.lose(self)

    def stop(self) -> None:
        """Implements Allegiance."""
        self.done = True
        self.slots.in_use = not self._closed

    def disconnect(self) -> None:
        """Implements Allegiance."""
        self.cut = True
        self.stop()
        self._dm.disconnect()

    def close(self) -> None:
        """Let go of the descriptor and of all memory that the connection uses. A thread may be
        running a task of it."""
        if not self.done:
            self.abandon()
        self._dm.connection_terminate()
        self._budget.keepers.pop(self._forget_kept, None)
        self.slots.give_up_reserve()
        self._closed = True
        self.slots.in_use = False
        self._count_beside()
        self.session.leave(self)
        self._acknowledgements.end()

    @property
    def kept(self) -> bool:
        """The connection is closed, but its session keeps tasks of it, or itself."""
        return self in self.session.lost

    @property
    def kept_data(self) -> int:
        """Bytes of data of the tasks that are allegiant to this connection."""
        return self.slots.kept_data

    # -- notifications ----------------------------------------------------------------------------

    def control_notify(self, message: memoryview, at: int, invalidated: int) -> None:
        if self.done or self.leaving:
            # The PDU came before the session ended, perhaps because a new session took its name:
            # an old write must not land now.
            return
        opcode = message[at] & bhs.OPCODE_MASK
        if self._acknowledgements.notes and self._acknowledgements.note(message, at):
            self.ask_for_acknowledgement()
        if self._unexpected.outstanding:
            self._answers.heard(message, at)
        commands = self._commands
        if commands is None:
            self._proceed(self._login.take(message, at, opcode, self._resume_login))
        elif opcode == bhs.SCSI_COMMAND:
            commands.take(message, at)
        elif opcode == bhs.DATA_OUT and not commands.parameters.initial_r2t:
            commands.data_out(message, at)
        else:
            assert self._requests is not None
            self._requests.take(message, at, opcode)
        if self.session.window.waiting:
            self.session.drain()

    def discarded_notify(self, head: memoryview) -> None:
        commands = self._commands
        if self.done or self.leaving or commands is None:
            return
        commands.discarded(head)

    def data_completion_notify(self, slot: PduSlot, sn: int) -> None:
        assert isinstance(slot, TargetTask) and self._commands is not None
        if self.done:
            return
        self._commands.fetched(slot)

    def data_ack_notify(self, slot: PduSlot, data_sn: int) -> None:
        """As ``sent_notify``: the acknowledgement may come behind the response."""
        assert isinstance(slot, TargetTask)
        slot.acknowledged = True
        self.sent_notify(slot)

    def sent_notify(self, slot: PduSlot) -> None:
        assert isinstance(slot, TargetTask)
        if slot.state == ENDED and not slot.busy:
            if not slot.kept:
                self.slots.recycle(slot)
            elif slot.acknowledged and slot.buffer is not None:
                self.slots.pool.give(slot.buffer)  # only its status may be needed again
                slot.buffer = None

    # -- login ------------------------------------------------------------------------------------

    def _proceed(self, final: tuple[bytes, bytes] | None) -> None:
        """Go on with the login. ``final``: see ``ConnectionLogin.take``."""
        if final is not None:
            self._enter_full_feature_phase(*final)
        elif self._login.target.failed:
            self.stop()

    def _resume_login(self) -> None:
        """The attempt that was held has its turn."""
        attempt = self._login.take_attempt()
        if attempt is None or self.done:
            return
        try:
            self._proceed(self._login.judge(*attempt))
        except TransportError as error:
            log.info("a login failed: %s", error)
            self.abandon()
        self.driver.unfinished()  # ``progress`` sends the answer

    def _enter_full_feature_phase(self, header: bytes, data: bytes) -> None:
        """Apply the result of the login, whose final response is given."""
        login, acknowledgements = self._login.target, self._acknowledgements
        self._numbers.stat_sn = login.stat_sn
        self.cid = login.cid
        self._limit.begin()
        if login.joined is not None:
            self._join(login.joined)
        else:
            acknowledgements.begin(self.session)
            window = self.session.window
            window.first_cmd_sn = window.exp_cmd_sn = login.exp_cmd_sn
            window.max_cmd_sn = login.max_cmd_sn
            if not login.discovery:
                self.session.attach(
                    login.initiator_name,
                    login.isid,
                    self._port,
                    login.user,
                    login.depth,
                    login.parameters,
                )
        if self.session.recovers:
            acknowledgements.keeps = True
            acknowledgements.notes = True
        if login.parameters.rdma_extensions:
            self._answers.unexpected.limit = login.parameters.max_outstanding_unexpected_pdus
        self._dm = self.slots.datamover = self._answers.enable_datamover(header, data)
        recovers = bool(
            login.parameters.error_recovery_level and not login.parameters.rdma_extensions
        )
        if recovers:
            self._budget.keepers[self._forget_kept] = None
        self._begin(recovers)
        self._owner.logged_in()

    def _join(self, joined: Joinable) -> None:
        """Become a connection of a session that there is."""
        assert isinstance(joined, TargetSession)
        self.session.pool.account(-self._beside)
        self._beside = 0
        self.session.leave(self)
        self.session = joined
        self.slots.pool = joined.pool
        self._numbers.window = joined.window
        self._acknowledgements.begin(joined)
        joined.join(self)

    def _begin(self, recovers: bool) -> None:
        """Make what takes PDUs in full feature phase."""
        login = self._login.target
        session, datamover, answers, slots = self.session, self._dm, self._answers, self.slots
        parameters = login.parameters
        commands = Commands(
            self,
            self._owner,
            self._device,
            session,
            datamover,
            slots,
            answers,
            self._numbers,
            self._acknowledgements,
            parameters,
            self._portal,
            recovers,
        )
        reassignments = Reassignments(
            self, session, datamover, slots, answers, self._acknowledgements, commands
        )
        logouts = Logouts(self, self._device, session, answers)
        management = TaskManagement(
            self,
            self._owner,
            self._device,
            session,
            slots,
            answers,
            reassignments,
            logouts,
            parameters,
        )
        self._commands = commands
        self._requests = Requests(
            self,
            self,
            session,
            datamover,
            answers,
            self._limit,
            management,
            logouts,
            login.target_name,
            self._portal,
            self._port,
            recovers,
        )
        self._debts = Debts(self, session, datamover, slots, self._task_sets, recovers)
        if recovers:
            self._losses = Losses(self, session, datamover, commands, answers, self._budget)

    # -- what the session asks for ----------------------------------------------------------------

    def note_acknowledgements(self) -> None:
        """Implements Allegiance."""
        self._acknowledgements.note_from_now_on()

    def ask_for_acknowledgement(self) -> None:
        """Implements Allegiance."""
        if not self.done and self._acknowledgements.outstanding:
            self.ping()

    def await_acknowledgement(self, tell: Callable[[], None]) -> None:
        """Implements Allegiance."""
        if self.done or not self._acknowledgements.wait(tell):
            tell()
            return
        self.ask_for_acknowledgement()

    def enabled(self, slot: TargetTask) -> None:
        """Implements Allegiance."""
        assert self._commands is not None
        slot.turn = HAS_COME
        if slot.state != DORMANT:
            return  # its unsolicited data is on its way
        if self.done:
            slot.state = SUSPENDED  # until it is reassigned
            return
        try:
            self._commands.begin(slot)
        except TransportError as error:
            log.info("a connection ended: %s", error)
            self.abandon()
        self.flush_quietly()

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
        assert self._commands is not None
        self._commands.start(slot)

    def finish(self, slot: TargetTask) -> None:
        """Answer an offloaded task: its ``run`` has ended."""
        self.session.finished(slot)

    def respond(self, slot: TargetTask) -> None:
        """Implements Allegiance."""
        assert self._commands is not None
        self._commands.respond(slot)

    def drop(self, slot: TargetTask) -> None:
        """Implements Allegiance."""
        assert self._commands is not None
        self._commands.drop(slot)

    def recycle(self, slot: TargetTask) -> None:
        """Implements Allegiance."""
        self.slots.recycle(slot)

    def release(self) -> None:
        """Implements Allegiance."""
        if self._closed and self._commands is not None:
            self._commands.release()

    def cancel_data(self, slot: TargetTask) -> bool:
        """Implements Allegiance."""
        return self._dm.cancel_data(slot)

    def flush_quietly(self) -> None:
        """Send what is queued, outside of ``progress``. An error is only logged: the next
        ``progress`` finds that the connection has ended."""
        try:
            self._dm.flush()
        except TransportError as error:
            log.debug("a connection ended: %s", error)
        self.driver.output_waits()

    def notify_ended(self) -> None:
        """Implements Allegiance."""
        self.driver.ended()

    def notify_recovery(self) -> None:
        """Implements Allegiance."""
        self._owner.recovery_begins()

    def notify_released(self) -> None:
        """Implements Allegiance."""
        self._owner.released()

    # -- what it says of itself -------------------------------------------------------------------

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
        if self.session.deferred and self._dm.next_deadline() is not None:
            return True
        return self._dm.wants_write()
