"""The progress of copies and comparisons, on a terminal and elsewhere."""

from __future__ import annotations

import io
import logging
import sys

import pytest

from iserblk.cli.progress import (
    LONGEST_S,
    PAUSE_S,
    PERCENT,
    Lines,
    duration_words,
    progress,
    timed_progress,
)

MIB = 1 << 20


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown_by(what: str) -> None:
    with progress(4 * MIB, what) as advance:
        advance(MIB)
        advance(3 * MIB)


def on_a_screen(monkeypatch: pytest.MonkeyPatch) -> str:
    shown = Screen()
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", shown)
        patched.setenv("TERM", "xterm")
        shown_by("copying")
    return shown.getvalue()


def test_a_terminal_shows_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = on_a_screen(monkeypatch)
    assert "copying" in shown and "4.0/4.0 MiB" in shown


def test_who_wants_it_quiet_sees_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        assert on_a_screen(monkeypatch) == ""


def test_short_work_elsewhere_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    shown_by("copying")
    assert capsys.readouterr() == ("", "")


def lines_of(
    capsys: pytest.CaptureFixture[str], size: int | None, steps: list[tuple[float, int]]
) -> list[str]:
    """What is said after steps, each of so many seconds and bytes."""
    time = [1000.0]
    lines = Lines(size, "copying", lambda: time[0])
    for seconds, count in steps:
        time[0] += seconds
        lines.advance(count)
    return capsys.readouterr().err.splitlines()


def test_lines_of_long_work(capsys: pytest.CaptureFixture[str]) -> None:
    """One for so many seconds and percent, and none at the end, where the result follows."""
    found = lines_of(capsys, 100 * MIB, [(1.0, MIB)] * 100)
    assert len(found) == 100 // PERCENT - 1
    assert found[0] == ("iserblk: copying: 5.0 MiB of 100.0 MiB (5 %), 1.0 MiB/s, 1:35 left")
    assert lines_of(capsys, 100 * MIB, [(0.01, MIB)] * 100) == []


def test_lines_of_slow_work(capsys: pytest.CaptureFixture[str]) -> None:
    """Somebody who waits sees that it goes on, although it does not come to a percent."""
    found = lines_of(capsys, 1 << 40, [(10.0, MIB)] * 60)
    assert len(found) == 600 / LONGEST_S
    assert found[0].startswith("iserblk: copying: 6.0 MiB of 1.0 TiB (0 %), 102.4 KiB/s, ")


def test_lines_of_what_has_no_known_size(capsys: pytest.CaptureFixture[str]) -> None:
    found = lines_of(capsys, None, [(2.5, MIB)] * 4)
    assert found == [f"iserblk: copying: {each} MiB, 409.6 KiB/s" for each in ("2.0", "4.0")]


def test_durations() -> None:
    found = [duration_words(each) for each in (0.4, 65, 3600 * 25 + 1)]
    assert found == ["0:00", "1:05", "25:00:01"]


def test_what_takes_a_known_time(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """A line each tenth of the time, but no line more often than others have it."""
    with timed_progress(600.0, "measuring") as (pause, tell):
        assert pause == 60.0
        tell(60.2, "5 IOPS")
    assert capsys.readouterr() == ("", "iserblk: measuring: 60 of 600 s, 5 IOPS\n")
    with timed_progress(10.0, "measuring") as (pause, _):
        assert pause == PAUSE_S
    with caplog.at_level(logging.ERROR), timed_progress(600.0, "measuring") as (pause, _):
        assert pause == 0.0


def test_what_takes_a_known_time_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Screen()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setenv("TERM", "xterm")
    with timed_progress(600.0, "measuring") as (pause, tell):
        assert pause
        tell(60.2, "5 IOPS")
    assert "measuring" in shown.getvalue() and "5 IOPS" in shown.getvalue()
