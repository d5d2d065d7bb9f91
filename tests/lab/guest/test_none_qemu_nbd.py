"""qemu-nbd as the server of /dev/nbd0 is killed under a file system. What becomes of one whose
server is ours: test_none_kills.py."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.guest.attached import DEVICE, block, connected, mounted, nothing_left
from tests.lab.guest.test_none_replace import ended
from tests.support.nbdkit import need
from tests.support.programs import SLOW_S, run
from tests.support.target import TargetProcess, running_target
from tests.support.until import until_blocking

SIZE = 64 << 20


@pytest.fixture
def target(tmp_path: Path) -> Iterator[TargetProcess]:
    need("qemu-nbd")
    Path("/run/lock").mkdir(exist_ok=True)  # for its lock of the device
    with running_target([f"{tmp_path}/lun:size={SIZE}"], tmp_path / "log") as process:
        yield process


@pytest.fixture(autouse=True)
def tidy(target: TargetProcess) -> Iterator[None]:
    yield
    disconnect()
    nothing_left()


class QemuNbd:
    """Serves the LUN as /dev/nbd0."""

    def __init__(self, target: TargetProcess, place: Path) -> None:
        url = f"{target.url}/0".replace("iser://", "iscsi://")
        self._pid = place / "pid"
        self._words = ["qemu-nbd", "--format=raw", "--cache=none", f"--pid-file={self._pid}"]
        self._words += [f"--connect={DEVICE}", url]

    def start(self) -> None:
        run(*self._words)
        until_blocking(lambda: block("nbd0", "size") == str(SIZE // 512))

    def kill(self) -> None:
        pid = int(self._pid.read_text())
        os.kill(pid, signal.SIGKILL)
        until_blocking(lambda: ended(pid))

    def succeed(self) -> None:
        """Try to start another one, on a device that is still in use."""
        subprocess.run(self._words, capture_output=True, check=False, timeout=SLOW_S)


def disconnect() -> None:
    subprocess.run(
        ["qemu-nbd", "--disconnect", str(DEVICE)], capture_output=True, check=False, timeout=SLOW_S
    )
    until_blocking(lambda: not connected())


def written(file: Path) -> bool:
    """Write a file, and wait until it is on the disk; whether that succeeded."""
    done = subprocess.run(
        ["dd", "if=/dev/zero", f"of={file}", "bs=64k", "count=1", "conv=fsync"],
        capture_output=True,
        check=False,
        timeout=SLOW_S,
    )
    return done.returncode == 0


@pytest.mark.long
def test_it_is_killed_under_a_file_system(target: TargetProcess, tmp_path: Path) -> None:
    """Programs see errors at once, and the mount does not come to life again, whatever server
    comes."""
    server = QemuNbd(target, tmp_path)
    server.start()
    run("mkfs.ext4", "-q", "-F", DEVICE)
    with mounted(DEVICE, tmp_path / "place") as place:
        assert written(place / "before")
        server.kill()
        assert not written(place / "without")
        server.succeed()
        assert not written(place / "with another")
    disconnect()
    server.start()
    subprocess.run(["e2fsck", "-f", "-y", str(DEVICE)], capture_output=True, check=False)
    with mounted(DEVICE, tmp_path / "place") as place:
        assert written(place / "again")
