"""scripts/simulate: its options, its traces, and that it finds bugs that are planted."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from mutationslib.table import read_table

TOP = Path(__file__).resolve().parents[2]
SCRIPT = TOP / "scripts" / "simulate"
# Mutations that the simulation finds within so many operations, in worlds as their rows say: in
# the first one from this seed on. Where the order of things has changed it takes more worlds, and
# time; if they are never found any more, it has become worse. (scripts/mutations --simulated plays
# fresh worlds.)
PLANTED = {
    "what-a-shared-lun-does-not-show-is-not-told": "1",
    "replay-skips-a-write": "3",
    "a-loss-is-not-told": "6",
    "a-flush-answers-early": "3",
    "the-target-s-flush-does-nothing": "20",
    "reinstatement-without-a-report": "2",
    "a-loss-is-told-to-one-client": "6",
    "what-a-client-has-not-heard-ends-with-it": "16",
    "an-nbd-flush-is-answered-without-one-of-the-disk": "2",
    "a-loss-is-told-to-one-connection": "2",
    "a-connection-begins-without-a-look-at-the-others": "3",
    "patience-of-a-flush-that-was-not-heard": "19",
    "reservation-does-not-bind": "2",
    "a-unit-attention-is-told-to-one-host": "2",
    "what-the-target-does-not-know-is-taken-for-done": "2",
    "flush-that-failed-at-the-target": "2",
    "deferred-error-is-not-heard": "2",
    "crc-is-not-looked-at": "2",
    "range-lock-lets-the-last-block-through": "1",
    "a-lun-that-comes-back-is-not-compared": "2",
    "a-lun-comes-back-with-other-blocks": "2",
    "open-files-are-one-client": "2",
    "hand-over-forgets-the-losses": "16",
    "a-request-queue-forgets-fua": "2",
}
MOST = "40000"


def simulate(*words: str, hash_seed: str = "0") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SCRIPT, *words],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    "setting",
    [
        *("front=disk", "front=nbd", "succession=yes", "front=fuse"),
        *("other=fences", "tas=no"),
    ],
)
def test_a_seed_does_the_same_whatever_the_hashes_are(setting: str) -> None:
    """In one process or in several."""
    words = ("--seed", "2", "--operations", "400", "--with", setting)
    ended = [
        simulate(*words, "--processes", processes, hash_seed=hash_seed)
        for processes, hash_seed in (("1", "1"), ("2", "2"))
    ]
    assert [each.returncode for each in ended] == [0, 0]
    first = ended[0].stdout.splitlines()[:-1]
    assert first[0].startswith("seed 2: all was right, 400 operations, ")
    assert [each.stdout.splitlines()[:-1] for each in ended] == [first] * 2


def test_a_trace() -> None:
    ended = simulate("--seed", "2", "--operations", "50", "--trace")
    assert ended.returncode == 0
    lines = ended.stdout.splitlines()
    assert any(line.endswith("the disk is open") for line in lines)
    assert any("client 0: " in line for line in lines)
    assert lines[-1].endswith("operations a second of processor time")


def test_a_reader_who_has_enough_sees_no_traceback() -> None:
    words = ["bash", "-c", '"$0" --seed 2 --operations 300 --trace | head -n 2', str(SCRIPT)]
    environment = {**os.environ, "ISERBLK_SET_UP": "yes"}  # which may have much to say
    ended = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert (len(ended.stdout.splitlines()), ended.stderr) == (2, "")


@pytest.mark.parametrize("processes", ["1", pytest.param("2", marks=pytest.mark.long)])
def test_for_some_time(processes: str) -> None:
    """At least one world is played, and then no more begin."""
    ended = simulate("--seed", "5", "--seconds", "0.001", "--processes", processes)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.startswith("seed 5: all was right, 1000 operations, ")


@pytest.mark.parametrize(("name", "seed"), PLANTED.items())
def test_a_bug_that_is_planted_is_found(name: str, seed: str) -> None:
    (world,) = (each.world for each in read_table() if each.name == name)
    assert world is not None
    words = ["--processes", "1", "--plant", name, "--tries", "0"]
    words += [word for each in world.split() for word in ("--with", each)]
    ended = simulate("--seed", seed, "--operations", MOST, *words)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "Wrong: " in ended.stdout or "Stuck: " in ended.stdout
    assert f"--trace --plant {name}" in ended.stdout


def test_what_is_found_is_made_smaller_and_fails_again() -> None:
    words = ("--with", "between=5", "--with", "clients=1", "--processes", "1")
    plant = ("--plant", "the-target-s-flush-does-nothing")
    ended = simulate("--seed", "2", "--operations", MOST, *words, *plant, "--tries", "6")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "smaller worlds were tried" in ended.stdout
    first, *_, last = ended.stdout.splitlines()
    again = last.removeprefix("again: scripts/simulate ")
    assert again != last
    trace = simulate(*shlex.split(again))
    assert trace.returncode == 1
    assert first.partition(": ")[2].split()[0] in trace.stdout
    assert " begins: " in trace.stdout and " sends " in trace.stdout


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
        (("--with", "clients=0"), "a number from 1"),
        (("--with", "front=file"), "front takes disk or nbd or fuse or queue"),
        (("--with", "other=some"), "other takes none or beside or fences or invades or takes or r"),
        (("--with", "fault-kinds=cut+rain"), "fault-kinds: rain: there are cut, halve, "),
        (("--with", "fault-kinds=NBD-cut", "--with", "front=disk"), "fault-kinds: NBD-cut: there"),
        (("--with", "colour=red"), "write KEY=VALUE, with a KEY of portals, "),
        (("--faults", "x"), "--faults"),
        (("--tries", "-1"), "numbers from 0"),
        (("--seconds", "0"), "a number above 0"),
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
    for word in (
        "--seed",
        "--operations",
        "--processes",
        "--trace",
        "--plant",
        "--with",
        "--faults",
    ):
        assert word in ended.stdout
