"""The end of the use of LUNs: who is told of it, and what is said."""

from __future__ import annotations

import pytest

from iserblk.disk.ending import (
    SILENT_S,
    EndOfUse,
    all_unflushed,
    last_flush_failed,
    not_flushed,
)
from iserblk.errors import CommandTimeout, ConnectionLost
from tests.initiator.fake import CountingWaiter, command, driver_of, session
from tests.support import logs
from tests.support.clocks import Clock


class Disk:
    def __init__(self, unflushed: int | None) -> None:
        self.unflushed = unflushed


@pytest.mark.parametrize("nothing", [None, 0])
def test_what_is_said_of_what_is_not_flushed(nothing: int | None) -> None:
    """A trim has no bytes that are counted, and "0 bytes may be lost" would say that all is
    well."""
    error = CommandTimeout("portal: given up")
    assert last_flush_failed("lun1", Disk(8192), error) == (
        "lun1: the last flush failed, data may be lost: 8192 unflushed bytes: portal: given up"
    )
    assert last_flush_failed("lun1", Disk(nothing), error) == (
        "lun1: the last flush failed, data may be lost: portal: given up"
    )
    said = "lun1: not flushed: 8192 bytes written since the last flush may be lost"
    assert not_flushed("lun1", Disk(8192)) == said
    assert "what was written since" in not_flushed("lun1", Disk(nothing))


@pytest.mark.parametrize(
    ("each", "together"),
    [([], 0), ([4096, 512], 4608), ([0], 0), ([4096, None], None), ([None], None)],
)
def test_bytes_are_counted_where_each_disk_knows_its_own(
    each: list[int | None], together: int | None
) -> None:
    """A sum of some would say too little."""
    assert all_unflushed(map(Disk, each)) == together


def test_all_sessions_are_told_and_the_wish_may_be_withdrawn(clock: Clock) -> None:
    sessions = [session()[0] for _ in range(2)]
    ending = EndOfUse(sessions)
    clock.now = 100.0
    ending.ask()
    assert [each.ending.asked for each in sessions] == [100.0, 100.0]
    clock.now = 200.0
    ending.ask()
    assert [each.ending.asked for each in sessions] == [100.0, 100.0]
    ending.ask(wanted=False)
    assert [each.ending.asked for each in sessions] == [0.0, 0.0]
    ending.ask()
    assert [each.ending.asked for each in sessions] == [200.0, 200.0]


def test_a_wish_that_is_withdrawn_when_the_target_is_there_again_is_heard_of(clock: Clock) -> None:
    """Else commands would be under the rules of an end for good."""
    made, _ = session()
    ending = EndOfUse([made])
    ending.ask()
    assert ending.waits()  # so the wish is looked at
    ending.ask(wanted=False)
    assert not ending.waits()


@pytest.mark.logs(logs.RECONNECTED)
def test_whether_requests_wait_for_a_target_that_is_away(clock: Clock) -> None:
    made, dm = session()
    ending = EndOfUse([made])
    made.queue.connection.last_heard = clock.now
    clock.now += SILENT_S + 1
    assert not ending.waits()  # nothing is under way
    command(made, CountingWaiter())
    assert ending.waits()
    made.queue.connection.last_heard = clock.now
    assert not ending.waits()
    driver_of(made).reconnect = lambda: None
    dm.inbox.append(ConnectionLost("the wire was cut"))
    made.progress(clock.now)
    assert ending.waits()


def test_by_force_all_ends_at_once(clock: Clock) -> None:
    made, _ = session()
    waiter = CountingWaiter()
    slot = command(made, waiter)
    EndOfUse([made]).give_up()
    assert isinstance(slot.error, ConnectionLost) and "by force" in str(slot.error)
    assert not EndOfUse([made]).waits()
