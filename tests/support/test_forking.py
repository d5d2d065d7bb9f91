"""What is forked ends as a process that was started ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.forking import ROOT, Forked

PROGRAM = "tests.support.statements"
LIMIT_S = 60


def ended(tmp_path: Path, statements: str, output: str, forked: bool) -> tuple[int, str, str]:
    """(status, stdout, stderr) of a program whose stdout is this file."""
    errors = tmp_path / "stderr"
    with Path(output).open("a") as out, errors.open("w") as err:
        if forked:
            process = Forked(PROGRAM, [statements], env=os.environ, stdout=out, stderr=err)
            status = process.wait(LIMIT_S)
        else:
            status = subprocess.run(
                [sys.executable, "-m", PROGRAM, statements],
                stdin=subprocess.DEVNULL, stdout=out, stderr=err, cwd=ROOT, check=False,
                timeout=LIMIT_S,
            ).returncode  # fmt: skip
    said = "" if output == "/dev/full" else Path(output).read_text()
    return status, said, errors.read_text().partition("Traceback")[0]


@pytest.mark.parametrize(
    "statements",
    [
        "print('said', end='')",
        "raise SystemExit(24)",
        "raise SystemExit(-1)",
        "raise SystemExit('words')",
        "raise ValueError('why')",
        "raise KeyboardInterrupt",
        "import atexit; atexit.register(print, 'at the end'); print('before'); raise SystemExit(3)",
        "import threading as t; t.Timer(0.1, lambda: print('a thread')).start(); print('before')",
        "import sys; sys.stdout.close(); raise SystemExit(5)",
    ],
)
def test_its_end_is_that_of_a_program(statements: str, tmp_path: Path) -> None:
    results = [
        ended(tmp_path, statements, str(tmp_path / f"stdout-{forked}"), forked)
        for forked in (True, False)
    ]
    assert results[0] == results[1]


def test_output_that_cannot_be_written(tmp_path: Path) -> None:
    results = [ended(tmp_path, "print('said')", "/dev/full", forked) for forked in (True, False)]
    assert results[0] == results[1]
    assert results[0][0] != 0
