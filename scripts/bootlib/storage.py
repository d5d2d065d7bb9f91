"""The target on this machine, its LUNs, and what must be on them."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from pathlib import Path

from lablib.archive import Absent, call
from lablib.setups import TOP

from bootlib.agent import Failed
from bootlib.guest.records import BLOCK, record

IQN = "iqn.2026-11.example:boot"
LUN_SIZE = 64 << 20
# The target keeps this in memory until a flush: to kill it is to cut off its power.
_CACHE = "16M"
_START_S = 60


class Target:
    """``iserblk target`` of this checkout, with one LUN for each of ``names``; always on the same
    port, which the guest reaches as 10.0.2.2."""

    def __init__(self, directory: Path, names: tuple[str, ...]) -> None:
        self._directory = directory
        self._names = names
        self._process: subprocess.Popen[str] | None = None
        self.port = 0
        self.start()

    def file(self, name: str) -> Path:
        return self._directory / f"{name}.lun"

    def url(self, name: str) -> str:
        """For the guest."""
        return f"iser://10.0.2.2:{self.port}/{IQN}/{self._names.index(name)}"

    def start(self) -> None:
        luns = [
            word
            for name in self._names
            for word in ("--lun", f"{self.file(name)}:size={LUN_SIZE}:volatile-cache={_CACHE}")
        ]
        with (self._directory / "target.log").open("a") as log:
            self._process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", "--",
                 sys.executable, "-P", "-m", "iserblk.cli", "target", "--iqn", IQN,
                 "--listen", f"127.0.0.1:{self.port}", *luns],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True,
                env={**os.environ, "PYTHONPATH": str(TOP)},
            )  # fmt: skip
        assert self._process.stdout is not None
        said = self._process.stdout.readline()
        if not said.startswith("ready "):
            self.kill()
            raise Absent(f"the target does not start: {self._directory / 'target.log'} says why")
        self.port = int(said.partition("//")[2].partition("/")[0].rpartition(":")[2])

    def suspend(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Without a word to anybody; what was not flushed is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    @property
    def runs(self) -> bool:
        return self._process is not None


class Ledger:
    """The records that the guest has flushed, as it told the host at the time: numbers, one a line,
    in ``file``."""

    def __init__(self, file: Path) -> None:
        self.file = file
        file.touch()

    def last(self) -> int:
        """The number of the last record; -1 if there is none. A line that has no end yet does not
        count."""
        lines = self.file.read_text().rpartition("\n")[0].splitlines()
        return int(lines[-1]) if lines else -1


def whole_file_system(lun: Path, scratch: Path) -> Path:
    """A copy of a LUN with ext4 on it, as it is when its journal has been replayed. Raises Failed:
    there was more to mend than that."""
    copy = scratch / f"{lun.stem}.copy"
    call(["cp", "--sparse=always", str(lun), str(copy)], 120)
    replayed = subprocess.run(
        ["e2fsck", "-f", "-y", "-E", "journal_only", str(copy)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    checked = subprocess.run(
        ["e2fsck", "-f", "-n", str(copy)], capture_output=True, text=True, check=False
    )
    if checked.returncode:
        said = " ".join(f"{replayed.stdout} {checked.stdout} {checked.stderr}".split())
        raise Failed(f"{lun.name}: the file system is damaged: {said}")
    return copy


def content(file_system: Path, name: str) -> bytes:
    """A file in the root of a copy that ``whole_file_system`` has made."""
    place = file_system.with_suffix(".content")
    place.unlink(missing_ok=True)
    call(["debugfs", "-R", f"dump /{name} {place}", str(file_system)], 120)
    found = place.read_bytes() if place.exists() else b""
    place.unlink(missing_ok=True)
    return found


def check_records(name: str, data: bytes, last: int) -> None:
    """Records 0 to ``last`` must be at the beginning of ``data``. Raises Failed."""
    for number in range(last + 1):
        if data[number * BLOCK : (number + 1) * BLOCK] != record(number):
            raise Failed(f"{name}: record {number} was flushed, and is not there; the last flushed"
                         f" one is {last}")  # fmt: skip


def check_digest(name: str, data: bytes, wanted: str) -> None:
    """``wanted``: the SHA-256 of ``data``. Raises Failed."""
    if hashlib.sha256(data).hexdigest() != wanted:
        raise Failed(f"{name}: what was written before the shutdown is not there")
