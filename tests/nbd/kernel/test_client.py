"""What the kernel's NBD client is told: its time limits, a LUN that has grown, another server."""

from __future__ import annotations

import dataclasses
import errno
import math
import os
import socket
from pathlib import Path

import pytest

from iserblk.errors import BadArgument, IserblkError
from iserblk.nbd.kernel import client
from iserblk.nbd.kernel.client import dead_timeout, kernel_seconds, kernel_timeout
from iserblk.nbd.kernel.device import SECTOR, Device, Directories
from iserblk.nbd.kernel.netlink import Settings
from iserblk.nbd.kernel.state import Home, State
from tests.support.descriptors import descriptors, descriptors_to_begin_with

SIZE = 1 << 20


@pytest.mark.parametrize("io_timeout", [1, 2.5, 30, 86400])
def test_our_error_comes_before_the_kernels(io_timeout: float) -> None:
    """The kernel's time limit is above io-timeout and twice five seconds of task management
    (deadlines.py)."""
    assert kernel_timeout(io_timeout, 2) >= io_timeout + 2 * 5 + 10


def test_for_ever_is_a_time_that_the_kernel_can_count() -> None:
    """In jiffies, a thousand a second at most, in an int."""
    seconds = kernel_seconds(math.inf)
    assert kernel_timeout(seconds, 4) * 1000 < 1 << 31
    assert seconds > 10 * 86400 and kernel_seconds(86400.0) == 86400


@pytest.mark.parametrize("io_timeout", [1, 2.5, 30, 86400])
def test_a_successor_may_wait_for_the_target(io_timeout: float) -> None:
    assert dead_timeout(io_timeout) >= io_timeout + 10


class Recorder:
    """Implements KernelClient: notes what it is told. ``error``: of every answer, if not 0."""

    def __init__(self, error: int = 0) -> None:
        self.told: list[tuple[str, int, Settings | None]] = []
        self.error = error

    def _note(self, what: str, index: int, settings: Settings | None) -> None:
        self.told.append((what, index, settings))
        if self.error:
            raise OSError(self.error, os.strerror(self.error))

    def connect(self, index: int, settings: Settings) -> None:
        self._note("connect", index, settings)

    def reconfigure(self, index: int, settings: Settings) -> None:
        self._note("reconfigure", index, settings)

    def disconnect(self, index: int) -> None:
        self._note("disconnect", index, None)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    kernel = Recorder()
    monkeypatch.setattr(client, "KERNEL", kernel)
    return kernel


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """Of a device of SIZE bytes, on which the LUN ``naa.1`` is attached."""
    places = Directories(tmp_path / "sys", tmp_path / "dev", tmp_path / "proc", tmp_path / "run")
    directory = places.sys / "block" / "nbd7"
    directory.mkdir(parents=True)
    places.run.mkdir()
    (directory / "size").write_text(f"{SIZE // SECTOR}\n")
    (directory / "backend").write_text("naa.1\n")
    home = Home(Device("nbd7", places))
    home.make(State("iser://192.0.2.1/iqn.2026-11.example:disk/0", 30.0, 0, "naa.1", 4))
    return home


def test_growth(home: Home, kernel: Recorder) -> None:
    client.resize(home, SIZE * 2)
    assert kernel.told == [("reconfigure", 7, Settings(size=SIZE * 2, backend="naa.1"))]


def test_a_device_does_not_shrink(home: Home, kernel: Recorder) -> None:
    with pytest.raises(IserblkError, match=f"nbd7: the LUN has shrunk to {SIZE - 512} bytes"):
        client.resize(home, SIZE - 512)
    assert kernel.told == []


def test_requests_wait_no_more(home: Home, kernel: Recorder) -> None:
    client.wait_no_more(home)
    assert kernel.told == [("reconfigure", 7, Settings(timeout=1, dead_timeout=0, backend="naa.1"))]
    kernel.error = errno.EINVAL  # it is not connected any more
    client.wait_no_more(home)


class Taker(Recorder):
    """A kernel that sends requests on a connection that it is given, and fails them when the
    connection has ended. ``sent``: the socket that it keeps."""

    def __init__(self, request: bytes) -> None:
        super().__init__()
        self._request = request
        self.left = 3  # looks until it has failed them
        self.sent: socket.socket | None = None

    def reconfigure(self, index: int, settings: Settings) -> None:
        super().reconfigure(index, settings)
        (descriptor,) = settings.sockets
        self.sent = socket.socket(fileno=os.dup(descriptor))
        self.sent.sendall(self._request)

    def under_way(self) -> int:
        assert self.sent
        self.sent.settimeout(0)
        if self._ended(self.sent):
            self.left -= 1
        return max(0, self.left)

    @staticmethod
    def _ended(sock: socket.socket) -> bool:
        try:
            return sock.recv(1) == b""  # (an error, if the other end has not read everything)
        except BlockingIOError:
            return False


def test_all_fail(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that wait get a connection, which takes all that is sent there, and ends."""
    kernel = Taker(bytes(1 << 16))
    monkeypatch.setattr(client, "KERNEL", kernel)
    monkeypatch.setattr(Device, "under_way", lambda device: kernel.under_way())
    before = descriptors_to_begin_with()
    client.fail_all(home)
    ((what, _, settings),) = kernel.told
    assert what == "reconfigure" and settings
    assert dataclasses.replace(settings, sockets=()) == Settings(
        timeout=1, dead_timeout=0, backend="naa.1"
    )
    assert kernel.sent and kernel.left == 0
    kernel.sent.close()
    assert descriptors() == before


def test_what_the_kernel_refuses(home: Home, kernel: Recorder) -> None:
    kernel.error = errno.EINVAL
    with pytest.raises(BadArgument, match="nbd7: another LUN is attached there"):
        client.reconfigure(home.device, Settings(backend="naa.2"))
    with pytest.raises(IserblkError, match="nbd7: the kernel could not reconfigure it: Invalid"):
        client.reconfigure(home.device, Settings(backend="naa.1"))


def test_a_device_that_cannot_be_disconnected(
    home: Home, kernel: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    client.disconnect(home.device)
    assert kernel.told == [("disconnect", 7, None)]
    assert not caplog.records
    kernel.error = errno.EPERM
    client.disconnect(home.device)
    assert "nbd7: the kernel could not disconnect it: Operation not permitted" in caplog.text
