"""nbd-client: handing nbdkit's connections to the kernel, and taking them back."""

from __future__ import annotations

import logging
import subprocess
import time
from pathlib import Path

from iserblk.errors import IserblkError
from iserblk.nbd.kernel.device import Device
from iserblk.nbd.kernel.programs import last_line, program, signals_held
from iserblk.nbd.kernel.state import Home

log = logging.getLogger(__name__)

_TIMEOUT_S = 30.0  # of one nbd-client; it takes milliseconds
_USABLE_S = 10.0  # until the kernel shows the size
_SETTLE_S = 15
_BLOCKS = (512, 1024, 2048, 4096)  # what the kernel's client can have as its blocks

# The shell writes down who is about to connect before it becomes that.
_REMEMBER = 'echo $$ >"$1"; shift; exec "$@"'


def nbd_client() -> str:
    return program("nbd-client", "the package nbd-client")


def kernel_timeout(io_timeout: float) -> int:
    """Seconds after which the kernel gives a connection up.

    It is for an nbdkit that hangs: as long as that lives, it answers every command within
    io-timeout and two steps of task management, and one request may be a few commands. The kernel
    repeats what it gave up on another connection; had the first one not been dead, an old write
    could land after a newer one. So much later than anything of ours.
    """
    return int(2 * io_timeout) + 30


def connect(home: Home, block_size: int, connections: int, io_timeout: float) -> None:
    """Make the device of ``home`` a client of nbdkit. Raises IserblkError; nothing is connected
    then, unless another process was faster (``home.is_ours``)."""
    words = [nbd_client(), "-unix", str(home.socket), str(home.device.path), "-name", ""]
    words += ["-block-size", str(min(block_size, _BLOCKS[-1]))]
    words += ["-connections", str(connections), "-timeout", str(kernel_timeout(io_timeout))]
    with signals_held():
        done = _run(["/bin/sh", "-c", _REMEMBER, "sh", str(home.client_pid), *words])
    if done.returncode or not home.is_ours():
        raise IserblkError(f"{home.device.path}: nbd-client could not connect it: "
                           f"{last_line(done.stderr)} (dmesg may say more)")  # fmt: skip


def wait_until_usable(device: Device, size: int) -> None:
    """The kernel shows the size, and udev has made links and partitions. Raises IserblkError."""
    deadline = time.monotonic() + _USABLE_S
    while device.size != size:
        if time.monotonic() > deadline:
            raise IserblkError(f"{device.path}: connected, but shows {device.size} bytes "
                               f"instead of {size}")  # fmt: skip
        time.sleep(0.02)
    if Path("/run/udev/control").exists():
        settle = _run([program("udevadm", "udev"), "settle", f"--timeout={_SETTLE_S}"])
        if settle.returncode:
            log.info("%s: udev is still busy after %d s", device.path, _SETTLE_S)


def disconnect(device: Device) -> None:
    """What waits in the kernel fails from here on."""
    done = _run([nbd_client(), "-d", str(device.path)])
    if done.returncode:
        log.warning("%s: nbd-client -d: %s", device.path, last_line(done.stderr))


def _run(words: list[str]) -> subprocess.CompletedProcess[str]:
    """A program that says little and ends at once. Raises IserblkError when it does not."""
    try:
        return subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise IserblkError(f"{' '.join(words[-3:])}: no end after {_TIMEOUT_S:g} s") from None
