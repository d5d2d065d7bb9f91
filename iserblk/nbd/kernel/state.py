"""The state of a device from attach to detach, on disk, and the lock for both commands."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from iserblk import files
from iserblk.disk.wish import Wish
from iserblk.errors import Busy, IserblkError
from iserblk.metrics.address import socket_of
from iserblk.nbd.kernel.device import Device
from iserblk.pidfile import read_pid


@dataclass(slots=True, frozen=True)
class State:
    """What detach, and a successor of the server, need to know. ``url``: the LUN, without user info
    and options. ``io_timeout``: seconds, see ``client.kernel_seconds``. ``changed``:
    ``Device.changed()`` before the attach. ``backend``: names the LUN. ``connections``: their
    number. ``by_nbdkit``: the server is nbdkit. ``isid``: of the server's session, in hexadecimal
    digits. ``reserved``: the server has reserved the LUN. ``queue``: ``Device.queue()`` before the
    attach."""

    url: str
    io_timeout: float
    changed: int
    backend: str = ""
    connections: int = 1
    isid: str = ""
    by_nbdkit: bool = False
    reserved: bool = False
    queue: Mapping[str, str] = field(default_factory=dict)


class Home:
    """The state directory of one device, and the paths of the files in it."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.directory = device.directories.run / device.name
        self.socket = self.directory / "socket"
        self.successors = self.directory / "successors"
        self.server_pid = self.directory / "server.pid"
        self.client_pid = self.directory / "client.pid"
        self.owed = self.directory / "owed"  # see ``Owed``
        self.wish = Wish(self.directory / "ending")
        self.metrics = socket_of(str(device.path), device.directories.run)
        self._state = self.directory / "state.json"
        self._udev = self.directory / "udev"  # scripts/systemd/59-iserblk.rules reads it

    def exists(self) -> bool:
        return self.directory.is_dir()

    def make(self, state: State) -> None:
        """Create the directory with ``state``. What a killed attach left there is removed; the
        caller has ended its processes before. Raises IserblkError."""
        self.remove()
        try:
            self.directory.mkdir(mode=0o700)
        except OSError as error:
            raise IserblkError(f"{self.directory}: {error.strerror}") from None
        self.change(state)

    def change(self, state: State) -> None:
        """Replace the state by ``state``, in one step. Raises IserblkError."""
        part = self._state.with_suffix(".new")
        try:
            part.write_text(json.dumps(asdict(state)))
            part.rename(self._state)
        except OSError as error:
            raise IserblkError(f"{self._state}: {error.strerror}") from None

    def tell_udev(self, properties: Mapping[str, str]) -> None:
        """Write the properties that udev is to have of the device, from its next event on; in one
        step, as udev may read them at any time. Raises IserblkError."""
        lines = [f"{name}={value}\n" for name, value in properties.items()]
        part = self._udev.with_suffix(".new")
        try:
            part.write_text("".join(lines))
            part.rename(self._udev)
        except OSError as error:
            raise IserblkError(f"{self._udev}: {error.strerror}") from None

    def remove(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)
        with contextlib.suppress(OSError):
            self.metrics.unlink()  # a server that was killed leaves its socket

    def state(self) -> State:
        """The state given to ``make``; harmless defaults if the file is missing or incomplete."""
        try:
            return State(**json.loads(files.read_text(self._state)))
        except (OSError, ValueError, TypeError, RecursionError):
            return State("an unknown LUN", 30.0, 0)

    def is_ours(self) -> bool:
        """Whether the device is connected, and iserblk connected it. (A process id can come
        again; the name of the LUN tells devices apart, where the kernel shows it.)"""
        device = self.device
        client = device.client
        if not client or client != read_pid(self.client_pid):
            return False
        return device.backend in ("", self.state().backend)


def write_pid(path: Path, pid: int) -> None:
    """Write a pid file, in one step."""
    part = path.with_suffix(".new")
    part.write_text(f"{pid}\n")
    part.rename(path)


@contextlib.contextmanager
def locked(device: Device) -> Iterator[Home]:
    """Hold the lock of ``device`` during an attach or detach. The kernel frees it when the process
    ends, however that happens. Raises Busy when another process holds it."""
    run = device.directories.run
    try:
        run.mkdir(mode=0o755, exist_ok=True)
        lock = os.open(run / f"{device.name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise IserblkError(f"{run}: {error.strerror}") from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Busy(f"{device.path}: another attach or detach is under way; "
                       "wait until it has ended") from None  # fmt: skip
        yield Home(device)
    finally:
        os.close(lock)
