"""Downloads packages of the distribution, and unpacks them into our cache: never installs them."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_DOWNLOAD_TIMEOUT_S = 900
_UNPACK_TIMEOUT_S = 300


class Absent(Exception):
    """Something that the lab needs is not available here; the text says why, in one line."""


def say(text: str) -> None:
    """Print one line on stderr, marked with the lab's name."""
    print(f"lab: {text}", file=sys.stderr, flush=True)


def cache() -> Path:
    """The directory that outlives runs. It is created if it is missing."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    directory = Path(base) / "iserblk" / "lab"
    directory.mkdir(parents=True, exist_ok=True)
    return directory


@contextmanager
def filling() -> Iterator[Path]:
    """Lock the cache, so that one process at a time fills it: the second finds what the first made.

    Yields a scratch directory on the same file system, for a rename once everything is complete.
    """
    with (cache() / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        scratch = tempfile.mkdtemp(prefix="filling.", dir=cache())
        try:
            yield Path(scratch)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def call(command: Sequence[str], timeout_s: float, *, cwd: Path | None = None) -> str:
    """Run a command; returns its stdout. Raises Absent with the last line of its stderr."""
    name = Path(command[0]).name
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=False, cwd=cwd,
            stdin=subprocess.DEVNULL, env={**os.environ, "LC_ALL": "C.UTF-8"},
        )  # fmt: skip
    except FileNotFoundError:
        raise Absent(f"{name} is not installed: run scripts/setup --tests") from None
    except subprocess.TimeoutExpired:
        raise Absent(f"{name} took longer than {timeout_s:.0f} s") from None
    if done.returncode != 0:
        words = [line for line in done.stderr.splitlines() if line.strip()]
        last = words[-1].strip() if words else f"exit status {done.returncode}"
        raise Absent(f"{name}: {last}")
    return done.stdout


class Archive:
    """The distribution's package archive, used through apt."""

    def __init__(self, scratch: Path) -> None:
        """``scratch`` takes lists and packages."""
        self._scratch = scratch
        self._own_lists = False
        # Without this, apt warns that its own user cannot write there.
        self._options = ["-o", "APT::Sandbox::User=root"] if os.geteuid() == 0 else []

    def dependencies(self, package: str) -> dict[str, str]:
        """The packages on which ``package`` depends, with the version required ("" for any)."""
        shown = self._with_fresh_lists(["apt-cache", "show", "--no-all-versions", package])
        match = re.search(r"^Depends: (.*)$", shown, re.MULTILINE)
        depends = match.group(1).split(", ") if match else []
        parsed = [re.match(r"(\S+)(?: \(= ([^)]+)\))?", entry) for entry in depends]
        return {found.group(1): found.group(2) or "" for found in parsed if found}

    def unpack(self, packages: Sequence[str], directory: Path) -> None:
        """Unpack all ``packages`` (each ``name`` or ``name=version``) into ``directory``."""
        debs = Path(tempfile.mkdtemp(prefix="debs.", dir=self._scratch))
        say(f"downloading {' '.join(package.split('=')[0] for package in packages)}")
        self._with_fresh_lists(["apt-get", "-qq", "download", *packages], cwd=debs)
        for deb in sorted(debs.glob("*.deb")):
            call(["dpkg", "-x", str(deb), str(directory)], _UNPACK_TIMEOUT_S)
        shutil.rmtree(debs)

    def _with_fresh_lists(self, command: list[str], cwd: Path | None = None) -> str:
        """Run a command with the machine's package lists. If they are missing or stale, run it with
        lists fetched for this use only: that needs no root."""
        timeout_s = _DOWNLOAD_TIMEOUT_S
        try:
            return call([command[0], *self._options, *command[1:]], timeout_s, cwd=cwd)
        except Absent:
            if self._own_lists:
                raise
        lists, kept = self._scratch / "lists", self._scratch / "kept"
        (lists / "partial").mkdir(parents=True, exist_ok=True)
        (kept / "archives" / "partial").mkdir(parents=True, exist_ok=True)
        self._options += ["-o", f"Dir::State::lists={lists}", "-o", f"Dir::Cache={kept}"]
        self._own_lists = True
        call(["apt-get", *self._options, "-qq", "update"], timeout_s)
        return call([command[0], *self._options, *command[1:]], timeout_s, cwd=cwd)
