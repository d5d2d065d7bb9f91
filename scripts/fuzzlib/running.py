"""Runs targets under atheris, in processes of their own (guest.py)."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.fuzz import guided
from tests.fuzz.table import PLANTED, ROWS

TOP = Path(__file__).resolve().parents[2]
PLACE = TOP / "build" / "fuzz"
ATHERIS = "atheris>=3"
_PYTHON = PLACE / "python"  # where atheris is
_MOST_S = 20  # of one input
_MOST_MIB = 2048


class Ended(NamedTuple):
    """``edges``: of the code that were reached. ``kept``: inputs of the corpus. ``wrong``: what was
    found, in words; "": nothing. ``file``: the input for that."""

    inputs: int
    seconds: int
    edges: int
    kept: int
    wrong: str
    file: Path | None


def have_atheris() -> str:
    """Install atheris if it is missing. Returns why there is none; "": it is there."""
    if (_PYTHON / "atheris").is_dir():
        return ""
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--target", str(_PYTHON), ATHERIS)
    done = subprocess.run(pip, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = done.stderr.strip().rpartition("\n")[2]
        return f"atheris cannot be installed into {_PYTHON}: {reason}"
    return ""


def folder(name: str) -> str:
    return re.sub(r"\W+", "-", name)


def _quoted(word: bytes) -> str:
    return '"' + "".join(f"\\x{byte:02x}" for byte in word) + '"'


def _environment() -> dict[str, str]:
    path = [str(_PYTHON), str(TOP / "scripts"), str(TOP)]
    # Compiled modules cannot be watched.
    return {**os.environ, "ISERBLK_PLAIN": "1", "PYTHONPATH": os.pathsep.join(path)}


def _number(pattern: str, text: str) -> int:
    found = re.findall(pattern, text)
    return int(found[-1]) if found else 0


class Guests:
    """A guest for each thread that runs targets, while the context is open."""

    def __init__(self) -> None:
        self._of = threading.local()
        self._all: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Guests:
        return self

    def __exit__(self, *exc: object) -> None:
        for each in self._all:
            each.kill()
            each.communicate()

    def run(self, name: str, log: Path, words: Sequence[str]) -> int:
        """Returns the exit status."""
        guest: subprocess.Popen[str] | None = getattr(self._of, "guest", None)
        if guest is None:
            guest = subprocess.Popen(
                (sys.executable, "-P", "-m", "fuzzlib.guest"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # a line for each module
                text=True,
                env=_environment(),
                cwd=TOP,
            )
            self._of.guest = guest
            self._all.append(guest)
        assert guest.stdin is not None and guest.stdout is not None
        guest.stdin.write(json.dumps((name, str(log), words)) + "\n")
        guest.stdin.flush()
        return int(guest.stdout.readline() or "1")


def fuzz(name: str, guests: Guests, corpus: Path, seconds: int) -> Ended:
    """Run one target. What its process says is beside its corpus, in a file ``….log``."""
    row = ROWS.get(name, PLANTED)
    kept = corpus / folder(name)
    kept.mkdir(parents=True, exist_ok=True)
    for seed in guided.seeds(row):
        (kept / hashlib.sha1(seed, usedforsecurity=False).hexdigest()).write_bytes(seed)
    found = corpus / "found"
    found.mkdir(exist_ok=True)
    words = corpus / f"{folder(name)}.words"
    words.write_text("".join(f"{_quoted(word)}\n" for word in guided.dictionary(row)))
    log = corpus / f"{folder(name)}.log"
    options = (
        str(kept),
        f"-max_total_time={seconds}",
        f"-max_len={guided.MOST_INPUT}",
        f"-timeout={_MOST_S}",
        f"-rss_limit_mb={_MOST_MIB}",
        f"-artifact_prefix={found / folder(name)}-",
        f"-dict={words}",
        "-print_final_stats=1",
        "-len_control=0",
    )
    began = time.monotonic()
    status = guests.run(name, log, options)
    text = log.read_text(errors="replace")
    wrong, file = "", None
    if status:
        written = re.findall(r"Test unit written to (\S.*)", text)
        file = Path(written[-1]) if written else None
        wrong = _words(text) or f"the process ended with {status}: {log}"
    return Ended(
        _number(r"(?m)^#([0-9]+)\b", text),
        round(time.monotonic() - began),
        _number(r"\bcov: ([0-9]+)", text),
        sum(1 for _ in kept.iterdir()),
        wrong,
        file,
    )


def _words(text: str) -> str:
    """What libFuzzer says of an input, and the last lines of a traceback."""
    lines = text.splitlines()
    for at, line in enumerate(lines):
        if "Uncaught Python exception" in line:
            end = next((i for i in range(at, len(lines)) if lines[i].startswith("==")), len(lines))
            last = [each for each in lines[at + 1 : end] if each.strip()]
            return "\n".join((*last[:1], *last[-7:]))
    found = re.findall(r"ERROR: libFuzzer: (.*)", text)
    return f"libFuzzer: {found[-1]}" if found else ""


def reached(names: Sequence[str], corpus: Path) -> dict[str, tuple[int, int]]:
    """Module → lines of its functions that the corpora of the targets reach, and all of them."""
    done = subprocess.run(
        (sys.executable, "-P", "-m", "fuzzlib.reaching", str(corpus), *names),
        stdout=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        env=_environment(),
        cwd=TOP,
        check=True,
    )
    return {name: (there, lines) for name, (there, lines) in json.loads(done.stdout).items()}
