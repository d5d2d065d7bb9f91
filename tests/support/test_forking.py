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


SAYS_WHAT_IT_IS = """
import os, sys
from contextlib import suppress
from pathlib import Path
def is_open(number):
    with suppress(OSError):
        return os.fstat(number)
words = Path("/proc/self/cmdline").read_text().rstrip("\\0").split("\\0")
print(words[0] == sys.executable, words[1:3], sys.argv[1] in words, os.getsid(0) == os.getpid())
print(*filter(is_open, range(500)))
os.write(int(sys.argv[2]), b"heard")
"""


def test_its_command_line_and_what_it_is_given(tmp_path: Path) -> None:
    """Descriptors with the same numbers, and no others."""
    read_end, write_end = os.pipe()
    output = tmp_path / "stdout"
    with output.open("w") as out, (tmp_path / "stderr").open("w") as err:
        process = Forked(
            PROGRAM, [SAYS_WHAT_IT_IS, str(write_end)], env=os.environ, stdout=out, stderr=err,
            start_new_session=True, pass_fds=[write_end],
        )  # fmt: skip
        assert process.wait(LIMIT_S) == 0, (tmp_path / "stderr").read_text()
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        assert pipe.read() == b"heard"
    what, descriptors = output.read_text().splitlines()
    assert what == f"True ['-m', '{PROGRAM}'] True True"
    assert descriptors == f"0 1 2 {write_end}"


def test_words_that_are_not_utf8(tmp_path: Path) -> None:
    statements = "import os, sys; print(os.fsencode(sys.argv[2]))"
    output = tmp_path / "stdout"
    with output.open("w") as out, (tmp_path / "stderr").open("w") as err:
        words = [statements, os.fsdecode(b"\xff")]
        process = Forked(PROGRAM, words, env=os.environ, stdout=out, stderr=err)
        assert process.wait(LIMIT_S) == 0, (tmp_path / "stderr").read_text()
    assert output.read_text() == "b'\\xff'\n"
