"""attach --replace: a device gets another server."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import NoReturn

import pytest

from iserblk.metrics.address import socket_of
from iserblk.nbd.kernel import attaching, client, detaching
from iserblk.nbd.kernel.attaching import Lun, replace
from iserblk.nbd.kernel.device import Device, Directories
from iserblk.nbd.kernel.links import flush
from iserblk.nbd.kernel.orders import NoHandOver
from iserblk.nbd.kernel.owed import Owed
from iserblk.nbd.kernel.state import Home
from tests.nbd.kernel.attachers import SIZE, Attacher, path_of
from tests.nbd.kernel.fake_kernel import FakeKernel, FakeNetlink
from tests.support.nbdkit import need
from tests.support.target import END_S, TargetProcess, running_target


@pytest.mark.parametrize("how", ["alive", "killed"])
def test_a_successor(
    how: str, tool: Attacher, kernel: FakeKernel, target: TargetProcess, tmp_path: Path
) -> None:
    tool.good("attach", f"{target.url}/0", "nbd0", "--connections", "3")
    (first,) = tool.servers()
    if how == "killed":
        os.kill(first, signal.SIGKILL)
    said = tool.good("attach", "--replace", f"{target.url}/0?io-timeout=7", "nbd0")
    assert said == f"ready {path_of(kernel, 'nbd0')}\n"
    (second,) = tool.servers()
    assert second != first
    assert kernel.connected() == ["nbd0"]
    assert (kernel.attribute("nbd0", "timeout"), kernel.size("nbd0")) == ("44", SIZE)
    tool.good("detach", "nbd0")


def test_with_one_connection_the_kernel_never_gives_it_up(
    tool: Attacher, kernel: FakeKernel, target: TargetProcess
) -> None:
    """It looks after each request instead, and sends it again if its connection was replaced. The
    setting of the time limit would change how often it looks."""
    queue = kernel.root / "sys/block/nbd0/queue"
    queue.mkdir()
    tool.good("attach", f"{target.url}/0", "nbd0", "--connections", "1")
    assert kernel.attribute("nbd0", "timeout") == "0"
    assert (queue / "io_timeout").read_text() == "5000\n"
    (queue / "io_timeout").write_text("30000\n")
    tool.good("attach", "--replace", f"{target.url}/0", "nbd0")
    assert kernel.attribute("nbd0", "timeout") == "0"
    assert (queue / "io_timeout").read_text() == "5000\n"
    tool.good("detach", "nbd0")


def test_a_successor_reinstates_the_session(
    tool: Attacher, kernel: FakeKernel, target: TargetProcess
) -> None:
    """What its predecessor left at the target ends with that session, and writes nothing later."""
    tool.good("attach", f"{target.url}/0", "nbd0")
    first = _isid(tool)
    (server,) = tool.servers()
    os.kill(server, signal.SIGKILL)
    tool.good("attach", "--replace", f"{target.url}/0", "nbd0")
    assert _isid(tool) == first
    tool.good("detach", "nbd0")
    tool.good("attach", f"{target.url}/0", "nbd0")
    assert _isid(tool) != first
    tool.good("detach", "nbd0")


def _isid(tool: Attacher) -> str:
    """What the server of the only device was told."""
    (server,) = tool.servers()
    words = Path(f"/proc/{server}/cmdline").read_text().split("\0")
    (found,) = [word for word in words if word.startswith("isid=")]
    return found


def test_from_nbdkit_to_our_server_and_back(
    tool: Attacher, kernel: FakeKernel, target: TargetProcess
) -> None:
    need("nbdkit")
    tool.good("attach", f"{target.url}/1", "nbd0")
    tool.by_nbdkit = not tool.by_nbdkit
    tool.good("attach", "--replace", f"{target.url}/1", "nbd0")
    assert len(tool.servers()) == 1
    tool.good("detach", "nbd0")


def test_where_nothing_is_attached(
    tool: Attacher, kernel: FakeKernel, target: TargetProcess
) -> None:
    """It is an attach as any other: so a unit of systemd can always say --replace."""
    tool.good("attach", "--replace", f"{target.url}/0", "nbd1")
    assert kernel.connected() == ["nbd1"]
    tool.good("detach", "nbd1")
    kernel.connect_other("nbd2")
    line = tool.refused(28, "attach", "--replace", f"{target.url}/0", "nbd2")
    assert "in use by another program" in line
    (kernel.root / "sys/block/nbd2/pid").unlink()


def test_another_lun_is_refused(tool: Attacher, kernel: FakeKernel, target: TargetProcess) -> None:
    tool.good("attach", f"{target.url}/0", "nbd0")
    before = tool.servers()
    line = tool.refused(7, "attach", "--replace", f"{target.url}/1", "nbd0")
    assert f"{target.url}/0 is attached there, and {target.url}/1 is another LUN" in line
    assert "name the device" in tool.refused(7, "attach", "--replace", f"{target.url}/0")
    assert tool.servers() == before
    tool.good("detach", "nbd0")


def test_a_lun_that_has_grown(tool: Attacher, kernel: FakeKernel, tmp_path: Path) -> None:
    place = tmp_path / "lun"
    with running_target([f"{place}:size={SIZE}"], tmp_path / "log") as first:
        tool.good("attach", f"{first.url}/0", "nbd0")
        listen = first.listen
    with place.open("r+b") as file:
        file.truncate(SIZE * 2)
    second = TargetProcess([str(place)], tmp_path / "log", listen)
    try:
        tool.good("attach", "--replace", f"{second.url}/0", "nbd0")
        assert kernel.size("nbd0") == SIZE * 2
        tool.good("detach", "nbd0")
    finally:
        second.stop()


def test_in_the_foreground_another_process_replaces(
    tool: Attacher, kernel: FakeKernel, target: TargetProcess
) -> None:
    process = tool.start("attach", "-f", f"{target.url}/0", "nbd0")
    assert process.stdout is not None
    process.stdout.readline()
    tool.good("attach", "--replace", f"{target.url}/0", "nbd0")
    assert process.poll() is None
    process.terminate()
    assert process.communicate(timeout=END_S) == ("", "")
    assert process.returncode == 0
    assert kernel.connected() == []


def test_a_reserved_lun(tool: Attacher, kernel: FakeKernel, target: TargetProcess) -> None:
    url = f"{target.url}/2?reserve=exclusive"
    tool.good("attach", url, "nbd0")
    tool.good("attach", "--replace", url, "nbd0")
    tool.good("attach", "--replace", f"{target.url}/2", "nbd0", "-o", "reserve=exclusive")
    tool.good("detach", "nbd0")


def test_a_server_that_hands_nothing_over(
    kernel: FakeKernel, target: TargetProcess, tmp_path: Path
) -> None:
    """It is told to end, and a line says what that means."""
    tool = Attacher(kernel)
    tool.good("attach", f"{target.url}/0", "nbd0")
    (first,) = tool.servers()
    (tool.run / "nbd0" / "successors").unlink()
    status, out, err = tool.ended("attach", "--replace", f"{target.url}/0", "nbd0")
    assert (status, out) == (0, f"ready {path_of(kernel, 'nbd0')}\n")
    (line,) = err.splitlines()
    assert "has not handed over its connections (No such file or directory)" in line
    assert "late by up to 5 s" in line
    (second,) = tool.servers()
    assert second != first
    tool.good("detach", "nbd0")
    tool.assert_nothing_left()


@pytest.mark.parametrize("by_nbdkit", [False, True])
def test_a_server_that_has_ended_owing(
    kernel: FakeKernel, target: TargetProcess, by_nbdkit: bool
) -> None:
    """Writes were lost, and the kernel has not heard of it. The successor, which does not get to
    tell it either, leaves that to ``detach``."""
    if by_nbdkit:
        need("nbdkit")
    tool = Attacher(kernel)
    tool.good("attach", f"{target.url}/0", "nbd0")
    (server,) = tool.servers()
    os.kill(server, signal.SIGKILL)
    (tool.run / "nbd0" / "owed").write_text("1 0\n")
    words = ["--nbdkit"] if by_nbdkit else []
    status, _, err = tool.ended("attach", "--replace", *words, f"{target.url}/0", "nbd0")
    assert status == 0 and "/nbd0: writes were lost, or the last flush has failed" in err
    line = tool.refused(1, "detach", "nbd0")
    assert "detached, but the last flush failed (the target has lost writes)" in line
    tool.assert_nothing_left()


@pytest.mark.logs("has not handed over", "was killed", "the next flush fails")
def test_a_server_that_has_to_be_killed(
    kernel: FakeKernel, target: TargetProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has not flushed, and its journal is gone: its successor fails the next flush."""

    def stopped(*_: object, **__: object) -> NoReturn:
        raise NoHandOver("it does not answer")

    tool = Attacher(kernel)
    tool.good("attach", f"{target.url}/0?io-timeout=1", "nbd0")
    (first,) = tool.servers()
    os.kill(first, signal.SIGSTOP)
    places = Directories(kernel.root / "sys", kernel.root / "dev", Path("/proc"), tool.run)
    monkeypatch.setattr(client, "KERNEL", FakeNetlink(kernel.root))
    monkeypatch.setattr(detaching, "PATIENCE_S", 0.0)
    monkeypatch.setattr("iserblk.nbd.kernel.server.succeeded", stopped)
    device = Device("nbd0", places)
    name = Home(device).state().backend
    url = f"{target.url}/0"
    assert replace(Lun([url], url, {}, 1.0, SIZE, 512, 1 << 20, name), device)
    (second,) = tool.servers()
    assert second != first
    line = tool.refused(1, "detach", "nbd0")
    assert "detached, but the last flush failed (the target has lost writes)" in line
    tool.assert_nothing_left()


