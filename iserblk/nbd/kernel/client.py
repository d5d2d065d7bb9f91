"""Runs nbd-client, which connects a device of the kernel to its server, and disconnects it."""

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

_TIMEOUT_S = 30.0  # for one run of nbd-client, which normally takes milliseconds
_USABLE_S = 10.0  # until the kernel shows the size
_SETTLE_S = 15
_BLOCKS = (512, 1024, 2048, 4096)  # block sizes that the kernel's client supports, in bytes

# The shell writes its process id to a file, then becomes nbd-client, which keeps that id.
_REMEMBER = 'echo $$ >"$1"; shift; exec "$@"'


def nbd_client() -> str:
    return program("nbd-client", "the package nbd-client")


def kernel_timeout(io_timeout: float) -> int:
    """Seconds after which the kernel gives a connection up.

    This is for a server that hangs. A healthy server answers every command within io-timeout and
    two steps of task management, and one request may be a few commands. The kernel repeats a
    request that it gave up on another connection. If the first connection were not dead, an old
    write could then land after a newer write. So this timeout is much longer than any of ours.
    """
    return int(2 * io_timeout) + 30


def connect(home: Home, block_size: int, connections: int, io_timeout: float) -> None:
    """Connect the device of ``home`` to its server. ``block_size``: bytes. Raises IserblkError; the
    device is then not connected, or another process has connected it (``home.is_ours``)."""
    words = [nbd_client(), "-unix", str(home.socket), str(home.device.path), "-name", ""]
    words += ["-block-size", str(min(block_size, _BLOCKS[-1]))]
    words += ["-connections", str(connections), "-timeout", str(kernel_timeout(io_timeout))]
    with signals_held():
        done = _run(["/bin/sh", "-c", _REMEMBER, "sh", str(home.client_pid), *words])
    if done.returncode or not home.is_ours():
        raise IserblkError(f"{home.device.path}: nbd-client could not connect it: "
                           f"{last_line(done.stderr)}; `dmesg` may say more")  # fmt: skip


def wait_until_usable(device: Device, size: int) -> None:
    """Wait until the kernel shows ``size`` bytes, and udev has made links and partitions. Raises
    IserblkError if the size does not come; udev that is slow is no error."""
    deadline = time.monotonic() + _USABLE_S
    while device.size != size:
        if time.monotonic() > deadline:
            raise IserblkError(f"{device.path}: connected, but the kernel shows {device.size} bytes"
                               f" instead of {size}; `dmesg` may say more")  # fmt: skip
        time.sleep(0.02)
    if Path("/run/udev/control").exists():
        settle = _run([program("udevadm", "udev"), "settle", f"--timeout={_SETTLE_S}"])
        if settle.returncode:
            log.info("%s: udev is still busy after %d s", device.path, _SETTLE_S)


def disconnect(device: Device) -> None:
    """Disconnect the device: requests that wait in the kernel fail. An error is only logged."""
    done = _run([nbd_client(), "-d", str(device.path)])
    if done.returncode:
        log.warning("%s: nbd-client -d: %s", device.path, last_line(done.stderr))


def _run(words: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a program that ends quickly. Raises IserblkError when it has not ended in time."""
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
        raise IserblkError(
            f"{' '.join(words[-3:])}: still running after {_TIMEOUT_S:g} s"
        ) from None
