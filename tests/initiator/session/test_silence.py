"""A target that does not answer is told of once, and once when it answers again."""

from __future__ import annotations

import logging

import pytest

from iserblk.commands.command import ABORTING
from iserblk.errors import CommandTimeout, ConnectionLost
from iserblk.initiator.session.deadlines import IDLE_S, STEP_S, Ladder
from iserblk.initiator.session.silence import DEADLINE, SILENT_S, Silence
from iserblk.iscsi import pdu
from tests.initiator.fake import CountingWaiter, command, driver_of, itt_of, session

COMMANDS = 3


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


@pytest.mark.parametrize("commands", [0, COMMANDS])
def test_a_silent_target(caplog: pytest.LogCaptureFixture, commands: int) -> None:
    """All commands reach their deadlines, none of the ladder's steps is answered, nor the ping of
    an idle session; the connection is lost, and another is adopted."""
    caplog.set_level(logging.INFO)
    made, dm = session()
    driver = driver_of(made)
    driver.reconnect = lambda: None
    ladder = Ladder(made)
    waiters = [CountingWaiter() for _ in range(commands)]
    slots = [command(made, waiter) for waiter in waiters]
    now = slots[0].deadline if slots else made.queue.connection.last_heard + IDLE_S
    made.queue.connection.last_heard = now - 2 * SILENT_S
    for _ in range(20):
        ladder.tick(now)
        if dm.disconnected:
            break
        now += STEP_S
    assert dm.disconnected
    (begun,) = warnings(caplog)
    assert "nothing was heard for " in begun
    dm.inbox.append(ConnectionLost("the connection was ended by this side"))
    made.progress(now)
    made.progress(now)
    assert made.suspended is not None
    fresh, _ = session()
    made.offer(fresh)
    made.progress(now + 40)
    _, ended = warnings(caplog)
    late = f"{commands} commands were given up" if commands else "; the target answers again"
    assert "connected again after" in ended and late in ended
    if commands:
        assert caplog.text.count("exceeded its deadline") == commands  # the others at INFO
    assert not made.silence.since


def test_a_slow_target(caplog: pytest.LogCaptureFixture) -> None:
    """It answers to all else, and in the end to the aborts."""
    made, dm = session()
    slots = [command(made, CountingWaiter()) for _ in range(3)]
    ladder = Ladder(made)
    now = slots[0].deadline
    made.queue.connection.last_heard = now
    ladder.tick(now)
    assert {slot.state for slot in slots} == {ABORTING}
    (begun,) = warnings(caplog)
    assert "exceeded its deadline; sending ABORT TASK" in begun and "heard" not in begun
    for aborting in dm.sent[-3:]:
        answer = pdu.TaskManagementResponse(
            response=pdu.TMF_COMPLETE,
            itt=itt_of(aborting),
            stat_sn=100,
            exp_cmd_sn=2,
            max_cmd_sn=32,
        )
        dm.inbox.append(answer.pack())
    made.progress(now + 1)
    ladder.tick(now + 2)
    _, ended = warnings(caplog)
    assert ended.endswith("the target answers again, after 2 s; 3 commands were given up")


def test_levels(caplog: pytest.LogCaptureFixture) -> None:
    """Of a target that is slow each kind of line is a warning once; of a silent one the first."""
    silence = Silence()
    for kind in (DEADLINE, DEADLINE, "abort", "abort"):
        silence.tell("portal", kind, kind, 100.0, 99.0)
    assert warnings(caplog) == ["portal: deadline", "portal: abort"]
    assert silence.end(103.0) == "the target answers again, after 3 s; 2 commands were given up"
    assert silence.end(103.0) == ""
    caplog.clear()
    for kind in (DEADLINE, DEADLINE, "abort"):
        silence.tell("portal", kind, kind, 200.0, 170.0)
    assert warnings(caplog) == ["portal: deadline; nothing was heard for 30 s"]


@pytest.mark.logs("portal: late")
def test_one_slow_command_has_one_line() -> None:
    silence = Silence()
    silence.tell("portal", "late", DEADLINE, 100.0, 99.0)
    assert silence.level == logging.INFO
    silence.tell("portal", "late", DEADLINE, 100.0, 99.0)
    assert silence.level == logging.WARNING


def test_an_outage_that_outlasts_requests(caplog: pytest.LogCaptureFixture) -> None:
    """Requests that wait for a connection: the first that fails is told of, and how many did."""
    made, dm = session()
    driver_of(made).reconnect = lambda: None
    ladder = Ladder(made)
    dm.inbox.append(ConnectionLost("gone"))
    made.progress(1.0)
    slots = [command(made, CountingWaiter()) for _ in range(3)]
    late = max(slot.deadline for slot in slots)
    ladder.tick(late)
    errors = [slot.error for slot in slots]
    assert all(isinstance(error, CommandTimeout) and error.logged for error in errors)
    fresh, _ = session()
    made.offer(fresh)
    made.progress(late + 9)
    lost, failed, ended = warnings(caplog)
    assert "connection lost: gone" in lost
    assert "not connected for " in failed
    assert ended.endswith("the target answers again, after 9 s; 3 commands were given up")