@pytest.mark.logs("nbdkit did not flush", "the next flush fails")
@pytest.mark.parametrize("how", ["flushes", "hangs", "has nothing to flush", "is dead"])
def test_nbdkit_is_killed_behind_a_flush(
    how: str, kernel: FakeKernel, target: TargetProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the target has lost with its cache nbdkit is to write again, and that is in its
    memory."""
    need("nbdkit")
    tool = Attacher(kernel, by_nbdkit=True)
    tool.good("attach", f"{target.url}/0?io-timeout=1", "nbd0")
    places = Directories(kernel.root / "sys", kernel.root / "dev", Path("/proc"), tool.run)
    device = Device("nbd0", places)
    home = Home(device)
    (server,) = tool.servers()
    if how == "is dead":
        os.kill(server, signal.SIGKILL)
    elif how != "flushes":
        os.kill(server, signal.SIGSTOP)
    if how != "has nothing to flush":
        written = device.changed() + 8
        monkeypatch.setattr(Device, "changed", lambda _device: written)
    monkeypatch.setattr(client, "KERNEL", FakeNetlink(kernel.root))
    monkeypatch.setattr(detaching, "PATIENCE_S", 0.0)
    alive, patience, owe = [], [], Owed.owe

    def flushed(path: Path, within_s: float) -> str:
        patience.append(within_s)
        return flush(path, within_s)

    def owed(self: Owed) -> None:
        alive.extend(tool.servers())
        owe(self)

    monkeypatch.setattr(attaching, "flush", flushed)
    monkeypatch.setattr(Owed, "owe", owed)
    url = f"{target.url}/0"
    lun = Lun([url], url, {}, 1.0, SIZE, 512, 1 << 20, home.state().backend, by_nbdkit=True)
    assert replace(lun, device)
    assert home.owed.exists() is (how == "hangs")
    assert patience == ([1.0] if how in ("hangs", "flushes") else [])  # io-timeout
    assert alive == []  # nbdkit keeps the file as long as it lives
    if how == "hangs":
        assert "the target has lost writes" in tool.refused(1, "detach", "nbd0")
    else:
        tool.good("detach", "nbd0")
    tool.assert_nothing_left()


def test_the_kernel_keeps_its_connections(
    kernel: FakeKernel, target: TargetProcess, tmp_path: Path
) -> None:
    """From one living server to the next: the holder of the connections is given no new ones."""
    tool = Attacher(kernel)
    tool.good("attach", f"{target.url}/0", "nbd0", "--connections", "3")
    (kernel.root / "orders-nbd0").unlink()  # by which new ones would come
    for _ in range(3):
        (first,) = tool.servers()
        tool.good("attach", "--replace", f"{target.url}/0", "nbd0")
        (second,) = tool.servers()
        assert second != first
        assert (tool.run / "nbd0" / "server.pid").read_text() == f"{second}\n"
        assert socket_of(path_of(kernel, "nbd0"), tool.run).exists()  # of its metrics
    tool.good("detach", "nbd0")
    tool.assert_nothing_left()
