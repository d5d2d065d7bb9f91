"""The reconnector of a session: when it tries, what it reports, and when it gives up."""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import pairwise

import pytest
import trio
from trio.testing import MockClock

from iserblk.commands.command import Operation
from iserblk.datamover.seam import PduSlot
from iserblk.errors import (
    CommandTimeout,
    ConnectFailed,
    ConnectionLost,
    ConnectTimeout,
    LoginError,
    LunChanged,
    RemoteProtocolError,
)
from iserblk.initiator import reconnecting as module
from iserblk.initiator.reconnecting import (
    DEMAND_S,
    MOST_LOST,
    MOST_PAUSE_S,
    ONE_WAY_S,
    SILENCE_S,
    Reconnector,
    respite,
)
from iserblk.initiator.session.connection import Connection
from iserblk.initiator.session.session import Session
from iserblk.loop.clock import monotonic
from iserblk.loop.trio_loop import TrioLoop
from tests.initiator import fake
from tests.initiator.several import Polled
from tests.support import clocks, logs
from tests.support.until import until

pytestmark = pytest.mark.logs(logs.RECONNECTED, logs.ONE_OF_SEVERAL)

REFUSED = ConnectFailed("connection refused")


class Driver(fake.FakeDriver):
    """A driver whose session adopts an offered connection at the ``patience``-th ``kick``."""

    def __init__(self, session: Session, patience: int = 1) -> None:
        super().__init__(session)
        self.session = session
        self.patience = patience
        self.regained = trio.Event()
        session.drive(self)

    def changed(self) -> None:
        self.regained.set()

    def kick(self) -> None:
        self.patience -= 1
        if self.patience <= 0:
            self.session.progress(monotonic())

    async def run_operation(self, _operation: Operation[None]) -> None:
        raise AssertionError("nothing is to be run")


class Bench:
    """A session with its reconnector. ``outcomes``: of the attempts to connect, the last for all
    further ones; None: a fresh session. ``attempts``: when each was, on trio's clock."""

    def __init__(self, *outcomes: Exception | None, **parameters: object) -> None:
        self.session, self.dm = fake.session(**parameters)  # type: ignore[arg-type]
        self.driver = Driver(self.session)
        self.outcomes = list(outcomes)
        self.attempts: list[float] = []
        self.fresh: list[fake.FakeDatamover] = []
        self.looked = 0
        self.look: Callable[[Session], None] | None = None
        self.connect: Callable[[], Awaitable[Session]] = self.attempt
        self.resume: Callable[[Session], Operation[None]] = self._check
        self.others = False
        self.settle: Callable[[float, Callable[[], None]], Awaitable[None]] = self._settle
        self.reconnector = Reconnector(
            self.driver, self._connect, self._resume, lambda: self.others, self._settled
        )

    async def _connect(self) -> Session:
        return await self.connect()

    def _resume(self, fresh: Session) -> Operation[None]:
        return self.resume(fresh)

    async def _settled(self, seconds: float, leave: Callable[[], None]) -> None:
        await self.settle(seconds, leave)

    async def _settle(self, _seconds: float, leave: Callable[[], None]) -> None:
        leave()

    def ask_to_leave(self) -> None:
        """The target asks for a logout within 4 s; something is unflushed."""
        self.session.logout_asked = trio.current_time() + 4.0
        assert self.driver.reconnect is not None
        self.driver.reconnect()

    async def attempt(self) -> Session:
        self.attempts.append(trio.current_time())
        outcome = self.outcomes.pop(0) if len(self.outcomes) > 1 else self.outcomes[0]
        if outcome is not None:
            raise outcome
        fresh, dm = fake.session()
        self.fresh.append(dm)
        return fresh

    def _check(self, fresh: Session) -> Operation[None]:
        self.looked += 1
        if self.look is not None:
            self.look(fresh)
        return
        yield

    def lose(self) -> None:
        self.driver.regained = trio.Event()
        dm = self.fresh[-1] if self.fresh else self.dm
        dm.inbox.append(ConnectionLost("cut"))
        self.session.progress(monotonic())

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.reconnector.run)
            try:
                yield
            finally:
                self.reconnector.stop()


