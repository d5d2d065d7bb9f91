"""Connects a device of the kernel to its server, gives it another server, and disconnects it."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

from iserblk.errors import BadArgument, IserblkError
from iserblk.loop.blocking import sleep
from iserblk.loop.clock import monotonic
from iserblk.nbd.kernel.device import Device
from iserblk.nbd.kernel.links import Link, kept, open_links
from iserblk.nbd.kernel.netlink import KernelClient, Netlink, Settings
from iserblk.nbd.kernel.programs import program, signals_held
from iserblk.nbd.kernel.state import Home, State, write_pid

log = logging.getLogger(__name__)

KERNEL: KernelClient = Netlink()
_USABLE_S = 10.0  # until the kernel shows the size
_SETTLE_S = 15
_UDEVADM_S = 30.0
_TAKEN_S = 15.0  # until the kernel has noticed that the old connections are dead
_FAILED_S = 10.0  # until no request is under way whose server has died
_SENT_S = 0.25  # for the next request of those that have waited for a connection
_SEND_BYTES = 1 << 20
_POLL_S = 0.02
_LOOK_MS = 5_000  # after a request that may have been lost with its server
_FOREVER_S = 1_000_000.0  # eleven days: twice as many, in jiffies, fit into 31 bits
# Bytes of a request of the kernel. By its default it cuts what is longer than 128 KiB: each piece
# would be a command of its own, with its own R2T. Of a server's memory a client has 5 MiB.
LARGEST = 1 << 20
_LEAST = 4096
_BLOCKS = (512, 1024, 2048, 4096)  # block sizes that the kernel's client supports, in bytes


def kernel_seconds(io_timeout: float) -> float:
    """``io_timeout`` as the kernel is told, and as ``State`` has it. For ever: _FOREVER_S, because
    the kernel counts in jiffies; 0 would not be for ever, as a device with several connections
    gives each of them up after 30 seconds then."""
    return min(io_timeout, _FOREVER_S)


def kernel_timeout(io_timeout: float, connections: int) -> int:
    """Seconds after which the kernel gives a connection up; 0: never.

    With one connection it is never: then the kernel sends a request again only if the connection
    that it was sent on has been replaced, and looks for that every ``_LOOK_MS``.

    With several, it gives up the connection of each request that takes longer. This is for a server
    that hangs. A healthy server answers every command within io-timeout and two steps of task
    management, and one request may be a few commands. The kernel repeats a request that it gave up
    on another connection. If the first connection were not dead, an old write could then land after
    a newer write. So this timeout is much longer than any of ours.
    """
    return 0 if connections == 1 else int(2 * io_timeout) + 30


def dead_timeout(io_timeout: float) -> int:
    """Seconds for which requests wait while there is no server. Its successor has to start, and may
    wait for the target as long as a request may."""
    return int(io_timeout) + 30


def connect(home: Home, block_size: int, max_transfer: int, state: State) -> None:
    """Connect the device of ``home`` to its server. ``block_size``, ``max_transfer``: bytes, of a
    block and of the largest command. Raises IserblkError; the device is then not connected, or
    another process has connected it (``home.is_ours``)."""
    device = home.device
    with open_links(home.socket, state.connections) as links, signals_held():
        write_pid(home.client_pid, os.getpid())
        settings = Settings(
            size=links[0].size,
            block_size=min(block_size, _BLOCKS[-1]),
            flags=links[0].flags,
            timeout=kernel_timeout(state.io_timeout, state.connections),
            dead_timeout=dead_timeout(state.io_timeout),
            backend=state.backend,
            sockets=_descriptors(links),
        )
        try:
            KERNEL.connect(device.index, settings)
            # The kernel shows the number that this process has in the first namespace of processes.
            # It is not known before the call. A process that is killed within the call, and is not
            # in the first namespace, leaves a device that is not known as ours.
            shown = device.client
            if shown not in (0, os.getpid()):
                write_pid(home.client_pid, shown)
            _look_after(device, state)
            device.take_requests_of(max(_LEAST, min(LARGEST, max_transfer)))
        except OSError as error:
            raise IserblkError(f"{device.path}: the kernel could not connect it: "
                               f"{error.strerror}; `dmesg` may say more") from None  # fmt: skip


def replace(home: Home, state: State) -> None:
    """Connect the device of ``home``, whose connections are dead or just about to be, to the server
    that listens there now. Requests that wait go on then.

    The kernel ignores a socket if it does not know yet of a connection that is dead, and does not
    say so. Then the socket closes with our descriptor, so we look, and try again. Raises
    IserblkError when the kernel has taken no socket; with fewer than there were, a warning is
    logged.
    """
    device = home.device
    left = state.connections
    deadline = monotonic() + _TAKEN_S
    # The server must not lose its last client meanwhile: it would end.
    with open_links(home.socket, 1):
        while left and monotonic() < deadline:
            with open_links(home.socket, left) as links:
                inodes = {link.inode for link in links}
                settings = Settings(
                    size=max(links[0].size, device.size),
                    timeout=kernel_timeout(state.io_timeout, state.connections),
                    dead_timeout=dead_timeout(state.io_timeout),
                    backend=state.backend,
                    sockets=_descriptors(links),
                )
                reconfigure(device, settings)
                _look_after(device, state)
            taken = len(kept(inodes))
            left -= taken
            if not taken:
                sleep(_POLL_S)
    if left == state.connections:
        raise IserblkError(f"{device.path}: the kernel keeps its old connections; "
                           "`dmesg` may say more")  # fmt: skip
    if left:
        log.warning("%s: %d of %d connections are new", device.path, state.connections - left,
                    state.connections)  # fmt: skip


def renew(home: Home, state: State, size: int) -> None:
    """Give the device of ``home`` the time limits of ``state``, and ``size`` bytes: another server
    has its connections now. Requests under way keep the limits that they have. Raises
    IserblkError."""
    settings = Settings(
        size=size if size != home.device.size else None,
        timeout=kernel_timeout(state.io_timeout, state.connections),
        dead_timeout=dead_timeout(state.io_timeout),
        backend=state.backend,
    )
    reconfigure(home.device, settings)
    _look_after(home.device, state)


def lateness(state: State) -> int:
    """Seconds, at most, until the kernel sends again what was in a connection that is replaced."""
    return kernel_timeout(state.io_timeout, state.connections) or _LOOK_MS // 1000


def _look_after(device: Device, state: State) -> None:
    if state.connections == 1:
        device.look_after(_LOOK_MS)  # after each NBD_ATTR_TIMEOUT, which sets it, too


def reconfigure(device: Device, settings: Settings) -> None:
    """Raises IserblkError; BadArgument when another LUN is attached there."""
    try:
        KERNEL.reconfigure(device.index, settings)
    except OSError as error:
        if error.errno == errno.EINVAL and device.backend not in ("", settings.backend):
            raise BadArgument(f"{device.path}: another LUN is attached there") from None
        raise IserblkError(f"{device.path}: the kernel could not reconfigure it: "
                           f"{error.strerror}; `dmesg` may say more") from None  # fmt: skip


def resize(home: Home, size: int) -> None:
    """Tell the kernel that the LUN has grown to ``size`` bytes. A device whose LUN has shrunk stays
    as large as it was: a file system on it would not survive the change, and a read behind its end
    fails anyway. Raises IserblkError."""
    device = home.device
    if size < device.size:
        raise IserblkError(f"{device.path}: the LUN has shrunk to {size} bytes from {device.size}")
    reconfigure(device, Settings(size=size, backend=home.state().backend))
    log.info("%s: now has %d bytes", device.path, size)


def wait_no_more(home: Home, sockets: Sequence[int] = ()) -> None:
    """Let requests fail when there is no connection left: new ones at once, and those that the
    server received before it died when the kernel looks after them. An error is only logged.
    ``sockets``: of new connections."""
    try:
        backend = home.state().backend
        settings = Settings(timeout=1, dead_timeout=0, backend=backend, sockets=sockets)
        reconfigure(home.device, settings)
    except IserblkError as error:
        log.info("%s", error)


def fail_all(home: Home) -> None:
    """Let all requests fail whose server has died, and return when they have; after some seconds in
    any case.

    Those that came behind its death wait for a connection, as long as they were told to when they
    began, and the kernel looks after no other request meanwhile. So they get a connection, which
    ends when they have been sent there.
    """
    deadline = monotonic() + _FAILED_S
    near, far = socket.socketpair()
    with near, far:
        far.settimeout(_SENT_S)
        wait_no_more(home, [near.fileno()])
        with contextlib.suppress(TimeoutError):
            while monotonic() < deadline and far.recv(_SEND_BYTES):
                pass
    while home.device.under_way() and monotonic() < deadline:
        sleep(_POLL_S)


def disconnect(device: Device) -> None:
    """Disconnect the device: requests that wait in the kernel fail. An error is only logged."""
    try:
        KERNEL.disconnect(device.index)
    except OSError as error:
        log.warning("%s: the kernel could not disconnect it: %s", device.path, error.strerror)


def _descriptors(links: Sequence[Link]) -> list[int]:
    return [link.sock.fileno() for link in links]


def wait_until_usable(device: Device, size: int) -> None:
    """Wait until the kernel shows ``size`` bytes, and udev has made links and partitions. Raises
    IserblkError if the size does not come; udev that is slow is no error."""
    deadline = monotonic() + _USABLE_S
    while device.size != size:
        if monotonic() > deadline:
            raise IserblkError(f"{device.path}: connected, but the kernel shows {device.size} bytes"
                               f" instead of {size}; `dmesg` may say more")  # fmt: skip
        sleep(_POLL_S)
    if Path("/run/udev/control").exists() and not _settled():
        log.info("%s: udev is still busy after %d s", device.path, _SETTLE_S)


def _settled() -> bool:
    words = [program("udevadm", "udev"), "settle", f"--timeout={_SETTLE_S}"]
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=False,
            timeout=_UDEVADM_S,
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0
