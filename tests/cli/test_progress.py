"""The progress of copies and comparisons, on a terminal and elsewhere."""

from __future__ import annotations

import io
import logging
import sys

import pytest

from iserblk.cli.progress import progress

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


def test_elsewhere_there_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    shown_by("copying")
    assert capsys.readouterr() == ("", "")
