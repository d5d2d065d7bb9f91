"""One connection of the target, from its login until nothing is left of it: its tasks, and what it
tells and asks the server.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import trio

from iserblk.errors import IserblkError, TransportError
from iserblk.loop.clock import monotonic
from iserblk.loop.here import loop_here
from iserblk.loop.tasks import sleep, task_time, until_writable
from iserblk.newcomers import origin_of
from iserblk.target.figures import Parts
from iserblk.target.iscsi.connection import TargetConnection
from iserblk.target.iscsi.tasks.slot import TargetTask
from iserblk.target.offloading import Offloading
from iserblk.target.places import Places
from iserblk.target.pump import Pump

log = logging.getLogger(__name__)

LOGIN_TIMEOUT_S = 15.0  # from the connection to the end of the login
LAST_WORDS_S = 5.0
PING_S = 30.0  # after so much silence the target sends a ping; the answer may take as long
TICK_S = 1.0  # at ErrorRecoveryLevel 1 and 2 over TCP
# Who waits to hear an initiator, in ``TargetConnection.silent``.
_WATCH = 1
CLAIM = 2


def end_of_login() -> float:
    """When a login must have ended that begins now."""
    return task_time() + LOGIN_TIMEOUT_S


class Sessions(Protocol):
    """The sessions of the target, as an attendant uses them. ``most_logins``: places before the
    login."""

    most_logins: int

    def logged_in(self, connection: TargetConnection) -> None:
        """A login is complete."""
        ...

    def names_a_session(self, connection: TargetConnection) -> bool:
        """Whether there is a session of the name of a login that is about to end: that session is
        joined, or reinstated."""
        ...

    def end_others(self, by: TargetConnection) -> None:
        """End all sessions and logins but ``by``."""
        ...

    def forget(self, connection: TargetConnection) -> None:
        """The connection has ended."""
        ...


class Attendant:
    """Implements ConnectionOwner.

    ``tasks``: what goes on behind the end of the connection: while its session keeps its tasks, and
    while threads carry any of them out.
    """

    def __init__(
        self,
        sessions: Sessions,
        parts: Parts,
        places: Places,
        offloading: Offloading,
        peer: str,
    ) -> None:
        self._sessions = sessions
        self._parts = parts
        self._places = places
        self._offloading = offloading
        self._peer = peer
        self._origin = origin_of(peer)
        self._loop = loop_here()
        self._under_way: set[TargetTask] = set()  # offloaded tasks that have not ended
        self._connection: TargetConnection
        self._nursery: trio.Nursery  # ends with the connection
        self.tasks: trio.Nursery
        self._keeping: trio.CancelScope | None = None  # once it is kept

    # -- what the connection tells and asks -------------------------------------------------------

    def login_begun(self) -> None:
        self._parts.newcomers.begins(self._connection)

    def hold_attempt(self, user: str, resume: Callable[[], None]) -> bool:
        """See ConnectionOwner: attempts wait behind failed ones."""
        seconds = self._parts.attempts.wait(self._origin, user, task_time())
        if seconds > 0:
            log.info("%s: CHAP waits for %.0f s behind failed attempts", self._peer, seconds)
            self._nursery.start_soon(_resume_later, seconds, resume)
        return seconds > 0

    def attempt_ended(self, user: str, right: bool) -> None:
        if right:
            self._parts.attempts.succeeded(self._origin, user)
        else:
            self._parts.attempts.failed(self._origin, user, task_time())

    def take_place(self) -> None:
        connection = self._connection
        self._places.take(connection, self._peer, self._sessions.names_a_session(connection))

    def logged_in(self) -> None:
        self._parts.newcomers.remove(self._connection)
        self._parts.logins.succeeded += 1
        self._sessions.logged_in(self._connection)

    def offload(self, slot: TargetTask) -> None:
        nexus = self._connection.session.nexus
        self._offloading.begin(slot, nexus, self._loop, self._under_way)

    def end_other_sessions(self) -> None:
        self._sessions.end_others(self._connection)

    def recovery_begins(self) -> None:
        if self._keeping is not None:
            self._keeping.deadline = task_time() + self._connection.session.retention_s

    def released(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()

    # -- its life ---------------------------------------------------------------------------------

    async def serve(self, connection: TargetConnection, busy_poll_us: int, until: float) -> None:
        """Serve the connection until nothing is left of it. ``until``: when its login must have
        ended."""
        self._connection = connection
        peer = self._peer
        newcomers = self._parts.newcomers
        error: IserblkError | None = None
        try:
            async with trio.open_nursery() as self.tasks:
                try:
                    async with trio.open_nursery() as nursery:
                        self._nursery = nursery
                        newcomers.add(
                            connection,
                            self._origin,
                            nursery.cancel_scope.cancel,
                            self._sessions.most_logins,
                        )
                        try:
                            await self._pump(busy_poll_us, until)
                            if connection.login.problem:
                                self._parts.logins.refused += 1
                                log.warning("%s: login refused: %s", peer, connection.login.problem)
                            log.info("%s: session ended", peer)
                        except IserblkError as problem:
                            error = problem
                        connection.abandon()
                        nursery.cancel_scope.cancel()
                finally:
                    # Not earlier: now no task waits for the descriptor.
                    self._sessions.forget(connection)
                    newcomers.remove(connection)
                    connection.close()
                if error is not None:
                    log.info("%s: %s", peer, error)
                await self._keep()
        finally:
            with trio.CancelScope(shield=True):  # they use buffers of the session, and the LUNs
                await self._offloading.wait(self._under_way)
            self._places.leave(connection)

    async def _pump(self, busy_poll_us: int, until: float) -> None:
        """Serve the connection until its session has ended."""
        connection = self._connection
        fd = connection.fileno()
        login, scope = trio.Event(), trio.CancelScope()
        pump = Pump(connection, busy_poll_us, login.set, scope.cancel)
        pump.begin()
        try:
            with scope:
                with trio.move_on_at(until) as limit:
                    await login.wait()
                if limit.cancelled_caught:
                    raise TransportError(f"no login within {LOGIN_TIMEOUT_S:g} s")
                if connection.recovers:
                    self._nursery.start_soon(_tick, connection)
                await self._look_after()
        finally:
            pump.end()
        if pump.problem is not None:
            raise pump.problem
        # The last answer (to a logout, or to a login that failed) still has to leave.
        with trio.move_on_after(LAST_WORDS_S), suppress(TransportError):
            while connection.wants_write() and not connection.cut:
                await until_writable(fd)
                connection.progress(monotonic())

    async def _look_after(self) -> None:
        """End a session whose initiator has vanished without closing the connection. Neither TCP
        nor the network reports that, and the session would keep its memory and its name for ever.
        And end one whose initiator is there, and owes what others wait for."""
        connection, peer = self._connection, self._peer
        asked = False
        while not connection.done:
            connection.silent |= _WATCH
            await sleep(PING_S)
            connection.trim()
            owed = connection.overdue(task_time())
            if owed:
                log.warning("%s: session ended: %s", peer, owed)
                connection.give_up()
            elif not connection.silent & _WATCH:
                asked = False
            elif not connection.greeted:
                log.warning("%s: session ended: the initiator sent no Hello", peer)
                connection.give_up()
            elif asked:
                log.warning("%s: session ended: the initiator did not answer a ping", peer)
                connection.give_up()
            else:
                connection.ping()
                asked = True

    async def _keep(self) -> None:
        """Wait as long as the session keeps tasks of a lost connection, or itself for its sake.
        Meanwhile it counts as a connection, and as one of few that are kept, so that peers that
        never come back cannot use up memory and places."""
        connection, kept = self._connection, self._parts.kept
        session = connection.session
        if not connection.kept:
            return
        try:
            with trio.move_on_after(session.retention_s) as self._keeping:
                kept.add(connection, self._origin, connection.kept_data, self._keeping.cancel)
                await trio.sleep_forever()
        finally:
            kept.remove(connection)
            session.expire(connection)


async def _resume_later(seconds: float, resume: Callable[[], None]) -> None:
    """Body of a task."""
    await sleep(seconds)
    resume()


async def _tick(connection: TargetConnection) -> None:
    """Body of a task: have the connection ask for what was lost."""
    while not connection.done:
        await sleep(TICK_S)
        try:
            connection.tick()
        except TransportError as error:
            log.info("a connection ended: %s", error)
            connection.abandon()
