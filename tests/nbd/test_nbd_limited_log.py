"""Which lines are logged, and which are counted."""

from __future__ import annotations

import logging

import pytest

from iserblk.errors import CommandTimeout, ConnectionLost
from iserblk.limited_log import BURST, EVERY_S
from iserblk.nbd.limited_log import ClientLogs, LimitedLog


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


LOG = logging.getLogger("iserblk.tests")


def test_a_few_lines_are_logged_at_once(caplog: pytest.LogCaptureFixture) -> None:
    limited = LimitedLog(LOG, "peers", Clock())
    for number in range(BURST):
        limited.warning("peer %d: %s", number, "garbage")
    limited.tell()
    assert caplog.messages == [f"peer {number}: garbage" for number in range(BURST)]
    assert {record.levelname for record in caplog.records} == {"WARNING"}


def test_more_are_counted_and_the_count_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    limited = LimitedLog(LOG, "peers", Clock())
    for _ in range(BURST + 7):
        limited.warning("line")
    limited.tell()
    limited.tell()
    assert caplog.messages == ["line"] * BURST + ["peers: 7 more lines are left out"]


def test_later_there_is_room_again(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    limited = LimitedLog(LOG, "peers", clock)
    for _ in range(BURST + 2):
        limited.warning("early")
    caplog.clear()
    clock.now += EVERY_S / 2
    limited.warning("too soon")
    clock.now += EVERY_S / 2
    limited.warning("in time")
    limited.warning("too soon again")
    assert caplog.messages == ["peers: 3 more lines are left out", "in time"]


def test_a_long_pause_gives_no_more_than_the_first_burst(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    limited = LimitedLog(LOG, "peers", clock)
    clock.now += 1000 * EVERY_S
    for _ in range(2 * BURST):
        limited.warning("line")
    assert caplog.messages == ["line"] * BURST


def test_what_clients_do_does_not_hide_what_fails(caplog: pytest.LogCaptureFixture) -> None:
    logs = ClientLogs(LOG, Clock())
    for _ in range(BURST + 1):
        logs.conduct.warning("garbage")
    caplog.clear()
    logs.failed("export", ConnectionLost("the target is away"))
    logs.tell()
    told = ["export: the target is away", "NBD clients: 1 more lines are left out"]
    assert caplog.messages == told


def test_requests_of_a_silent_target_are_told_by_the_session(
    caplog: pytest.LogCaptureFixture,
) -> None:
    logs = ClientLogs(LOG, Clock())
    late = CommandTimeout("too slow")
    logs.failed("export", late)
    late.logged = True
    logs.failed("export", late)
    assert caplog.messages == ["export: too slow"]  # the other one at INFO
