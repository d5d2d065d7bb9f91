"""What is kept about a device from attach to detach, and the lock around both."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from iserblk.errors import Busy, IserblkError
from iserblk.metrics.address import socket_of
from iserblk.nbd.kernel.device import Device


@dataclass(slots=True, frozen=True)
class State:
    """``url``: without user info and options. ``io_timeout``: seconds. ``changed``: what
    ``Device.changed`` was before."""

    url: str
    io_timeout: float
    changed: int


class Home:
    """The directory of one device."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.directory = device.places.run / device.name
        self.socket = self.directory / "socket"
        self.nbdkit_pid = self.directory / "nbdkit.pid"
        self.client_pid = self.directory / "client.pid"
        self.metrics = socket_of(str(device.path), device.places.run)
        self._state = self.directory / "state.json"

    def exists(self) -> bool:
        return self.directory.is_dir()

    def make(self, state: State) -> None:
        """Afresh: what a killed attach left is removed (its processes have been ended before)."""
        self.remove()
        try:
            self.directory.mkdir(mode=0o700)
            self._state.write_text(json.dumps(asdict(state)))
        except OSError as error:
            raise IserblkError(f"{self.directory}: {error.strerror}") from None

    def remove(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)
        with contextlib.suppress(OSError):
            self.metrics.unlink()  # a killed nbdkit leaves it

    def state(self) -> State:
        """As it was made; something harmless where an attach was killed before that."""
        try:
            return State(**json.loads(self._state.read_text()))
        except (OSError, ValueError, TypeError):
            return State("an unknown LUN", 30.0, 0)

    def is_ours(self) -> bool:
        """The device is connected, and nobody else did that."""
        client = self.device.client
        return client != 0 and client == read_pid(self.client_pid)


def read_pid(path: Path) -> int:
    """0 when there is none (yet)."""
    try:
        text = path.read_text().strip()
    except OSError:
        return 0
    return int(text) if text.isdigit() else 0


@contextlib.contextmanager
def locked(device: Device) -> Iterator[Home]:
    """Raises Busy when an attach or detach of ``device`` is under way. The lock goes with the
    process, however that ends."""
    run = device.places.run
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
                       "wait for it") from None  # fmt: skip
        yield Home(device)
    finally:
        os.close(lock)
