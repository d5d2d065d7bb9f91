"""The connections of a session that may have several, or that outlives its last one.

A connection that is lost while others are left is the matter of a ``Recovery``, and the session
goes on. With ErrorRecoveryLevel 2 a target keeps the session without any connection for a while:
then the last one is **reinstated**. See the module ``session``.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import Protocol

from iserblk.commands.command import ABORTING, SENT
from iserblk.commands.listeners import LunListeners
from iserblk.datamover.seam import InitiatorUser
from iserblk.errors import ConnectionLost, IserblkError, without_frames
from iserblk.initiator.session.connection import Connection
from iserblk.initiator.session.counts import Counts
from iserblk.initiator.session.descriptors import Descriptors
from iserblk.initiator.session.life import Event, Life
from iserblk.initiator.session.logout import AS_ASKED, DRAIN_S, ConnectionLogout
from iserblk.initiator.session.recovery import PATIENCE_S, Recovery, Stage
from iserblk.initiator.session.respite import Respite
from iserblk.initiator.session.sending import SendQueue
from iserblk.initiator.session.silence import Silence
from iserblk.initiator.session.slots import TaskSlot
from iserblk.iscsi.keys import SessionParameters
from iserblk.loop.clock import monotonic

log = logging.getLogger(__name__)


class Owner(Protocol):
    """The session, as far as its connections are concerned; see ``Session`` for the names."""

    queue: SendQueue
    life: Life
    parameters: SessionParameters
    listeners: LunListeners
    silence: Silence
    wanted: int
    counts: Counts
    respite: Respite
    suspended_at: float

    @property
    def portal(self) -> str: ...

    @property
    def error(self) -> IserblkError | None: ...

    @property
    def outlives_connections(self) -> bool: ...

    @property
    def reinstating(self) -> bool: ...

    def attach(self, connection: Connection) -> InitiatorUser: ...

    def lose(self, error: IserblkError) -> None: ...

    def unwanted(self, slot: TaskSlot) -> IserblkError: ...

    def log_out_settled(self, patience: float) -> None: ...


class Several:
    """Of one session, whose leading login agreed on several connections, or on
    ErrorRecoveryLevel 2. All methods but ``offer`` and ``cids`` belong to the runner of
    ``Session.progress``. ``session``: it changes when the session is adopted by another.

    ``descriptors``: what the driver of the session waits for. ``joined``: connections that were
    offered. ``recoveries``: of connections that were lost while the session went on.
    """

    def __init__(self, session: Owner) -> None:
        self.session = session
        self.descriptors = Descriptors()
        self.joined: deque[Connection] = deque()
        self.recoveries: list[Recovery] = []
        self._logouts: list[ConnectionLogout] = []
        self._reinstate_by = 0.0  # how long the target keeps a session that has no connection

    @property
    def cids(self) -> set[int]:
        """Of connections that were offered."""
        return {connection.cid for connection in self.joined.copy()}

    def free_cid(self, used: set[int]) -> int:
        """A CID that is not ``used``, nor of a connection that is being recovered from. While no
        connection is left: that of the last one, which is reinstated by a login with it."""
        if self.session.reinstating and self.recoveries:
            return self.recoveries[-1].lost.cid
        used |= {recovery.lost.cid for recovery in self.recoveries.copy()}
        return next(cid for cid in range(len(used) + 1) if cid not in used)

    def progress(self, now: float) -> int:
        """See ``Session.progress``."""
        session = self.session
        queue = session.queue
        self._take_joined(now)
        count = 0
        for connection in queue.connections.copy():
            try:
                came = connection.datamover.progress(now)
            except IserblkError as error:
                self.lose(connection, error, now)
                if not session.life.connected:
                    return count
                continue
            if came:
                connection.last_heard = now
                count += came
            self.descriptors.update(connection)
        if not count and queue.waiting.entries:
            queue.send_waiting()
        self.recover(now)
        return count

    def stalled(self, seconds: float) -> None:
        """See ``Session.stalled``."""
        for recovery in self.recoveries:
            recovery.stalled(seconds)
        for logout in self._logouts:
            logout.stalled(seconds)

    def log_out(self, connection: Connection, patience: float) -> bool:
        """Log one connection out within ``patience`` seconds. False, and nothing was done: none
        would be left."""
        queue = self.session.queue
        if not queue.begin_logout(connection):
            return False
        self._logouts.append(ConnectionLogout(queue, connection, monotonic() + patience))
        return True

    # -- a connection more ------------------------------------------------------------------------

    def offer(self, connection: Connection) -> None:
        """See ``Session.offer_connection``."""
        session = self.session
        wanted = session.life.connected
        if session.reinstating:
            # No other CID: a logout for recovery must not be asked for twice.
            wanted = connection.cid == self.recoveries[-1].lost.cid and not self.joined
        if wanted:
            self.joined.append(connection)
            return
        connection.datamover.connection_terminate()

    def _take_joined(self, now: float) -> None:
        session = self.session
        while self.joined:
            connection = self.joined[0]
            if connection not in session.queue.connections:
                session.queue.join(connection)
            self.joined.popleft()
            answers = session.attach(connection)
            connection.last_heard = now
            self.descriptors.add(connection)
            log.info("%s: connection %d, of %d", connection.portal, connection.cid, session.wanted)
            try:
                for message in connection.early:
                    answers.control_notify(memoryview(message), 0, 0)
            except IserblkError as error:
                self.lose(connection, error, now)

    # -- a connection less ------------------------------------------------------------------------

    def lose(self, connection: Connection, error: IserblkError, now: float) -> None:
        """One connection is over: recover from that on the others, if there are any."""
        session = self.session
        queue = session.queue
        if len(queue.connections) == 1:
            self._take_joined(now)
        if connection not in queue.connections:
            return
        last = len(queue.connections) == 1
        closed = self._was_logged_out(connection)
        # (Where only a fresh session will do, one that joins meanwhile must not keep this one.)
        over = session.life.over or session.life.spent
        if over or (last and (closed or not self._may_reinstate(connection, now))):
            session.lose(error)
            return
        if session.life.leaving:
            queue.lose(connection)
            self._end_one(connection)
            return
        text = str(error).removeprefix(f"{connection.portal}: ").removeprefix("connection lost: ")
        left = len(queue.connections) - 1
        log.log(
            logging.INFO if last and session.silence.since else logging.WARNING,
            "%s: connection %d logged out: %s; %s" if closed else "%s: connection %d lost: %s; %s",
            connection.portal,
            connection.cid,
            text,
            "it is to be reinstated" if last else f"{left} are left",
        )
        if session.error is not None:
            return
        level = session.parameters.error_recovery_level
        unflushed = session.listeners.unflushed
        recovery = Recovery(queue, connection, level, session.unwanted, unflushed, now)
        self.recoveries.append(recovery)
        if last:
            self._reinstate_by = now + connection.time2wait + connection.time2retain
            session.suspended_at = monotonic()
            session.respite.stay_away(connection.time2wait)
            session.life.enter(Event.LAST, without_frames(error))
            queue.close_window()
        queue.lose(connection)
        self._end_one(connection)
        if closed:
            recovery.closed()
        if not last and all(each.logging_out for each in queue.connections):
            session.log_out_settled(DRAIN_S)
        if queue.driver.reconnect is not None:
            queue.driver.reconnect()

    def _was_logged_out(self, connection: Connection) -> bool:
        """``connection`` is over; whether it was logged out in order, as the target had asked."""
        for logout in self._logouts:
            if logout.connection is connection:
                self._logouts.remove(logout)
                if logout.closed:
                    connection.time2wait = 0  # nothing is left to be recovered
                return logout.closed
        return False

    def _may_reinstate(self, connection: Connection, now: float) -> bool:
        """Whether another connection may go on where ``connection``, the last one, has ended."""
        return (
            self.session.outlives_connections
            and connection.time2retain > 0
            and connection.time2wait <= PATIENCE_S
            and not self._any_late(now)
        )

    def _any_late(self, now: float) -> bool:
        """Whether a command has no time left, or is being aborted. Then its end at the target comes
        first, which session reinstatement is sure to bring."""
        return any(
            slot.state == ABORTING or (slot.state == SENT and now >= slot.deadline)
            for slot in self.session.queue.tasks
        )

    def _end_one(self, connection: Connection) -> None:
        self.descriptors.remove(connection)
        connection.datamover.connection_terminate()
        self.session.queue.strand(connection)

    # -- no connection ----------------------------------------------------------------------------

    def reinstated(self, now: float) -> bool:
        """Go on with the connection that was offered while none was left; returns whether there is
        one. When this is interrupted, the next ``progress`` does the rest."""
        if self._give_up(now) or not self.joined:
            return False
        session = self.session
        queue = session.queue
        connection = self.joined[0]
        for recovery in self.recoveries:
            recovery.reinstated(connection.cid, now)
        if connection not in queue.connections:
            queue.join(connection)
        session.life.enter(Event.REINSTATE)
        queue.open_window()
        session.silence.end(now)  # what is told of the recovery tells of that
        self._take_joined(now)
        self.recover(now)
        queue.driver.changed()
        log.info(
            "%s: connection %d is reinstated after %.1f s",
            session.portal,
            connection.cid,
            max(0.0, monotonic() - session.suspended_at),
        )
        queue.send_waiting()
        return bool(queue.connections)

    def _give_up(self, now: float) -> bool:
        """Whether no connection can be reinstated any more; then the session is suspended."""
        session = self.session
        absence = session.life.absence
        if session.life.spent:
            why = str(absence)
        elif now >= self._reinstate_by:
            why = f"Time2Retain is over: {absence}"
        elif self._any_late(now):
            why = f"a command has no time left: {absence}"
        else:
            return False
        session.lose(ConnectionLost(f"{session.portal}: not reinstated: {why}"))
        return True

    # -- recovering -------------------------------------------------------------------------------

    def recover(self, now: float) -> None:
        """See ``Session.recover``."""
        session = self.session
        if session.reinstating:
            self._give_up(now)
            return
        for logout in self._logouts.copy():
            if session.life.leaving or logout not in self._logouts:
                break  # the session comes first
            logout.tick(now)
            if logout.closed:
                error = ConnectionLost(AS_ASKED)
                self.lose(logout.connection, error, now)
        for recovery in self.recoveries.copy():
            if recovery not in self.recoveries:
                return  # all connections are lost
            recovery.tick(now)
            if recovery.stage is Stage.GIVEN_UP:
                problem = recovery.problem
                assert problem is not None  # it gave up
                session.respite.stay_away(recovery.not_before - now)
                session.lose(problem)
                return
            if recovery.stage is Stage.RECOVERED:
                self.recoveries.remove(recovery)
                session.counts.recovered += 1
                session.counts.reassigned += recovery.reassigned
                session.counts.replayed += recovery.again
                log.warning(
                    "%s: recovered from the loss of connection %d: %d tasks reassigned, %d "
                    "commands sent again",
                    session.portal,
                    recovery.lost.cid,
                    recovery.reassigned,
                    recovery.again,
                )

    def forget(self) -> None:
        """All connections are lost, and what was to be recovered with them."""
        self.recoveries.clear()
        self._logouts.clear()

    def terminate(self) -> None:
        """End the connections that ``Session`` does not have: lost ones, and those that were
        offered."""
        joined = list(self.joined)
        for connection in [*(recovery.lost for recovery in self.recoveries), *joined]:
            connection.datamover.connection_terminate()
        for connection in joined:
            if connection in self.joined:
                self.joined.remove(connection)
        self.descriptors.close()
