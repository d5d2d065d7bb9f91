"""detach: of devices in use, and of those that another process has taken."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
from pathlib import Path

import pytest
import trio

from iserblk.errors import Busy, IserblkError
from iserblk.nbd.kernel import client
from iserblk.nbd.kernel.detaching import detach, force
from iserblk.nbd.kernel.device import Device, Directories
from iserblk.nbd.kernel.state import Home
from tests.nbd.kernel.attachers import Attacher, path_of
from tests.nbd.kernel.fake_kernel import FakeKernel, FakeNetlink
from tests.support.nbd_client import connected, write
from tests.support.target import END_S, TargetProcess
from tests.support.until import until_blocking


def test_a_pid_file_that_names_somebody_else(
    tool: Attacher, kernel: FakeKernel, target: TargetProcess
) -> None:
    """The pid in the file belongs to another process by now: that process is not ended."""
    home = tool.run / "nbd0"
    home.mkdir(parents=True)
    with subprocess.Popen(["sleep", "600"]) as innocent:
        try:
            (home / "server.pid").write_text(f"{innocent.pid}\n")
            (home / "client.pid").write_text(f"{innocent.pid}\n")
            (home / "state.json").write_text("{")
            assert tool.ended("detach", "nbd0")[0] == 0
            assert innocent.poll() is None
        finally:
            innocent.kill()


def test_in_use(tool: Attacher, kernel: FakeKernel, target: TargetProcess) -> None:
    tool.good("attach", f"{target.url}/0")
    with open(path_of(kernel, "nbd0"), "rb"):
        line = tool.refused(28, "detach", "nbd0")
        assert f"({os.getpid()}) has it open" in line
        assert kernel.connected() == ["nbd0"]
    tool.good("detach", "nbd0")


def test_one_in_use_does_not_keep_the_others(
    tool: Attacher, kernel: FakeKernel, target: TargetProcess
) -> None:
    """The first is in use, or cannot be flushed: the status is its own."""
    tool.good("attach", f"{target.url}/0")
    tool.good("attach", f"{target.url}/1")
    with open(path_of(kernel, "nbd0"), "rb"):
        assert "has it open" in tool.refused(28, "detach", "nbd0", "nbd1")
        assert kernel.connected() == ["nbd0"]
    tool.good("attach", f"{target.url}/1")
    for name in ("nbd0", "nbd1"):
        kernel.spoil(name)
    status, _, said = tool.ended("detach", "nbd0", "nbd1")
    assert status == 1
    assert said.count("detached, but the last flush failed") == 2
    assert kernel.connected() == []


def test_what_is_cached_is_flushed(
    tool: Attacher, kernel: FakeKernel, target: TargetProcess
) -> None:
    tool.good("attach", f"{target.url}/0")
    assert not kernel.synced("nbd0")
    tool.good("detach", "nbd0")
    assert kernel.synced("nbd0")


def test_a_flush_that_fails_is_told(
    tool: Attacher, kernel: FakeKernel, target: TargetProcess
) -> None:
    """The device is free all the same."""
    tool.good("attach", f"{target.url}/0")
    kernel.spoil("nbd0")
    line = tool.refused(1, "detach", "nbd0")
    assert "detached, but the last flush failed" in line and "may be lost" in line


async def write_unflushed(tool: Attacher) -> None:
    """As the kernel would: another client of the server writes."""
    async with await connected(tool.run / "nbd0" / "socket") as client:
        await client.send(write(b"x", 0, 1))
        assert (await client.reply()).error == 0


def test_by_force(tool: Attacher, kernel: FakeKernel, target: TargetProcess) -> None:
    """Nothing is waited for, and what is not flushed is told, with its bytes."""
    tool.good("attach", f"{target.url}/0?io-timeout=86400")
    trio.run(write_unflushed, tool)
    target.pause()
    try:
        line = tool.refused(1, "detach", "--force", "nbd0")
    finally:
        target.resume()
    if tool.by_nbdkit:  # it may be killed before it has told how many
        line = line.replace(": data written", ": up to 512 bytes written")
    told = f"nbd0: detached by force, without a flush: up to 512 bytes written to {target.url}/0 "
    assert told in line
    assert not kernel.synced("nbd0")
    assert kernel.connected() == []


def test_by_force_with_nothing_unflushed(
    tool: Attacher, kernel: FakeKernel, target: TargetProcess
) -> None:
    tool.good("attach", f"{target.url}/0")
    tool.good("detach", "--force", "nbd0")


def test_by_force_while_it_is_in_use(
    kernel: FakeKernel, target: TargetProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told, and what is mounted can be unmounted, as all requests fail."""
    tool = Attacher(kernel)
    tool.good("attach", f"{target.url}/0")
    places = Directories(kernel.root / "sys", kernel.root / "dev", Path("/proc"), tool.run)
    monkeypatch.setattr(client, "KERNEL", FakeNetlink(kernel.root))

    def claim(device: Device) -> int:
        raise Busy(f"{device.path}: mounted on /data: umount it first")

    with monkeypatch.context() as mounted:
        mounted.setattr(Device, "claim", claim)
        with pytest.raises(Busy, match="all its requests fail from now on, and it is still mount"):
            force(Device("nbd0", places))
    assert kernel.connected() == [] and tool.servers() == []
    assert "cleaning up" in tool.ended("detach", "nbd0")[2]
    tool.assert_nothing_left()


