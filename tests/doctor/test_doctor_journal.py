"""The last lines of logs: what is asked for, what is chosen, and what could not be read."""

from __future__ import annotations

import json
import os
import shlex

import pytest

from iserblk.doctor.journal import (
    KERNEL_LINES,
    LINES,
    Line,
    cut,
    last_lines,
    parse_line_untrusted,
)
from tests.doctor.box import Box

ROW = {"__REALTIME_TIMESTAMP": "1795000000000000", "SYSLOG_IDENTIFIER": "iserblk-nbd0"}


def row(at: int, message: str, source: str = "iserblk-nbd0") -> str:
    fields = {"__REALTIME_TIMESTAMP": str(at), "SYSLOG_IDENTIFIER": source, "MESSAGE": message}
    return json.dumps(fields) + "\n"


def journal(box: Box, ours: str, units: str = "", kernel: str = "", end: str = "exit 0") -> None:
    """A journalctl that prints these, writes its words into the file ``asked``, and ends so."""
    for name, text in (("ours", ours), ("units", units), ("kernel", kernel)):
        box.put(name, text)
    root = shlex.quote(str(box.root))
    script = (
        f'#!/bin/sh\ncd {root}\necho "$*" >>asked\n'
        'case "$*" in *--dmesg*) cat kernel ;; *--unit*) cat units ;; *) cat ours ;; esac\n'
        f"{end}\n"
    )
    box.put("opt/bin/journalctl", script).chmod(0o755)


def test_lines_of_iserblk_units_and_kernel(box: Box) -> None:
    box.put("sys/block/nbd7/size")
    seen = row(3_000_000, "twice")
    systemd = json.dumps({"__REALTIME_TIMESTAMP": "2000000", "SYSLOG_IDENTIFIER": "systemd",
                          "UNIT": "iserblk-nbd@x.service", "MESSAGE": "Started"})  # fmt: skip
    kernel = row(1_500_000, "block nbd7: Connection timed out", "kernel")
    kernel += row(1_600_000, "eth0: link up", "kernel")
    journal(box, row(1_000_000, "one") + seen, seen + systemd + "\n", kernel)
    log = last_lines(box.machine)
    assert log.lines == [
        Line(1.0, "iserblk-nbd0", "one"),
        Line(1.5, "kernel", "block nbd7: Connection timed out"),
        Line(2.0, "systemd (iserblk-nbd@x.service)", "Started"),
        Line(3.0, "iserblk-nbd0", "twice"),
    ]
    asked = (box.root / "asked").read_text()
    for word in ("--identifier=iserblk-mount", "--identifier=iserblk-nbd7", "--unit=iserblk-*"):
        assert word in asked


def test_no_more_than_the_last_ones(box: Box) -> None:
    many = "".join(row(at, f"nbd0 line {at}") for at in range(1, LINES + 2))
    journal(box, many, "", many)
    lines = last_lines(box.machine).lines
    assert len(lines) == LINES + KERNEL_LINES
    assert lines[-1].text == f"nbd0 line {LINES + 1}"


def test_what_could_not_be_read(box: Box) -> None:
    journal(box, "", end="echo 'No journal files were opened' >&2; exit 1")
    assert last_lines(box.machine).unread == {"the journal": "No journal files were opened"}
    journal(box, "", end="exit 1")  # some versions, where there are no lines
    assert "the journal" not in last_lines(box.machine).unread
    journal(box, "", end="echo 'Failed to add filter for units: No data available' >&2; exit 1")
    assert "the journal" not in last_lines(box.machine).unread  # no unit of iserblk has any


def test_a_user_who_sees_only_the_own_lines(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    journal(box, "")
    box.put("var/log/journal/1/system.journal")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert last_lines(box.machine).unread == {}
    program = str(box.root / "opt/bin/journalctl")
    monkeypatch.setattr(os, "access", lambda name, mode: str(name) == program)
    assert list(last_lines(box.machine).unread) == ["the system's journal"]


def test_without_a_journal(box: Box) -> None:
    assert list(last_lines(box.machine).unread) == ["a log"]
    box.put("var/log/syslog", "Nov 27 host iserblk-nbd: one\nNov 27 host cron: two\n")
    log = last_lines(box.machine)
    assert log.lines == [Line(0.0, "/var/log/syslog", "Nov 27 host iserblk-nbd: one")]
    assert log.unread == {}


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"MESSAGE": "a"}, Line(1_795_000_000.0, "iserblk-nbd0", "a")),
        ({"MESSAGE": [104, 105, 255]}, Line(1_795_000_000.0, "iserblk-nbd0", "hi\ufffd")),
        ({"MESSAGE": ["a", [98], "c"]}, Line(1_795_000_000.0, "iserblk-nbd0", "a c")),
        ({"MESSAGE": None, "__REALTIME_TIMESTAMP": "x"}, Line(0.0, "iserblk-nbd0", "")),
    ],
)
def test_fields(fields: dict[str, object], line: Line) -> None:
    assert parse_line_untrusted(json.dumps({**ROW, **fields}).encode()) == line


@pytest.mark.parametrize("text", [b"", b"x", b"[]", b"7", b"\xff", b"[" * 100_000])
def test_what_is_no_line(text: bytes) -> None:
    assert parse_line_untrusted(text) is None


def test_long_lines_are_cut() -> None:
    assert cut("x" * 1000) == "x" * 1000
    assert cut("x" * 1001) == "x" * 1000 + "…"
