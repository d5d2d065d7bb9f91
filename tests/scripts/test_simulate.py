"""scripts/simulate: its options, its traces, and that it finds bugs that are planted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from mutationslib.table import read_table

TOP = Path(__file__).resolve().parents[2]
SCRIPT = TOP / "scripts" / "simulate"
# Mutations that the simulation finds within so many operations. It may need other seeds for them
# when the order of things has changed; if they are never found any more, it has become worse.
PLANTED = (
    "replay-skips-a-write",
    "a-loss-is-not-told",
    "a-flush-answers-early",
    "the-target-s-flush-does-nothing",
    "reinstatement-without-a-report",
)
MOST = "8000"


def simulate(*words: str, hash_seed: str = "0") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SCRIPT, *words],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_seed_does_the_same_whatever_the_hashes_are() -> None:
    """In one process or in several."""
    words = ("--seed", "2", "--operations", "400")
    ended = [
        simulate(*words, "--processes", processes, hash_seed=hash_seed)
        for processes, hash_seed in (("1", "1"), ("1", "2"), ("2", "3"))
    ]
    assert [each.returncode for each in ended] == [0, 0, 0]
    first = ended[0].stdout.splitlines()[:3]
    assert first[0].startswith("seed 2: all was right, 400 operations, ")
    assert [each.stdout.splitlines()[:3] for each in ended] == [first] * 3


def test_a_trace() -> None:
    ended = simulate("--seed", "2", "--operations", "50", "--trace")
    assert ended.returncode == 0
    lines = ended.stdout.splitlines()
    assert any(line.endswith("the disk is open") for line in lines)
    assert any("client 0: " in line for line in lines)
    assert lines[-1].endswith("operations a second of processor time")


@pytest.mark.parametrize("name", PLANTED)
def test_a_bug_that_is_planted_is_found(name: str) -> None:
    assert any(each.name == name for each in read_table())
    ended = simulate("--seed", "1", "--operations", MOST, "--processes", "1", "--plant", name)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "Wrong: " in ended.stdout or "Stuck: " in ended.stdout
    assert f"--trace --plant {name}" in ended.stdout


def test_what_is_planted_is_in_effect() -> None:
    """Whatever form iserblk would choose."""
    code = (
        "from pathlib import Path; from simulatelib.planting import plant; top = Path.cwd();"
        "plant(top / 'iserblk/disk/ranges.py', top, 'planted = 7');"
        "from iserblk.disk import ranges; print(ranges.planted)"
    )
    environment = {**os.environ, "PYTHONPATH": f"{TOP}/scripts:{TOP}"}
    words = [sys.executable, "-c", code]
    assert subprocess.check_output(words, cwd=TOP, env=environment) == b"7\n"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--operations", "0"), "numbers from 1"),
        (("--trace", "--operations", "2000"), "--operations 1000"),
        (("--plant", "nothing"), "scripts/mutations --list"),
        (("--colour",), "--help"),
    ],
)
def test_bad_arguments(words: tuple[str, ...], says: str) -> None:
    ended = simulate(*words)
    assert (ended.returncode, ended.stdout) == (7, "")
    assert says in ended.stderr


def test_help() -> None:
    ended = simulate("--help")
    assert ended.returncode == 0
    for word in ("--seed", "--operations", "--processes", "--trace", "--plant"):
        assert word in ended.stdout