@pytest.fixture
def autojump_clock(autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch) -> MockClock:
    """The session goes by trio's clock, too."""
    clocks.give(monkeypatch, autojump_clock.current_time)
    return autojump_clock


class Deaf:
    """Implements Watch: nothing comes."""

    fd = 0

    def want(self, readable: bool, writable: bool) -> None: ...
    def expect(self, until: float) -> None: ...
    def close(self) -> None: ...


@pytest.fixture(autouse=True)
def never_readable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake datamover has no descriptor to wait for; pauses are not random."""

    monkeypatch.setattr(TrioLoop, "watch", lambda *_: Deaf())
    monkeypatch.setattr(module.random, "uniform", lambda _low, high: high)  # type: ignore[attr-defined]


def _gaps(times: list[float]) -> list[float]:
    return [round(b - a, 1) for a, b in pairwise(times)]


@pytest.mark.parametrize("up", [0, 100])
async def test_first_attempt_is_at_once(autojump_clock: MockClock, up: int) -> None:
    """On a machine that has just been started, too."""
    bench = Bench(None)
    async with bench.running():
        await trio.sleep(up)
        start = trio.current_time()
        bench.lose()
        await bench.driver.regained.wait()
        assert bench.attempts == [start] and bench.looked == 1
        assert bench.session.suspended is None and bench.session.counts.reconnects == 1


async def test_pauses_double_up_to_a_bound(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """Each reason is a warning once, also where they take turns."""
    refusal = LoginError("login refused: the service is unavailable", 0x0301)
    bench = Bench(*[REFUSED] * 6, *[refusal] * 6, REFUSED, None)
    async with bench.running():
        bench.lose()
        await bench.driver.regained.wait()
    assert _gaps(bench.attempts) == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, *[MOST_PAUSE_S] * 7]
    texts = [
        record.getMessage()
        for record in caplog.records
        if record.name.endswith("reconnecting") and record.levelno == logging.WARNING
    ]
    assert [text.split(": ")[2] for text in texts] == [
        "connection refused; trying again",
        "login refused",
    ]


async def test_a_target_that_stays_silent_is_not_told_of_again(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """It was told that the target is silent; that it is down is news."""
    silent = ConnectTimeout("portal: no login within 20 s")
    bench = Bench(*[silent] * 3, *[REFUSED] * 2, None)
    async with bench.running():
        bench.session.silence.tell("portal", "no answer", "ping", 100.0, 80.0)
        bench.lose()
        await bench.driver.regained.wait()
    texts = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert len(texts) == 3
    assert "no answer; nothing was heard for 20 s" in texts[0]
    assert texts[1].endswith("connection refused; trying again")
    assert "connected again after" in texts[2] and "the target answers again" in texts[2]


async def test_waiting_commands_make_it_impatient(autojump_clock: MockClock) -> None:
    bench = Bench(*[REFUSED] * 8, None)
    async with bench.running():
        waiter = fake.CountingWaiter()
        fake.command(bench.session, waiter)
        bench.lose()
        await bench.driver.regained.wait()
    assert max(_gaps(bench.attempts)) == module.WAITING_PAUSE_S
    assert len(bench.fresh[0].sent) == 1


async def test_new_command_cuts_a_pause_short(autojump_clock: MockClock) -> None:
    bench = Bench(*[REFUSED] * 8, None)
    async with bench.running():
        bench.lose()
        await until(lambda: len(bench.attempts) >= 6)
        await trio.sleep(0.5)
        before = trio.current_time()
        fake.command(bench.session, fake.CountingWaiter())
        await trio.sleep(0.1)
        assert len(bench.attempts) == 7
        assert bench.attempts[6] - before <= DEMAND_S


async def test_target_that_asked_for_time(autojump_clock: MockClock) -> None:
    bench = Bench(None)
    async with bench.running():
        start = trio.current_time()
        bench.session.respite.reconnect_at = start + 7
        bench.lose()
        await bench.driver.regained.wait()
    assert bench.attempts == [start + 7]


async def test_connection_that_does_not_last(autojump_clock: MockClock) -> None:
    """A target that drops each connection soon after the login is tried after growing pauses."""
    bench = Bench(None)
    async with bench.running():
        await trio.sleep(50)
        for _ in range(6):
            bench.lose()
            await bench.driver.regained.wait()
            await trio.lowlevel.checkpoint()
        assert _gaps(bench.attempts) == [0.1, 0.2, 0.4, 0.8, 1.6]
        await trio.sleep(60)
        start = trio.current_time()
        bench.lose()
        await bench.driver.regained.wait()
        assert bench.attempts[-1] == start


async def test_other_lun_is_the_end(autojump_clock: MockClock) -> None:
    bench = Bench(None)

    def look(_fresh: Session) -> None:
        raise LunChanged("another LUN is there now")

    bench.look = look
    waiter = fake.CountingWaiter()
    async with bench.running():
        slot = fake.command(bench.session, waiter)
        bench.lose()
        await trio.sleep(60)
    assert isinstance(bench.session.error, LunChanged) and isinstance(slot.error, LunChanged)
    assert len(bench.attempts) == 1 and bench.fresh[0].terminated


async def test_lun_that_is_not_ready_is_tried_again(autojump_clock: MockClock) -> None:
    """A lost connection, an OSError and an unexpected exception each lead to another attempt."""
    bench = Bench(None)
    problems: list[Exception] = [ConnectionLost("cut in between"), KeyError("bug"), OSError("full")]

    def look(_fresh: Session) -> None:
        if problems:
            raise problems.pop()

    bench.look = look
    async with bench.running():
        bench.lose()
        await bench.driver.regained.wait()
    assert bench.looked == 4 and bench.session.error is None
    assert [dm.terminated for dm in bench.fresh] == [True] * 3 + [False]


@pytest.mark.parametrize(
    ("request_s", "limits"),
    [
        (math.inf, [30, 60, 120, 240, 240, 30]),
        (180, [30, 60, 120, 180, 180, 30]),
        (30, [30] * 6),  # as where a user has set one for both
    ],
)
async def test_a_slow_target_has_longer_with_each_attempt(
    autojump_clock: MockClock, request_s: float, limits: list[float]
) -> None:
    """Else it would never take what is sent again before the session is in use."""
    bench = Bench(None)
    bench.session.io_timeout, bench.session.command_timeout = request_s, 30.0
    seen: list[float] = []

    def look(fresh: Session) -> None:
        seen.append(fresh.command_timeout)
        if len(seen) < len(limits) - 1:
            raise CommandTimeout("late")

    bench.look = look
    async with bench.running():
        for _ in range(2):
            bench.lose()
            await bench.driver.regained.wait()
    assert seen == limits


async def test_connection_lost_again_before_it_is_used(autojump_clock: MockClock) -> None:
    bench = Bench(None)

    def look(fresh: Session) -> None:
        if bench.looked == 1:
            fresh.fail(ConnectionLost("cut"))

    bench.look = look
    async with bench.running():
        bench.lose()
        await bench.driver.regained.wait()
    assert bench.looked == 2 and bench.session.counts.reconnects == 1


async def test_leader_that_takes_its_time(autojump_clock: MockClock) -> None:
    """A connection that the driver adopts late is offered once."""
    bench = Bench(None)
    bench.driver.patience = 5
    async with bench.running():
        bench.lose()
        await bench.driver.regained.wait()
        await trio.sleep(10)
    assert len(bench.attempts) == 1 and bench.session.counts.reconnects == 1


async def test_stopped_while_it_connects(autojump_clock: MockClock) -> None:
    bench = Bench(None)
    cancelled = trio.Event()

    async def connect() -> Session:
        try:
            await trio.sleep_forever()
        finally:
            cancelled.set()
        raise AssertionError

    bench.connect = connect
    with trio.fail_after(5):
        async with bench.running():
            bench.lose()
            await trio.sleep(1)
    assert cancelled.is_set() and bench.driver.reconnect is None


async def test_stopped_while_it_looks(autojump_clock: MockClock) -> None:
    """``stop`` ends the fresh session; its driver lives until the operation has ended with that
    error."""
    bench = Bench(None)

    def resume(fresh: Session) -> Operation[None]:
        waiter = fresh.new_waiter()
        fake.command(fresh, waiter)  # type: ignore[arg-type]
        while waiter.pending:
            yield waiter

    bench.resume = resume
    with trio.fail_after(5):
        async with bench.running():
            bench.lose()
            await trio.sleep(1)
            assert len(bench.fresh[0].sent) == 1
    assert bench.fresh[0].terminated


@pytest.mark.logs(logs.DEADLINES)
@pytest.mark.parametrize("stopped", [True, False])
async def test_luns_that_do_not_answer(autojump_clock: MockClock, stopped: bool) -> None:
    """The session is given up, and tried again. But not where this process was stopped
    meanwhile."""
    bench = Bench(None)
    waiting: list[fake.CountingWaiter] = []

    def resume(fresh: Session) -> Operation[None]:
        while stopped and not waiting:
            waiting.append(fake.CountingWaiter())
            yield 1.0
            autojump_clock.jump(2 * SILENCE_S)
            yield 1.0
        waiter = fresh.new_waiter()
        fake.command(fresh, waiter)  # type: ignore[arg-type]
        while waiter.pending:
            yield waiter

    bench.resume = resume
    async with bench.running():
        bench.lose()
        await trio.sleep((2 * stopped + 0.9) * SILENCE_S)
        assert len(bench.fresh) == 1 and not bench.fresh[0].terminated
        await trio.sleep(0.2 * SILENCE_S)
        assert bench.fresh[0].terminated and "did not answer within 30 s" in str(
            bench.session.suspended
        )


async def test_stopped_in_a_pause(autojump_clock: MockClock) -> None:
    bench = Bench(REFUSED)
    with trio.fail_after(25):
        async with bench.running():
            bench.lose()
            await trio.sleep(20)
    assert len(bench.attempts) > 3


async def test_outer_cancelling_waits_for_stop(autojump_clock: MockClock) -> None:
    """The reconnector runs until ``stop``: cancelled operations may still need the connection."""
    bench = Bench(REFUSED, REFUSED, None)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bench.reconnector.run)
        bench.lose()
        nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            await bench.driver.regained.wait()
        bench.reconnector.stop()


def test_loss_is_told_from_another_thread() -> None:
    bench_done = []

    async def main() -> None:
        bench = Bench(None)
        call = bench.driver.reconnect
        async with bench.running():
            await trio.to_thread.run_sync(bench.lose)
            with trio.fail_after(20):
                await bench.driver.regained.wait()
            bench_done.append((bench, call))

    trio.run(main)
    ((bench, call),) = bench_done
    assert call is not None
    bench.driver.reconnect = call
    bench.lose()  # trio's loop has ended: the call has no effect
    assert bench.session.suspended is not None


async def test_a_missing_connection_is_tried_again(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """With pauses that grow, while the session goes on; the reason is logged once."""
    bench = Bench(None)
    tries: list[float] = []

    async def more(session: Session) -> Connection:
        tries.append(trio.current_time())
        if len(tries) == 6:
            session.wanted = 1
        raise REFUSED

    bench.session.more = more
    bench.session.wanted = 2
    async with bench.running():
        await trio.sleep(100)
    assert _gaps(tries) == [0.1, 0.2, 0.4, 0.8, 1.6]
    assert bench.session.suspended is None and not bench.attempts
    assert [record.getMessage() for record in caplog.records] == [
        "portal:3260: one connection less: connection refused"
    ]


@pytest.mark.parametrize("lasts", [0.0, 0.05])
async def test_a_further_connection_that_does_not_last(
    autojump_clock: MockClock, lasts: float
) -> None:
    """A target that drops each soon after its login is asked for another after growing pauses."""
    bench = Bench(None, datamover=Polled(), max_connections=2)
    tries: list[float] = []

    async def more(session: Session) -> Connection:
        tries.append(trio.current_time())
        datamover = Polled()
        memory = [PduSlot(index) for index in range(len(session.queue.slots))]
        datamover.allocate_connection_resources(memory, 0)
        if not lasts:
            datamover.inbox.append(ConnectionLost("cut"))
        else:
            nursery.start_soon(cut, datamover)
        return Connection(datamover, memory, session.parameters, "portal:3260", session.free_cid())

    async def cut(datamover: Polled) -> None:
        await trio.sleep(lasts)
        datamover.inbox.append(ConnectionLost("cut"))
        bench.session.progress(monotonic())

    bench.session.more = more
    async with trio.open_nursery() as nursery, bench.running():
        await trio.sleep(2.0)
        bench.reconnector.stop()
        nursery.cancel_scope.cancel()
    assert bench.session.suspended is None and bench.session.count == 1
    assert _gaps(tries) == [round(lasts + pause, 1) for pause in (0.1, 0.2, 0.4, 0.8)]
    bench.session.fail(ConnectionLost("closing"))


async def test_a_bug_in_the_login_of_a_further_connection_ends_nothing(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """Lost connections are regained as ever, and it is tried again."""
    bench = Bench(None)
    tries = 0

    async def more(session: Session) -> Connection:
        nonlocal tries
        tries += 1
        session.wanted = 3 - tries
        raise ZeroDivisionError

    bench.session.more = more
    bench.session.wanted = 2
    async with bench.running():
        await trio.sleep(100)
        assert tries == 2
        bench.lose()
        await bench.driver.regained.wait()
    assert "cannot add a connection" in caplog.text


async def test_the_session_comes_before_a_missing_connection(autojump_clock: MockClock) -> None:
    """A login that hangs is given up when all connections are lost."""
    bench = Bench(None)
    ended: list[float] = []

    async def more(session: Session) -> Connection:
        try:
            await trio.sleep_forever()
        finally:
            ended.append(trio.current_time())
        raise AssertionError("cancelled")

    bench.session.more = more
    bench.session.wanted = 2
    async with bench.running():
        await trio.sleep(100)
        start = trio.current_time()
        bench.lose()
        await bench.driver.regained.wait()
        assert ended == bench.attempts == [start]


async def test_time2wait_comes_before_a_login(autojump_clock: MockClock) -> None:
    """That reinstates the session. Nothing is waited for where the target wants no time."""
    bench = Bench(None)

    async def connect() -> Session:
        await respite(bench.session)
        return await bench.attempt()

    bench.connect = connect
    async with bench.running():
        for wait in (2.0, 0.0, 20.0):
            await trio.sleep(100)
            start = trio.current_time()
            bench.lose()
            bench.session.respite.reinstate_at = start + wait
            await bench.driver.regained.wait()
            assert bench.attempts.pop() == start + wait


async def test_an_attempt_that_fails_behind_its_login_has_a_time2wait(
    autojump_clock: MockClock,
) -> None:
    """It may have sent again what was written: that must not land behind the next attempt. One that
    fails before its login has sent nothing."""
    bench = Bench(REFUSED, None)

    def refuse(_fresh: Session) -> None:
        seen.append(bench.session.respite.reinstate_at)
        if len(seen) < 3:
            raise ConnectionLost("cut off")

    seen: list[float] = []
    bench.look = refuse
    async with bench.running():
        bench.lose()
        before = bench.session.respite.reinstate_at
        await bench.driver.regained.wait()
    assert seen[0] == before < seen[1] < seen[2]
    assert bench.session.respite.reinstate_at == seen[2]


# -- ErrorRecoveryLevel 2: the target keeps the session ------------------------------------------


class Kept(Bench):
    """``logins``: when connection reinstatement was tried. ``answers``: what came of that, the last
    for all further ones; None: a connection."""

    def __init__(self, *answers: Exception | None, **parameters: object) -> None:
        parameters = {"default_time2wait": 0, **parameters}
        super().__init__(None, datamover=Polled(), error_recovery_level=2, **parameters)
        self.logins: list[float] = []
        self.answers = list(answers)
        self.joined: list[Polled] = []
        self.session.more = self.more

    async def more(self, session: Session) -> Connection:
        self.logins.append(trio.current_time())
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if answer is not None:
            raise answer
        datamover = Polled()
        self.joined.append(datamover)
        memory = [PduSlot(index) for index in range(len(session.queue.slots))]
        datamover.allocate_connection_resources(memory, 0)
        return Connection(datamover, memory, session.parameters, "portal:3260", session.free_cid())

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        try:
            async with super().running():
                yield
        finally:
            self.session.fail(ConnectionLost("closing"))


async def test_a_connection_is_reinstated_at_once(autojump_clock: MockClock) -> None:
    """No fresh session is made, and no LUN is examined."""
    bench = Kept(None)
    async with bench.running():
        start = trio.current_time()
        bench.lose()
        await bench.driver.regained.wait()
        assert bench.logins == [start] and not bench.attempts and not bench.looked
        assert bench.session.suspended is None and bench.session.counts.reconnects == 0
        assert bench.session.queue.connection.datamover is bench.joined[0]


async def test_a_portal_that_is_away_is_tried_again(autojump_clock: MockClock) -> None:
    bench = Kept(REFUSED, REFUSED, None)
    async with bench.running():
        bench.lose()
        await bench.driver.regained.wait()
        assert _gaps(bench.logins) == [0.1, 0.2] and not bench.attempts


@pytest.mark.parametrize(
    "problem",
    [
        LoginError("the session does not exist", 0x020A),
        RemoteProtocolError("iSCSI", "into session 9"),
        ConnectTimeout("silent"),
        ZeroDivisionError("a bug"),
    ],
    ids=lambda problem: type(problem).__name__,
)
async def test_what_is_refused_is_followed_by_session_reinstatement(
    autojump_clock: MockClock, problem: Exception
) -> None:
    bench = Kept(problem)
    async with bench.running():
        start = trio.current_time()
        bench.lose()
        await bench.driver.regained.wait()
        assert bench.logins == bench.attempts == [start]
        assert bench.session.counts.reconnects == 1 and bench.looked == 1


async def test_a_target_that_ends_each_login_is_not_asked_for_long(
    autojump_clock: MockClock,
) -> None:
    bench = Kept(ConnectionLost("during login"))
    async with bench.running():
        bench.lose()
        await bench.driver.regained.wait()
        assert len(bench.logins) == MOST_LOST and bench.session.counts.reconnects == 1


async def test_other_portals_are_not_kept_waiting(autojump_clock: MockClock) -> None:
    """Where there are any: one attempt, of a few seconds."""
    bench = Kept(REFUSED)
    bench.others = True
    async with bench.running():
        start = trio.current_time()
        bench.lose()
        await bench.driver.regained.wait()
        assert bench.logins == bench.attempts == [start]

    async def hang(_session: Session) -> Connection:
        await trio.sleep_forever()
        raise AssertionError("cancelled")

    bench = Kept(None)
    bench.others = True
    bench.session.more = hang
    async with bench.running():
        start = trio.current_time()
        bench.lose()
        await bench.driver.regained.wait()
        assert bench.attempts == [start + ONE_WAY_S]


async def test_a_login_is_given_up_with_the_reinstatement(autojump_clock: MockClock) -> None:
    """The session is suspended meanwhile, because a command has no time left."""
    bench = Kept(None)
    ended: list[float] = []

    async def hang(_session: Session) -> Connection:
        try:
            await trio.sleep_forever()
        finally:
            ended.append(trio.current_time())
        raise AssertionError("cancelled")

    bench.session.more = hang
    async with bench.running():
        bench.lose()
        await trio.sleep(5)
        assert bench.session.reinstating and not bench.attempts
        bench.session.disconnect()
        bench.session.recover(trio.current_time())
        await bench.driver.regained.wait()
        assert ended == bench.attempts == [trio.current_time()]
        assert bench.session.counts.reconnects == 1


async def test_time2wait_comes_before_reinstatement(autojump_clock: MockClock) -> None:
    bench = Kept(None, default_time2wait=3)
    async with bench.running():
        start = trio.current_time()
        bench.lose()
        bench.session.respite.reconnect_at = start + 3
        await bench.driver.regained.wait()
        assert bench.logins == [start + 3]


async def test_a_connection_that_comes_too_late_is_ended(autojump_clock: MockClock) -> None:
    bench = Kept(None)

    async def slow(session: Session) -> Connection:
        made = await Kept.more(bench, session)
        session.disconnect()
        session.recover(trio.current_time())
        return made

    bench.session.more = slow
    async with bench.running():
        bench.lose()
        await bench.driver.regained.wait()
        assert bench.joined[0].terminated and bench.session.counts.reconnects == 1


# -- a logout that the target asks for ---------------------------------------------------------


async def test_session_leaves_when_all_is_flushed(autojump_clock: MockClock) -> None:
    bench = Bench(None)
    given: list[float] = []

    async def settle(seconds: float, leave: Callable[[], None]) -> None:
        given.append(seconds)
        await trio.sleep(1)
        assert bench.session.logout is None
        leave()
        assert bench.session.logout is not None

    bench.settle = settle
    async with bench.running():
        bench.ask_to_leave()
        await trio.sleep(2)
        assert given == [2.0] and not bench.session.logout_asked


async def test_session_leaves_unflushed_where_the_flush_fails(autojump_clock: MockClock) -> None:
    bench = Bench(None)

    async def settle(_seconds: float, _leave: Callable[[], None]) -> None:
        raise CommandTimeout("not flushed")

    bench.settle = settle
    async with bench.running():
        bench.ask_to_leave()
        await trio.sleep(1)
        assert bench.session.logout is not None


async def test_connection_that_is_lost_during_the_flush(autojump_clock: MockClock) -> None:
    """The flush waits for the next connection, so it is given up; and nothing leaves that one."""
    bench = Bench(None)
    late: list[Callable[[], None]] = []

    async def settle(_seconds: float, leave: Callable[[], None]) -> None:
        late.append(leave)
        await trio.sleep_forever()

    bench.settle = settle
    async with bench.running():
        bench.ask_to_leave()
        await trio.sleep(1)
        bench.lose()
        await trio.sleep(1)
        assert bench.session.counts.reconnects == 1
        late[0]()  # a thread may get there late
        assert bench.session.logout is None


@pytest.mark.parametrize("hangs", [False, True])
async def test_leaving_comes_before_a_missing_connection(
    autojump_clock: MockClock, hangs: bool
) -> None:
    """Its portal may be away for good; the target does not wait for that."""
    bench = Bench(None)

    async def more(session: Session) -> Connection:
        if hangs:
            await trio.sleep_forever()
        raise REFUSED

    bench.session.more = more
    bench.session.wanted = 2
    async with bench.running():
        await trio.sleep(100.3)
        bench.ask_to_leave()
        await trio.testing.wait_all_tasks_blocked()
        assert bench.session.logout is not None
        bench.session.wanted = 1
