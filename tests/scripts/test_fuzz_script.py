"""scripts/fuzz: its options, what it finds, and how that is replayed."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.fuzz.table import ROWS

TOP = Path(__file__).resolve().parents[2]
BUG = bytes((0xB0, 0xEA, 0x17, 0x77)) + bytes(5)


def fuzz(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [TOP / "scripts" / "fuzz", *words], capture_output=True, text=True, check=False, cwd=TOP
    )


def test_the_list() -> None:
    done = fuzz("--list")
    assert (done.returncode, done.stdout.splitlines()) == (0, list(ROWS))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "name a target"),
        (("no-such-target",), "there is no target no-such-target: --list prints the names"),
        (("keys", "--time", "soon"), "soon: give seconds, or a number with s, m or h"),
        (("keys", "--jobs", "0"), "--jobs takes a number from 1"),
        (("all", "--replay", "file"), "--replay takes one target"),
    ],
)
def test_wrong_arguments(words: tuple[str, ...], said: str) -> None:
    done = fuzz(*words)
    assert done.returncode == 7 and said in done.stderr and not done.stdout


def test_replay(tmp_path: Path) -> None:
    """Without atheris."""
    file = tmp_path / "input"
    file.write_bytes(BUG)
    done = fuzz("planted bug", "--replay", str(file))
    assert done.returncode == 1 and "IndexError: the planted bug" in done.stderr
    assert fuzz("keys", "--replay", str(file)).returncode == 0
    none = tmp_path / "none"
    done = fuzz("keys", "--replay", str(none))
    assert (done.returncode, done.stderr) == (
        7,
        f"fuzz: {tmp_path}/none: No such file or directory\n",
    )


@pytest.mark.long
def test_a_planted_bug_is_found_and_replayed(tmp_path: Path) -> None:
    """It takes some seconds. atheris may have to be downloaded."""
    done = fuzz("planted bug", "--time", "200", "--corpus", str(tmp_path))
    assert done.returncode == 1, done.stderr
    assert "IndexError: the planted bug" in done.stdout
    found = re.search(r"^again: scripts/fuzz (.*)$", done.stdout, re.MULTILINE)
    assert found is not None
    assert fuzz(*shlex.split(found[1])).returncode == 1


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_every_target(tmp_path: Path) -> None:
    done = fuzz("all", "--time", "10", "--corpus", str(tmp_path))
    print(done.stdout)
    assert done.returncode == 0, done.stderr
