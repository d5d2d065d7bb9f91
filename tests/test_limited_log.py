"""The log of a server: which lines are written, and which are counted."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from iserblk.limited_log import (
    BURST,
    EVERY_S,
    MOST_KINDS,
    LineLimit,
    limited_lines,
    lines_left_out,
    tell_left_out,
)

LOG = logging.getLogger("iserblk.tests.limited")
OTHER = logging.getLogger("iserblk.tests.limited.other")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Written(logging.Handler):
    """A handler that is limited. ``lines``: level and text of what it writes."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[str, str]] = []
        self.clock = Clock()
        self.limit = LineLimit(self, self.clock)
        self.addFilter(self.limit)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.levelname, record.getMessage()))

    def take(self) -> list[str]:
        lines, self.lines = self.lines, []
        return [text for _, text in lines]


@pytest.fixture
def written() -> Iterator[Written]:
    handler = Written()
    LOG.addHandler(handler)
    LOG.propagate = False
    LOG.setLevel(logging.DEBUG)
    yield handler
    LOG.removeHandler(handler)
    LOG.propagate = True
    LOG.setLevel(logging.NOTSET)


def test_a_few_lines_of_a_kind_and_the_number_of_the_others(written: Written) -> None:
    for number in range(BURST + 7):
        LOG.warning("peer %d: garbage", number)
    assert written.take() == [f"peer {number}: garbage" for number in range(BURST)]
    written.limit.tell()
    written.limit.tell()
    assert written.lines == [
        ("WARNING", f"7 more lines like this one are left out: peer {BURST}: garbage")
    ]
    assert written.limit.left_out == 7  # in all, told or not


def test_later_there_is_room_again(written: Written) -> None:
    for number in range(BURST + 2):
        LOG.info("%d", number)
    written.take()
    written.clock.now += EVERY_S / 2
    LOG.info("%d", 100)
    written.clock.now += EVERY_S / 2
    LOG.info("%d", 101)
    LOG.info("%d", 102)
    assert written.take() == [f"3 more lines like this one are left out: {BURST}", "101"]


def test_one_kind_hides_no_other(written: Written) -> None:
    """By text, by level, and by logger."""
    for _ in range(2 * BURST):
        LOG.warning("%s", "garbage")
    written.take()
    LOG.warning("%s: lost", "LUN 0")
    LOG.error("%s", "a disk")
    OTHER.warning("%s", "another module")
    assert written.take() == ["LUN 0: lost", "a disk", "another module"]


def test_what_is_for_debugging_is_not_limited(written: Written) -> None:
    for _ in range(2 * BURST):
        LOG.debug("detail")
    assert len(written.lines) == 2 * BURST


def test_kinds_without_end_take_no_memory_without_end(written: Written) -> None:
    """As of a text that has a peer's words in it."""
    for number in range(MOST_KINDS + 10 * BURST):
        LOG.warning(f"peer {number}")
    assert len(written.take()) == MOST_KINDS + BURST
    written.limit.tell()
    assert written.take() == [
        f"{9 * BURST} more lines like this one are left out: peer {MOST_KINDS + BURST}"
    ]


@pytest.mark.logs(r"line")
def test_only_as_long_as_a_server_runs() -> None:
    """For the handlers that the process has; what is left out is told at the end at the latest."""
    handler = logging.Handler()
    lines: list[str] = []
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        assert lines_left_out() == 0
        with limited_lines():
            for _ in range(BURST + 1):
                LOG.warning("line")
            assert lines == ["line"] * BURST and lines_left_out() == 1
            tell_left_out()
            assert lines[BURST:] == ["1 more lines like this one are left out: line"]
            LOG.warning("line")
        assert len(lines) == BURST + 2
        LOG.warning("line")
        assert lines[-1] == "line"
        tell_left_out()
        assert len(lines) == BURST + 3
    finally:
        root.removeHandler(handler)
