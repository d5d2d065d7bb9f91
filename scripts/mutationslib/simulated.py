"""Plays simulated worlds with a mutation planted: no test is asked."""

from __future__ import annotations

import os
import re
import subprocess
import time
from pathlib import Path

from mutationslib.running import Outcome
from mutationslib.table import Mutation

MOST = 1_000_000  # operations, in which a mutation is to be found
_AFTER = re.compile(r"^after (\d+) operations; again: scripts/simulate (--seed \d+)", re.MULTILINE)
_WORLD = "1000"  # operations of the world in which it was found: all of one


def play(mutation: Mutation, most: int, top: Path) -> Outcome:
    """Fresh worlds with ``mutation`` until something is wrong, ``most`` operations in all; and the
    world in which it was without the mutation."""
    assert mutation.world is not None
    settings = [word for each in mutation.world.split() for word in ("--with", each)]
    seed = str(int.from_bytes(os.urandom(4)))
    began = time.monotonic()
    status, output = _simulate(
        top, ["--plant", mutation.name, "--seed", seed, "--operations", str(most), *settings]
    )
    seconds = time.monotonic() - began
    if status == 0:
        return Outcome("", seconds)
    found = _AFTER.search(output)
    if status != 1 or found is None:
        last = output.strip().splitlines()[-1:] or ["no output"]
        return Outcome("", seconds, f"scripts/simulate ended with {status}: {last[0]}")
    count, first = found.groups()
    what = output.splitlines()[0]
    if _simulate(top, [*first.split(), "--operations", _WORLD, *settings])[0] != 0:
        return Outcome(what, seconds, f"{what}: without it, too")
    return Outcome(f"after {count} operations, {what}", seconds)


def _simulate(top: Path, words: list[str]) -> tuple[int, str]:
    ended = subprocess.run(
        [top / "scripts" / "simulate", "--processes", "1", "--tries", "0", *words],
        env={**os.environ, "ISERBLK_SET_UP": "yes"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return ended.returncode, ended.stdout
