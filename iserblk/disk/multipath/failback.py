"""Goes back to a better portal while a worse one is in use. Runs in trio, beside the reconnector.

A way that is due (``disk.multipath.policy.Ways.fail_back``) is tried by a trial session with
another ISID, so that the session in use is not disturbed. The port must carry out commands, and the
LUN there must be the same, both for a while. Then the session in use ends its commands, logs out,
and is connected by that way.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import trio

from iserblk.commands.command import Operation
from iserblk.disk.lun.operations import DiskCore
from iserblk.disk.multipath.paths import Address, Paths, access_state
from iserblk.disk.multipath.policy import Way
from iserblk.disk.resume import recognise
from iserblk.disk.settling import settle
from iserblk.errors import ConnectFailed, ConnectionLost, IserblkError
from iserblk.initiator.connecting.reach import connect
from iserblk.initiator.drivers.tasks import TrioDriver
from iserblk.initiator.reconnecting import Driver, Reconnector
from iserblk.initiator.session.session import Session
from iserblk.loop.clock import monotonic
from iserblk.loop.tasks import sleep
from iserblk.scsi import alua

log = logging.getLogger(__name__)

LOOK_S = 1.0  # between two looks whether a way is due
PROVEN_S = 5.0  # a way must have been good for this long before the session takes it
DRAIN_S = 5.0  # time for what is in flight when the session goes over
FLUSH_S = 10.0  # time for the flush before


class FailBack:
    """Fail-back of one session with several ways. ``run`` is the body of a task; ``stop`` ends
    it."""

    def __init__(
        self,
        driver: Driver,
        paths: Paths,
        cores: Sequence[DiskCore],
        run: Callable[[Operation[None]], Awaitable[None]],
    ) -> None:
        """``cores``: every disk of the driver's session. ``run``: runs an operation on that
        session."""
        self._driver = driver
        self._session = driver.session
        self._paths = paths
        self._cores = cores
        self._run = run
        self._trial: Session | None = None
        self._scope = trio.CancelScope()
        self._stopped = False

    def stop(self) -> None:
        """Call it in trio. No way is tried any more, and the session does not go over any more."""
        self._stopped = True
        self._scope.cancel()
        self._forget_trial()

    @trio.lowlevel.enable_ki_protection
    async def run(self) -> None:
        """Try better ways until ``stop``."""
        with self._scope:
            while True:
                await sleep(LOOK_S)
                if self._session.logout is not None:
                    self._driver.kick()  # the logout has a time limit; perhaps no PDU comes
                if not self._connected:
                    continue
                if self._paths.states_changed:
                    self._paths.states_changed = False
                    await self._look_around()
                way = self._paths.ways.fail_back(monotonic())
                if way is not None and self._connected:
                    await self._try(way)

    @property
    def _connected(self) -> bool:
        session = self._session
        return session.suspended is None and session.error is None and session.logout is None

    async def _try(self, way: Way[Address]) -> None:
        ways = self._paths.ways
        current = ways.current
        try:
            state = await self._probe(way, PROVEN_S)
        except Exception as error:
            if not isinstance(error, IserblkError | OSError):
                log.exception("%s: cannot be tried", way.name)
            elif str(error) != way.error:
                log.info("%s is not used yet: %s", way.name, error)
            if way is not ways.current:
                ways.failed(way, str(error), monotonic())
            return
        if not self._connected or ways.current is not current or current is None:
            return  # the reconnector has changed it meanwhile
        if state is not None and state not in alua.USABLE:
            words = f"{way.name}: its port is in the state {alua.state_words(state)}"
            ways.refused(way, state, words, monotonic())
        elif alua.ACTIVE_NON_OPTIMIZED == state != current.state:
            ways.state_seen(way, state)  # a way in this state is not better
        else:
            if state is not None:
                ways.state_seen(way, state)
            await self._go_over(way)

    async def _go_over(self, way: Way[Address]) -> None:
        """Flush, and have the session go on by ``way``. Where the flush fails, it stays."""

        def leave() -> None:
            # (In any thread, where trio's scopes cannot be asked.)
            if not self._stopped and self._paths.go_over(self._session, way, DRAIN_S):
                log.warning("%s: going over to %s", self._session.portal, way.name)
                self._driver.kick()

        try:
            await self._run(settle(self._cores, monotonic() + FLUSH_S, leave))
        except IserblkError as error:
            log.warning("%s: not going over to %s: %s", self._session.portal, way.name, error)

    async def _look_around(self) -> None:
        """Access states have changed: read the states of all ports. If the port in use carries out
        no commands, leave it before a command finds out."""
        ways = self._paths.ways
        for way in ways.all:
            with suppress(IserblkError, OSError):  # a way that is down: see ``order``
                state = await self._probe(way, 0.0)
                if state is not None:
                    ways.state_seen(way, state)
        if self._connected and ways.must_leave:
            best = ways.order(monotonic())[0]
            if best.usable and best is not ways.current:
                await self._go_over(best)

    async def _probe(self, way: Way[Address], seconds: float) -> int | None:
        """The ALUA state of the way's port, once the LUNs behind it are found to be the right ones,
        now and again after ``seconds``. Raises what is wrong with the way."""
        if self._paths.proof is not None:
            await self._paths.proof(*way.address)
        self._trial = await connect(*way.address)
        problem: Exception | None = None
        state: int | None = None
        try:
            driver = TrioDriver(self._trial)
            async with trio.open_nursery() as nursery:
                await nursery.start(driver.run)
                try:
                    state = await driver.run_operation(self._look(way, self._trial))
                    if seconds and (state is None or state in alua.USABLE):
                        await sleep(seconds)
                        state = await driver.run_operation(self._look(way, self._trial))
                    await driver.log_out()
                except Exception as error:
                    problem = error  # raised below, not inside the nursery's exception group
                nursery.cancel_scope.cancel()
        finally:
            self._forget_trial()
        if problem is not None:
            raise problem
        return state

    def _look(self, way: Way[Address], trial: Session) -> Operation[int | None]:
        found: int | None = None
        for core in self._cores:
            state = yield from access_state(trial, core.info.lun, way.name)
            if state is not None and state not in alua.USABLE:
                return state
            if not core.identity.is_another:
                yield from recognise(core, trial, elsewhere=True)
            found = state if found is None else found
        if trial.error is not None:
            raise ConnectFailed(str(trial.error))
        return found

    def _forget_trial(self) -> None:
        trial, self._trial = self._trial, None
        if trial is not None:
            trial.fail(ConnectionLost(f"{trial.portal}: no longer tried"))


class PathsReconnector:
    """A reconnector with a FailBack beside it. Used as ``Reconnector`` is."""

    def __init__(self, reconnector: Reconnector, fail_back: FailBack) -> None:
        self._reconnector = reconnector
        self._fail_back = fail_back

    async def run(self) -> None:
        """Reconnect and fail back until ``stop``."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._reconnector.run)
            nursery.start_soon(self._fail_back.run)

    def stop(self) -> None:
        """As ``Reconnector.stop``."""
        self._fail_back.stop()
        self._reconnector.stop()
