"""A kernel's NBD devices, as far as attach and detach see them: files instead of sysfs and /dev,
and an ``nbd-client`` that really connects to the server. A real kernel is in tests/lab.

Run as a program, this module is that nbd-client.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

SECTOR = 512


class FakeKernel:
    """The fake kernel's files. ``root``: directory of all files. ``refuse``: names of devices that
    cannot be connected."""

    def __init__(self, root: Path, devices: int = 3) -> None:
        self.root = root
        (root / "bin").mkdir()
        program = root / "bin" / "nbd-client"
        program.write_text(f'#!/bin/sh\nexec /usr/bin/python3 {__file__} {root} "$@"\n')
        program.chmod(0o755)
        (root / "dev").mkdir()
        for number in range(devices):
            self.add(f"nbd{number}")

    def add(self, name: str) -> None:
        directory = self.root / "sys" / "block" / name
        directory.mkdir(parents=True)
        (directory / "size").write_text("0\n")
        (directory / "stat").write_text(" ".join(["0"] * 17))
        (self.root / "dev" / name).touch()

    def connect_other(self, name: str, pid: int = 1) -> None:
        """Connect the device for another program."""
        (self.root / "sys" / "block" / name / "pid").write_text(f"{pid}\n")

    def refuse(self, name: str) -> None:
        (self.root / f"refuse-{name}").touch()

    def connected(self) -> list[str]:
        return sorted(path.parent.name for path in self.root.glob("sys/block/*/pid"))

    def size(self, name: str) -> int:
        return int((self.root / "sys" / "block" / name / "size").read_text()) * SECTOR

    def end(self) -> None:
        for holder in self.root.glob("holder-*"):
            _kill(int(holder.read_text()))


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


# Plays the kernel, which holds the connections after nbd-client has ended.
HOLD = """
import nbd, os, time
handles = [nbd.NBD() for _ in range(int(os.environ["COUNT"]))]
for handle in handles:
    handle.connect_unix(os.environ["SOCKET"])
print(handles[0].get_size(), flush=True)
os.close(1)
time.sleep(600)
"""


def _connect(root: Path, words: list[str]) -> int:
    name = os.path.basename(words[words.index("-unix") + 2])
    directory = root / "sys" / "block" / name
    if (directory / "pid").exists() or (root / f"refuse-{name}").exists():
        print("Error: Failed to setup device, check dmesg\n\nExiting.", file=sys.stderr)
        return 1
    count = words[words.index("-connections") + 1]
    holder = subprocess.Popen(
        ["/usr/bin/python3", "-c", HOLD],  # it needs libnbd, of the distribution
        env={**os.environ, "SOCKET": words[words.index("-unix") + 1], "COUNT": count},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert holder.stdout is not None
    size = holder.stdout.readline()
    if not size:
        return 1
    (root / f"holder-{name}").write_text(str(holder.pid))
    (directory / "pid").write_text(f"{os.getpid()}\n")
    (directory / "size").write_text(str(int(size) // SECTOR))
    return 0


def _disconnect(root: Path, name: str) -> int:
    directory = root / "sys" / "block" / name
    holder = root / f"holder-{name}"
    if holder.exists():
        _kill(int(holder.read_text()))
        holder.unlink()
    (directory / "size").write_text("0")
    (directory / "pid").unlink()
    return 0


if __name__ == "__main__":
    place, *given = sys.argv[1:]
    if given[0] == "-d":
        sys.exit(_disconnect(Path(place), os.path.basename(given[1])))
    sys.exit(_connect(Path(place), given))
