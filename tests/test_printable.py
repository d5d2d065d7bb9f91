"""What peers say does not reach a terminal, or the log, as it is."""

from __future__ import annotations

import io
import logging
import os
import subprocess

import pytest

from iserblk.printable import PrintableFormatter, printable, shell_word


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("", ""),
        ("größer → 3", "größer → 3"),
        ("\x1b[2Jgone", r"\x1b[2Jgone"),
        ("one\nCRITICAL: two\r", r"one\nCRITICAL: two\r"),
        ("\x9b2J\x07\x7f", r"\x9b2J\x07\x7f"),
        ("\u202eright to left", r"\u202eright to left"),
        ("\udc80", r"\udc80"),
    ],
)
def test_what_does_not_print(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_a_line_of_the_log() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(PrintableFormatter("iserblk: %(message)s"))
    record = logging.LogRecord("x", logging.ERROR, "", 0, "%s: went", ("\x1b]0;x\x07\na",), None)
    handler.handle(record)
    assert stream.getvalue() == "iserblk: \\x1b]0;x\\x07\\na: went\n"


def test_a_traceback_keeps_its_lines() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(PrintableFormatter("%(message)s"))
    try:
        raise ZeroDivisionError
    except ZeroDivisionError as error:
        told = (type(error), error, error.__traceback__)
    handler.handle(logging.LogRecord("x", logging.ERROR, "", 0, "a bug", (), told))
    lines = stream.getvalue().splitlines()
    assert lines[0] == "a bug" and lines[-1] == "ZeroDivisionError" and len(lines) > 3


@pytest.mark.parametrize(
    "name",
    [b"plain", b"a blank", b"it's", b"\x1b[31m\n", b"\xff3", "ä'\\\x1bß".encode(), b"$(x)`y`\t"],
)
def test_a_word_of_a_command_can_be_pasted(name: bytes) -> None:
    word = shell_word(os.fsdecode(name))
    assert word.isprintable()
    said = subprocess.run(["bash", "-c", f"printf %s {word}"], capture_output=True, check=True)
    assert said.stdout == name
