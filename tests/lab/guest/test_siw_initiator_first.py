"""The kernel's initiator logs in to our target over siw, and finds a disk."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.commands import serving

IQN = "iqn.2026-11.lab:ours"
MIB = 1 << 20
PORTAL = f"{os.environ.get('LAB_LISTEN')}:3260"
START_S = 120


def iscsiadm(*arguments: str) -> str:
    command = ["iscsiadm", "-m", "node", "-T", IQN, "-p", PORTAL, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def portal(tmp_path: Path) -> Iterator[str]:
    """Run our target on software iWARP, at the other end of the link; yields its portal."""
    words = ("target", "--listen", PORTAL, "--iqn", IQN, "--lun", f"{tmp_path / 'lun'}:size=32M")
    with serving(*words, log=tmp_path / "log", namespace=os.environ["LAB_NETNS"]) as target:
        yield PORTAL
        target.process.terminate()
        assert target.process.wait(START_S) in (0, 143)


def disk() -> Path:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        for device in Path("/sys/block").glob("sd*"):
            if (device / "device" / "vendor").read_text().strip() == "ISERBLK":
                return Path("/dev") / device.name
        time.sleep(0.2)
    pytest.fail(f"no disk after {START_S} s: {os.listdir('/sys/block')}")


def test_a_disk_appears_and_holds_data(portal: str) -> None:
    iscsiadm("-o", "new", "-I", "iser")
    iscsiadm("--login")
    try:
        device = disk()
        data = os.urandom(4 * MIB)
        with device.open("r+b", buffering=0) as file:
            file.write(data)
            os.fsync(file.fileno())
        subprocess.run(["blockdev", "--flushbufs", str(device)], check=True)
        with device.open("rb", buffering=0) as file:
            read = b"".join(iter(lambda: file.read(MIB), b""))
        assert read[: len(data)] == data and len(read) == 32 * MIB
    finally:
        iscsiadm("--logout")