@pytest.mark.parametrize("ends", [True, False])
def test_while_it_detaches_the_server_knows(
    kernel: FakeKernel, target: TargetProcess, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    """It gives up a target that is away then. When the detach is interrupted, it does not."""
    tool = Attacher(kernel)
    tool.good("attach", f"{target.url}/0")
    places = Directories(kernel.root / "sys", kernel.root / "dev", Path("/proc"), tool.run)
    monkeypatch.setattr(client, "KERNEL", FakeNetlink(kernel.root))
    wish = Home(Device("nbd0", places)).wish
    seen: list[bool] = []

    def fsync(_fd: int) -> None:
        seen.append(wish.made)

    monkeypatch.setattr(os, "fsync", fsync)
    if not ends:

        def disconnect(_device: Device) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(client, "disconnect", disconnect)
    with contextlib.nullcontext() if ends else pytest.raises(KeyboardInterrupt):
        detach(Device("nbd0", places))
    assert seen == [True] and not wish.made
    if not ends:
        tool.good("detach", "nbd0")
    tool.assert_nothing_left()


@pytest.mark.parametrize(
    ("left", "amount"), [(512, "up to 4608 bytes"), (None, "data"), ("killed", "data")]
)
def test_what_could_not_be_written_is_counted(
    kernel: FakeKernel,
    target: TargetProcess,
    monkeypatch: pytest.MonkeyPatch,
    left: int | str | None,
    amount: str,
) -> None:
    """What the kernel had cached, and what the server had not flushed when it ended: where it does
    not know that (journal=off), or cannot say it, the kernel's bytes alone would be too few."""
    tool = Attacher(kernel)
    tool.good("attach", f"{target.url}/0")
    places = Directories(kernel.root / "sys", kernel.root / "dev", Path("/proc"), tool.run)
    monkeypatch.setattr(client, "KERNEL", FakeNetlink(kernel.root))
    home = Home(Device("nbd0", places))

    def fsync(_fd: int) -> None:
        kernel.spoil("nbd0")  # 8 sectors
        if isinstance(left, str):
            (server,) = tool.servers()
            os.kill(server, signal.SIGKILL)
            until_blocking(lambda: not tool.servers())
        else:
            home.wish.leave(left)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(IserblkError, match=rf"\(Input/output error\): {amount} written to "):
        detach(home.device)
    tool.assert_nothing_left()


def test_in_use_after_its_server_has_died(
    tool: Attacher, kernel: FakeKernel, target: TargetProcess
) -> None:
    """Requests fail then, so that it can be unmounted; a successor makes them wait again."""
    tool.good("attach", f"{target.url}/0")
    (server,) = tool.servers()
    os.kill(server, signal.SIGKILL)
    with open(path_of(kernel, "nbd0"), "rb"):
        # (A mount is noticed at once; this only when udev has had its time.)
        assert "has it open" in tool.refused(28, "detach", "nbd0")
        assert kernel.attribute("nbd0", "dead_timeout") == "0"
    tool.good("attach", "--replace", f"{target.url}/0", "nbd0")
    assert kernel.attribute("nbd0", "dead_timeout") == "210"
    tool.good("detach", "nbd0")


def test_in_a_namespace_of_processes(
    tool: Attacher, kernel: FakeKernel, target: TargetProcess
) -> None:
    """The kernel shows another number than the process has there."""
    kernel.number_processes_from(10_000_000)
    tool.good("attach", f"{target.url}/0")
    assert "is attached there" in tool.refused(28, "attach", f"{target.url}/0", "nbd0")
    tool.good("attach", "--replace", f"{target.url}/0", "nbd0")
    tool.good("detach", "nbd0")
    assert kernel.connected() == []


def test_somebody_else_detaches(tool: Attacher, kernel: FakeKernel, target: TargetProcess) -> None:
    process = tool.start("attach", "-f", f"{target.url}/0")
    assert process.stdout is not None
    process.stdout.readline()
    tool.good("detach", "nbd0")
    assert process.communicate(timeout=END_S) == ("", "")
    assert process.returncode == 0
