"""A session whose end was asked for gives up a target that is away, and no other."""

from __future__ import annotations

import pytest

from iserblk.commands.command import QUEUED, SENT, TAKEN
from iserblk.commands.running import check_time
from iserblk.errors import CommandTimeout, ConnectionLost
from iserblk.initiator.session.deadlines import Ladder
from iserblk.initiator.session.ending import AWAY_S, RESUMING_S
from iserblk.initiator.session.life import State
from iserblk.initiator.session.session import Session
from iserblk.initiator.session.slots import TaskSlot
from tests.initiator.fake import (
    CountingWaiter,
    FakeDatamover,
    command,
    driver_of,
    itt_of,
    response,
    session,
)
from tests.initiator.several import Bench
from tests.support import logs
from tests.support.clocks import Clock

pytestmark = pytest.mark.logs(logs.RECONNECTED, logs.DEADLINES, logs.ONE_OF_SEVERAL, logs.GIVEN_UP)

LOST = ConnectionLost("the wire was cut")
DAY_S = 86400.0


class Away:
    """A session with io-timeout of a day, whose connection is lost at 10, while a command is in
    flight."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.session, self.dm = session()
        self.waiter = CountingWaiter()
        driver_of(self.session).reconnect = lambda: None
        self.ladder = Ladder(self.session)
        self.session.queue.connection.last_heard = 5.0
        self.slot = self.submit()
        self.at(10.0)
        self.dm.inbox.append(LOST)
        self.session.progress(10.0)
        assert self.slot.state == QUEUED

    def submit(self) -> TaskSlot:
        slot = command(self.session, self.waiter)
        slot.deadline = self.clock.now + DAY_S
        return slot

    def at(self, now: float) -> None:
        self.clock.now = now
        self.ladder.tick(now)

    def regain(self) -> FakeDatamover:
        fresh, dm = session()
        self.session.offer(fresh)
        self.session.progress(self.clock.now)
        return dm


@pytest.fixture
def away(clock: Clock) -> Away:
    return Away(clock)


def given_up(slot: TaskSlot) -> bool:
    return slot.state == TAKEN and isinstance(slot.error, CommandTimeout)


def test_without_the_wish_to_end_it_waits(away: Away) -> None:
    away.at(80_000.0)
    assert away.slot.state == QUEUED and not away.session.gives_up


def test_what_waits_fails_some_time_after_the_end_was_asked_for(
    away: Away, caplog: pytest.LogCaptureFixture
) -> None:
    away.session.ending.ask(1000.0)
    away.session.ending.ask(1030.0)  # a second wish makes it no later
    away.at(1000.0 + AWAY_S - 0.1)
    assert away.slot.state == QUEUED
    away.at(1000.0 + AWAY_S)
    assert given_up(away.slot) and away.waiter.woken == 1
    assert "the end was asked for: not connected: the wire was cut" in str(away.slot.error)
    away.at(1001.0 + AWAY_S)
    said = [record.getMessage() for record in caplog.records]
    assert sum("is not waited for any more" in text for text in said) == 1


def test_what_is_submitted_later_fails_at_once(away: Away) -> None:
    """The page cache of a device may have thousands of requests."""
    away.session.ending.ask(1000.0)
    away.at(1000.0 + AWAY_S)
    later = away.submit()
    assert given_up(later) and away.waiter.pending == 0
    with pytest.raises(CommandTimeout, match="lun0: given up"):
        check_time(away.session, away.clock.now + DAY_S, "lun0")


def test_where_the_wish_is_withdrawn_it_waits_again(away: Away) -> None:
    away.session.ending.ask(1000.0)
    away.session.ending.withdraw()
    away.at(1000.0 + AWAY_S)
    assert away.slot.state == QUEUED
    away.session.ending.ask(2000.0)
    away.at(2000.0 + AWAY_S)
    away.session.ending.withdraw()
    away.at(2001.0 + AWAY_S)
    assert away.submit().state == QUEUED


def test_a_target_that_is_back_is_used(away: Away) -> None:
    """Also one that comes back when it was given up; and its next absence counts by itself."""
    away.session.ending.ask(1000.0)
    away.at(1000.0 + AWAY_S)
    dm = away.regain()
    slot = away.submit()
    assert slot.state == SENT
    dm.inbox.append(response(itt_of(dm.sent[-1])))
    away.session.progress(1100.0)
    assert slot.state == TAKEN and slot.error is None
    away.session.queue.release(slot)
    away.at(1100.0)
    slot = away.submit()
    dm.inbox.append(LOST)
    away.session.progress(1100.0)
    away.at(1100.0 + AWAY_S - 0.1)
    assert slot.state == QUEUED
    away.at(1100.0 + AWAY_S)
    assert given_up(slot)


def test_a_slow_target_keeps_its_time(clock: Clock) -> None:
    """It answers, but not this command: that has its deadline. So has a command that waits for
    room at the target."""
    made, dm = session(window=1)
    driver_of(made).reconnect = lambda: None
    ladder = Ladder(made)
    slots = [command(made, CountingWaiter()) for _ in range(2)]
    for slot in slots:
        slot.deadline = clock.now + DAY_S
    made.ending.ask(1.0)
    made.queue.connection.last_heard = 1000.0
    for now in (1000.0, 1000.0 + AWAY_S):
        clock.now = now
        ladder.tick(now)
    assert [slot.state for slot in slots] == [SENT, QUEUED]
    assert not made.gives_up and not dm.disconnected


def test_silence_before_the_loss_counts(clock: Clock) -> None:
    """A dead connection is found to be one by an unanswered ping: that takes a while."""
    made, dm = session()
    driver_of(made).reconnect = lambda: None
    ladder = Ladder(made)
    slot = command(made, CountingWaiter())
    slot.deadline = clock.now + DAY_S
    made.ending.ask(100.0)
    made.queue.connection.last_heard = 98.0
    clock.now = 115.0
    ladder.tick(115.0)
    dm.inbox.append(LOST)
    made.progress(115.0)
    clock.now = 100.0 + AWAY_S
    ladder.tick(clock.now)
    assert given_up(slot)


def test_a_replay_that_goes_on_is_waited_for(away: Away) -> None:
    away.session.ending.ask(1000.0)
    away.session.ending.resuming(1000.0 + AWAY_S - 1.0)
    away.at(1000.0 + AWAY_S)
    assert away.slot.state == QUEUED
    away.at(1000.0 + AWAY_S - 1.0 + RESUMING_S)
    assert given_up(away.slot)


def test_time_in_which_the_process_did_not_run_does_not_count(away: Away) -> None:
    away.session.ending.ask(1000.0)
    away.ladder.stalled(500.0, 1500.0)
    away.at(1500.0 + AWAY_S - 0.1)
    assert away.slot.state == QUEUED
    away.at(1500.0 + AWAY_S)
    assert given_up(away.slot)


def _state(made: Session) -> State:
    return made.life.state


def test_what_a_target_may_have_kept_is_given_up_as_well(level2: Bench) -> None:
    """At ErrorRecoveryLevel 2 tasks wait at the target for a connection."""

    async def more(_session: Session) -> object:
        raise AssertionError

    made = level2.session
    made.more = more  # type: ignore[assignment]
    slot = level2.submit()
    slot.deadline = level2.now + DAY_S
    made.queue.connection.time2retain = 3600
    for each in made.queue.connections:
        each.time2retain = 3600
    for dm in level2.dms:
        dm.inbox.append(LOST)
    level2.progress()
    assert _state(made) is State.REINSTATING and slot.state == SENT
    ladder = Ladder(made)
    made.ending.ask(level2.now)
    level2.now += AWAY_S + 1
    ladder.tick(level2.now)
    level2.progress(1.0)
    ladder.tick(level2.now)
    assert _state(made) is State.SUSPENDED and given_up(slot)
