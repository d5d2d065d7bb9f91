"""A kernel's NBD devices, as far as attach and detach see them: files instead of sysfs and /dev,
and a process per device that holds the connections, as the kernel does. A real kernel is in
tests/lab.

Run as a program, this module is that process.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

SECTOR = 512
_MOST = 16  # sockets of a device
_TOLD = ("size", "timeout", "dead_timeout", "backend")
_END_S = 60


class FakeKernel:
    """The fake kernel's files. ``root``: directory of all files. ``refuse``: names of devices that
    cannot be connected."""

    def __init__(self, root: Path, devices: int = 3) -> None:
        self.root = root
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

    def number_processes_from(self, first: int) -> None:
        """Those that attach are in a namespace of processes; a process has ``first`` more as its
        number outside."""
        (self.root / "first").write_text(str(first))

    def refuse(self, name: str) -> None:
        (self.root / f"refuse-{name}").touch()

    def spoil(self, name: str) -> None:
        """Something was written to the device, and cannot be flushed."""
        statistics = ["0"] * 17
        statistics[6] = "8"
        (self.root / "sys" / "block" / name / "stat").write_text(" ".join(statistics))
        (self.root / f"bad-{name}").touch()

    def synced(self, name: str) -> bool:
        """Whether the device was flushed while it was connected."""
        return (self.root / f"synced-{name}").exists()

    def connected(self) -> list[str]:
        return sorted(path.parent.name for path in self.root.glob("sys/block/*/pid"))

    def size(self, name: str) -> int:
        return int((self.root / "sys" / "block" / name / "size").read_text()) * SECTOR

    def attribute(self, name: str, attribute: str) -> str:
        return (self.root / "sys" / "block" / name / attribute).read_text()

    def end(self) -> None:
        for holder in self.root.glob("holder-*"):
            _kill(int(holder.read_text()))


class FakeNetlink:
    """Implements KernelClient over the files of ``root``. Beside those of sysfs, a connected device
    has a file for each of its settings."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def _directory(self, index: int) -> Path:
        return self._root / "sys" / "block" / f"nbd{index}"

    def connect(self, index: int, settings: Any) -> None:
        """The process that holds the connections does it, and so does it whole: a kernel's system
        call does not end in the middle when its caller is killed."""
        if (self._root / f"refuse-nbd{index}").exists():
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        told = {name: getattr(settings, name) for name in _TOLD}
        words = [self._root, f"nbd{index}", os.getpid(), json.dumps(told), *settings.sockets]
        holder = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, *map(str, words)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=settings.sockets,
            start_new_session=True,
        )
        assert holder.stdout is not None
        with holder.stdout as pipe:
            said = pipe.read()
        holder.returncode = 0  # it outlives this process; else Python warns of that
        if said != b"connected":
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    def reconfigure(self, index: int, settings: Any) -> None:
        directory = self._directory(index)
        backend = directory / "backend"
        if not (directory / "pid").exists():
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        if backend.read_text() != settings.backend:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        _write(directory, {name: getattr(settings, name) for name in _TOLD})
        if settings.sockets:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as orders:
                orders.settimeout(_END_S)
                orders.connect(str(self._root / f"orders-nbd{index}"))
                socket.send_fds(orders, [b"take"], list(settings.sockets))
                orders.recv(1)

    def disconnect(self, index: int) -> None:
        directory = self._directory(index)
        holder = self._root / f"holder-nbd{index}"
        if holder.exists():
            _kill(int(holder.read_text()))
            holder.unlink()
        (directory / "size").write_text("0")
        for name in ("backend", "timeout", "dead_timeout", "pid"):
            (directory / name).unlink(missing_ok=True)


def _write(directory: Path, told: dict[str, Any]) -> None:
    """Show settings in sysfs, which has the size in sectors."""
    for name, value in told.items():
        if value is not None:
            (directory / name).write_text(str(value // SECTOR if name == "size" else value))


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _dead(sock: socket.socket) -> bool:
    try:
        return not sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _connect(root: Path, name: str, client: str, told: str, descriptors: list[int]) -> None:
    """Hold the sockets until the process is killed. New ones take the places of dead ones."""
    held = [socket.socket(fileno=number) for number in descriptors]
    directory = root / "sys" / "block" / name
    mine = directory / f"pid-{os.getpid()}"
    first = root / "first"
    mine.write_text(f"{int(client) + (int(first.read_text()) if first.exists() else 0)}\n")
    try:
        if os.getppid() != int(client):
            return  # killed before it came to the system call
        os.link(mine, directory / "pid")
    except FileExistsError:
        return
    finally:
        mine.unlink()
    orders = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    place = root / f"orders-{name}"
    place.unlink(missing_ok=True)
    orders.bind(str(place))
    orders.listen()
    (root / f"holder-{name}").write_text(str(os.getpid()))
    _write(directory, json.loads(told))
    os.write(1, b"connected")
    os.close(1)
    while True:
        order, _ = orders.accept()
        _, numbers, _, _ = socket.recv_fds(order, 16, _MOST)
        fresh = [socket.socket(fileno=number) for number in numbers]
        for at, sock in enumerate(held):
            if fresh and _dead(sock):
                sock.close()
                held[at] = fresh.pop()
        for sock in fresh:
            sock.close()
        order.send(b".")
        order.close()


if __name__ == "__main__":
    place, device, pid, settings, *numbers = sys.argv[1:]
    _connect(Path(place), device, pid, settings, [int(number) for number in numbers])
