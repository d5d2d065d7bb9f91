"""Gives a session new connections: connects, logs in, has its LUNs checked, and hands over.

A ``Reconnector`` runs in trio, beside the driver of its session. One attempt
is a login with the session's ISID and no TSIH. That is session reinstatement: the target ends
whatever the lost connection left there (RFC 7143 section 6.3.5). So no old command can take effect
after what is sent on the new connection. The target may want some time for that: ``respite``.

Where the target has kept the session without any connection (ErrorRecoveryLevel 2), attempts begin
with a login with the session's TSIH and the CID of the last connection: connection reinstatement
(section 6.3.4). A portal that cannot be reached is tried again; any other failure, and the end of
Time2Retain, are followed by session reinstatement.

Where a session that may have several connections has too few of them, one attempt is the login of
another, with the session's TSIH; the session goes on meanwhile.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Protocol

import trio

from iserblk.commands.command import Operation
from iserblk.errors import (
    CommandTimeout,
    ConnectFailed,
    ConnectionLost,
    ConnectTimeout,
    IserblkError,
    LocalProtocolError,
    LunChanged,
    ReservationLost,
    without_frames,
)
from iserblk.initiator.drivers.tasks import TrioDriver
from iserblk.initiator.session.connection import Connection
from iserblk.initiator.session.deadlines import MOST_GROWTH
from iserblk.initiator.session.driving import SessionDriver
from iserblk.initiator.session.logout import AS_ASKED
from iserblk.initiator.session.sending import CONTROL_SLOTS
from iserblk.initiator.session.session import Session
from iserblk.loop.clock import monotonic
from iserblk.loop.patience import move_on_after
from iserblk.loop.tasks import sleep, sleep_until, task_time

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.1  # between two attempts; doubled after each
MOST_PAUSE_S = 5.0
WAITING_PAUSE_S = 1.0  # the longest pause while commands wait
DEMAND_S = 0.2  # a new command shortens a pause to this
SILENCE_S = 30.0  # of the target, allowed between the login and the hand-over
LOOK_S = 0.5  # between two looks whether it was heard
ONE_WAY_S = 3.0  # for the reinstatement of a connection, where other portals could be tried
MOST_REASONS = 8  # why there is no connection, that are warned of in one outage
MOST_LOST = 3  # connections lost during a login that was to reinstate one
ADOPTED_S = 0.02  # between two looks whether the session has adopted the connection


async def respite(session: Session) -> None:
    """Wait until a login may reinstate ``session``: Time2Wait after a loss that was not announced
    (RFC 7143 section 7.5.1). For the ``connect`` of its reconnector, which may also have ways that
    reinstate nothing."""
    left = session.respite.reinstate_at - monotonic()
    if left > 0:
        log.info("%s: Time2Wait of the target: %.1f s", session.portal, left)
        await sleep(left)


class Driver(SessionDriver, Protocol):
    """A driver whose session is reconnected."""

    session: Session

    def kick(self) -> None:
        """Have ``progress`` run at once, or soon."""
        ...

    async def run_operation(self, operation: Operation[None]) -> None:
        """Run ``operation`` to its end."""
        ...


class Reconnector:
    """Reconnects one session. ``run`` is the body of a task; ``stop`` ends it, and must be
    called."""

    def __init__(
        self,
        driver: Driver,
        connect: Callable[[], Awaitable[Session]],
        resume: Callable[[Session], Operation[None]],
        others: Callable[[], bool] = lambda: False,
        settle: Callable[[float, Callable[[], None]], Awaitable[None]] | None = None,
    ) -> None:
        """Call it in trio. ``connect`` gives the target its ``respite``, and returns a fresh
        session with the ISID of the old one; it is called for each attempt. ``resume``: what has to
        be done on the fresh session before anything is sent again; raises LunChanged or
        ReservationLost when nothing may be sent any more. ``others``: whether ``connect`` has other
        portals to try than that of the connection that was lost; then this one is tried once, and
        not for long. ``settle(seconds, leave)``: flushes within ``seconds``, and calls ``leave``
        when nothing is unflushed; raises IserblkError where that is not possible."""
        self._driver = driver
        self._session = driver.session
        self._connect = connect
        self._resume = resume
        self._others = others
        self._settle = settle
        self._token = trio.lowlevel.current_trio_token()
        self._heard = trio.Event()
        self._connecting = trio.CancelScope()
        self._adding = trio.CancelScope()
        self._reinstating = trio.CancelScope()
        self._sleeping = trio.CancelScope()
        self._settling = trio.CancelScope()
        self._fresh: Session | None = None
        self._stopped = False
        self._pause = FIRST_PAUSE_S
        self._regained_at = -math.inf  # never
        self._add_pause = FIRST_PAUSE_S
        self._added_at = -math.inf
        self._growth = 1.0  # of the limit for a command, before a fresh session is in use
        driver.reconnect = self._call

    def _call(self) -> None:
        """The connection is lost, or a command needs one."""
        with suppress(trio.RunFinishedError):
            self._token.run_sync_soon(self._notice, idempotent=True)

    def _notice(self) -> None:
        self._heard.set()
        if self._wanted:
            self._adding.cancel()  # the whole session comes first
            self._settling.cancel()
            if not self._session.reinstating:
                self._reinstating.cancel()
        elif self._session.logout_asked:
            self._adding.cancel()  # and so does logging out in time
            self._sleeping.cancel()

    def stop(self) -> None:
        """Call it in trio. From now on a lost connection ends the session, and the session's owner
        must end a session that is suspended."""
        self._driver.reconnect = None
        self._stopped = True
        self._heard.set()
        self._connecting.cancel()
        self._adding.cancel()
        self._reinstating.cancel()
        self._sleeping.cancel()
        self._settling.cancel()
        if self._fresh is not None:
            self._fresh.fail(ConnectionLost(f"{self._session.portal}: closing"))

    @property
    def _wanted(self) -> bool:
        session = self._session
        return not self._stopped and session.suspended is not None and session.error is None

    @trio.lowlevel.enable_ki_protection
    async def run(self) -> None:
        """Reconnect until ``stop``. Shielded from cancelling: a cancelled operation needs its
        driver until it ends."""
        with trio.CancelScope(shield=True):
            while not self._stopped:
                if self._wanted:
                    await self._regain()
                elif self._session.logout_asked:
                    await self._log_out()
                elif self._session.missing and self._session.more is not None:
                    await self._add(self._session.more)
                else:
                    self._heard = trio.Event()
                    await self._heard.wait()

    async def _sleep(self, seconds: float, shortest: float) -> None:
        """For ``seconds``; when a command is submitted meanwhile, only until ``shortest`` has
        passed."""
        end = task_time() + shortest
        with trio.move_on_after(seconds) as self._sleeping:
            self._heard = trio.Event()
            await self._heard.wait()
            await sleep_until(end)

    async def _regain(self) -> None:
        """Make attempts until the session goes on or ends."""
        session = self._session
        pause = 0.0
        if session.suspended_at - self._regained_at < self._pause:
            pause = self._next_pause()  # the connection did not last: wait first
        else:
            self._pause = FIRST_PAUSE_S
        told: set[str] = set()
        lost = 0
        while self._wanted:
            if pause:
                pause *= random.uniform(0.5, 1.0)
                await self._sleep(pause, min(pause, DEMAND_S))
            forbidden = session.respite.reconnect_at - monotonic()
            if forbidden > 0:
                await self._sleep(forbidden, forbidden)
            if not self._wanted:
                return
            more = session.more
            if session.reinstating and more is not None:
                problem = await self._reinstate(more)
                if problem is None or not self._wanted:
                    return
                pause = 0.0
                if not session.reinstating:
                    continue
                session.still_absent(problem)
                lost += isinstance(problem, ConnectionLost)
                if self._others() or not (
                    isinstance(problem, ConnectFailed)
                    or (isinstance(problem, ConnectionLost) and lost < MOST_LOST)
                ):
                    session.disconnect()  # session reinstatement comes next
                else:
                    pause = self._next_pause()
                self._driver.kick()
                continue
            outcome = await self._attempt()
            if isinstance(outcome, Session | LunChanged | ReservationLost):
                await self._hand_over(outcome)
                return
            if not self._wanted:
                return
            session.still_absent(outcome)
            text = str(outcome)
            # What is silent still was told to be so; and each reason is told once.
            expected = session.silence.since and isinstance(outcome, ConnectTimeout)
            warns = not expected and text not in told and len(told) < MOST_REASONS
            told.add(text)
            log.log(
                logging.WARNING if warns else logging.INFO,
                "%s: not connected: %s; trying again",
                session.portal,
                text,
            )
            pause = self._next_pause()

    async def _reinstate(
        self, more: Callable[[Session], Awaitable[Connection]]
    ) -> IserblkError | None:
        """Reinstate the last connection of the session: one attempt. Returns why that is not
        possible."""
        session = self._session
        seconds = ONE_WAY_S if self._others() else math.inf
        try:
            with move_on_after(seconds) as self._reinstating:
                session.offer_connection(await more(session))
                await self._taken()
                return None
        except IserblkError as error:
            return without_frames(error)
        except OSError as error:
            return ConnectionLost(str(error))
        except Exception as error:
            log.exception("%s: cannot reinstate a connection", session.portal)
            return LocalProtocolError(repr(error))
        return ConnectTimeout(f"{session.portal}: given up")

    async def _log_out(self) -> None:
        """Log out as the target has asked: when all is flushed, or half of the time has passed."""
        session = self._session
        asked = session.logout_asked
        patience = max(0.0, asked - monotonic()) / 2

        def log_out() -> None:
            if session.logout_asked == asked:  # else the connection was lost meanwhile
                session.log_out(AS_ASKED, patience)

        try:
            if self._settle is not None and patience:
                with trio.CancelScope() as self._settling:
                    await self._settle(patience, log_out)
        except IserblkError as error:
            log.info("%s: logging out unflushed: %s", session.portal, error)
        log_out()
        session.logout_asked = 0.0
        self._driver.kick()

    async def _add(self, more: Callable[[Session], Awaitable[Connection]]) -> None:
        """Make attempts to add a connection, until there are enough or all are lost, or the target
        wants the session to be logged out."""
        session = self._session
        pause = FIRST_PAUSE_S
        told: set[str] = set()
        if monotonic() - self._added_at < self._add_pause:  # a connection did not last: wait first
            await self._sleep(self._add_pause, self._add_pause)
            self._add_pause = min(2 * self._add_pause, MOST_PAUSE_S)
        else:
            self._add_pause = FIRST_PAUSE_S
        while session.missing and not self._stopped and not session.logout_asked:
            missing = session.missing
            try:
                with trio.CancelScope() as self._adding:
                    session.offer_connection(await more(session))
                    self._added_at = monotonic()
                    self._driver.kick()
                    if session.missing < missing:  # else it is lost already
                        pause = FIRST_PAUSE_S
                        continue
            except (IserblkError, OSError) as error:
                text = str(error)
                if text not in told and len(told) < MOST_REASONS:
                    told.add(text)
                    log.warning("%s: one connection less: %s", session.portal, text)
            except Exception:  # a bug, which must not stop that lost connections are regained
                log.exception("%s: cannot add a connection", session.portal)
            if session.missing and not session.logout_asked:
                await self._sleep(pause, pause)
            pause = min(2 * pause, MOST_PAUSE_S)

    def _next_pause(self) -> float:
        pause = self._pause
        self._pause = min(2 * pause, MOST_PAUSE_S)
        return min(pause, WAITING_PAUSE_S) if self._session.queue.in_flight else pause

    async def _hand_over(self, outcome: Session | LunChanged | ReservationLost) -> None:
        self._session.offer(outcome)
        await self._taken()

    async def _taken(self) -> None:
        """Until the session has taken up what was offered."""
        self._driver.kick()
        while self._session.offered and self._wanted:
            await sleep(ADOPTED_S)
            self._driver.kick()
        self._regained_at = monotonic()

    async def _attempt(self) -> Session | IserblkError:
        """A fresh session that is ready to be adopted, or the error that prevents it."""
        try:
            with trio.CancelScope() as self._connecting:
                self._fresh = await self._connect()
            if self._fresh is None or self._stopped:
                raise ConnectionLost("closing")
            session = self._session
            limit = min(session.io_timeout, session.command_timeout * self._growth)
            self._fresh.command_timeout = limit
            await self._look(self._fresh)
            self._growth = 1.0
            return self._fresh
        except IserblkError as error:
            problem = without_frames(error)
            if isinstance(error, CommandTimeout) and self._fresh is not None:
                # A slow target would never take all that is sent again.
                self._growth = min(2 * self._growth, MOST_GROWTH)
        except OSError as error:
            problem = ConnectionLost(str(error))
        except Exception as error:
            log.exception("%s: cannot reconnect", self._session.portal)
            problem = ConnectionLost(repr(error))
        finally:
            fresh, self._fresh = self._fresh, None
        if fresh is not None:
            fresh.fail(ConnectionLost("given up"))
            # What it has sent again must not land behind what the next one sends.
            self._session.respite.give(fresh.parameters.default_time2wait)
        return problem

    async def _look(self, fresh: Session) -> None:
        """Run ``resume`` on ``fresh``. Afterwards nothing of it is in flight."""
        driver = TrioDriver(fresh)
        problem: Exception | None = None

        async def limit() -> None:
            # A replay of the journal may take long, but the target must not be silent so long. (It
            # is not where this process does not run: each look counts for its pause alone.)
            heard, silent = fresh.last_heard, 0.0
            while silent < SILENCE_S:
                await sleep(LOOK_S)
                silent += LOOK_S
                if fresh.last_heard != heard:
                    heard, silent = fresh.last_heard, 0.0
                    self._session.ending.resuming(monotonic())
            words = f"{fresh.portal}: the LUNs did not answer within {SILENCE_S:g} s"
            fresh.disconnect()  # what is under way must not arrive any more
            fresh.fail(ConnectionLost(words))

        async with trio.open_nursery() as nursery:
            await nursery.start(driver.run)
            nursery.start_soon(limit)
            try:
                await driver.run_operation(self._resume(fresh))
            except Exception as error:
                problem = error  # raised below, not inside the nursery's exception group
            nursery.cancel_scope.cancel()
        if problem is not None:
            raise problem
        if fresh.error is not None:
            raise ConnectionLost(str(fresh.error))
        if fresh.queue.in_flight or fresh.queue.free_controls < CONTROL_SLOTS:
            raise ConnectionLost(f"{fresh.portal}: no answer to a request during the login")
