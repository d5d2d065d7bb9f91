"""In the guest: the initiators, each as it is by default.

Each makes a block device of a LUN of the target that is called as the initiator is.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lablib.setups import TOP

from outagelib.programs import run
from outagelib.services import PORT, iqn

_DEVICE_S = 900.0
_LOOK_S = 0.1
_NBD_DEVICES = 16  # by the module's default
_TOO_SLOW = "is not ready after"


@dataclass(frozen=True)
class Lun:
    """``host``: of the target that is called ``name``; ``number``: of the LUN. ``index``: counts
    the LUNs of the same initiator, from 0."""

    host: str
    name: str
    number: int
    index: int

    @property
    def url(self) -> str:
        return f"iscsi://{self.host}:{PORT}/{iqn(self.name)}/{self.number}"


def _until(condition: Callable[[], object], words: str) -> None:
    """Raises RuntimeError."""
    deadline = time.monotonic() + _DEVICE_S
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{words}: not after {_DEVICE_S:.0f} s")
        time.sleep(_LOOK_S)


def _size(device: Path) -> int:
    return int(Path("/sys/block", device.name, "size").read_text())


def iserblk(lun: Lun) -> Path:
    deadline = time.monotonic() + _DEVICE_S
    while True:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "iserblk.cli", "attach", lun.url],
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": str(TOP)},
            timeout=_DEVICE_S,
        )
        word, _, path = done.stdout.strip().partition(" ")
        if word == "ready":
            return Path(path)
        # Emulated, on a busy machine, Python alone may need the minute that a server has.
        if _TOO_SLOW not in done.stderr or time.monotonic() > deadline:
            raise RuntimeError(f"iserblk attach: {done.stderr.strip()}")


def open_iscsi(lun: Lun) -> Path:
    node = ["iscsiadm", "-m", "node", "-T", iqn(lun.name), "-p", f"{lun.host}:{PORT}"]
    run(*node, "-o", "new")
    run(*node, "--login")
    found: list[Path] = []

    def there() -> bool:
        found[:] = [
            Path("/dev") / disk.name
            for session in Path("/sys/class/iscsi_session").iterdir()
            if (session / "targetname").read_text().strip() == iqn(lun.name)
            for disk in session.glob("device/target*/*/block/sd*")
        ]
        return bool(found) and found[0].exists() and _size(found[0]) > 0

    _until(there, "the disk of open-iscsi")
    return found[0]


def qemu_nbd(lun: Lun) -> Path:
    device = Path(f"/dev/nbd{_NBD_DEVICES - 1 - lun.index}")  # iserblk takes the first that is free
    Path("/run/lock").mkdir(exist_ok=True)  # for its lock of the device
    run("qemu-nbd", "--format=raw", f"--connect={device}", lun.url)
    _until(lambda: _size(device) > 0, "the device of qemu-nbd")
    return device


INITIATORS = {"iserblk": iserblk, "open-iscsi": open_iscsi, "qemu-nbd": qemu_nbd}
# As an initiator calls itself: iserblk and open-iscsi by the machine's name, libiscsi by its own.
OF_QEMU = "iqn.2008-11.org.linux-kvm"
