"""A server that dies under a device."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.nbd.kernel.attachers import SIZE, Attacher, path_of
from tests.nbd.kernel.fake_kernel import FakeKernel
from tests.support.target import END_S, TargetProcess, running_target
from tests.support.until import until_blocking


def test_a_dead_server(tool: Attacher, kernel: FakeKernel, target: TargetProcess) -> None:
    tool.good("attach", f"{target.url}/0", "nbd0")
    (pid,) = tool.servers()
    os.kill(pid, signal.SIGKILL)
    assert tool.good("attach", f"{target.url}/1") == f"ready {path_of(kernel, 'nbd1')}\n"
    status, out, err = tool.ended("attach", f"{target.url}/1", "nbd0")
    assert (status, out) == (0, f"ready {path_of(kernel, 'nbd0')}\n")
    assert "its server has died; detaching it" in err
    assert kernel.size("nbd0") == SIZE * 2
    tool.good("detach", "nbd0", "nbd1")


def test_a_server_dies_in_the_foreground(
    tool: Attacher, kernel: FakeKernel, target: TargetProcess
) -> None:
    """It gets a successor."""
    process = tool.start("attach", "-f", f"{target.url}/0")
    assert process.stdout is not None and process.stderr is not None
    process.stdout.readline()
    (first,) = tool.servers()
    os.kill(first, signal.SIGKILL)
    assert "nbd0: its server has died; it has a new one" in process.stderr.readline()
    (second,) = tool.servers()
    assert second != first
    if not tool.by_nbdkit:
        until_blocking(lambda: not Path(f"/proc/{first}").exists())  # it does not stay a zombie
    assert kernel.connected() == ["nbd0"]
    process.terminate()
    assert process.communicate(timeout=END_S) == ("", "")
    assert process.returncode == 0


def test_a_server_dies_in_the_foreground_and_so_does_the_target(
    tool: Attacher, kernel: FakeKernel, tmp_path: Path
) -> None:
    with running_target([f"{tmp_path}/lun:size={SIZE}"], tmp_path / "log") as mortal:
        process = tool.start("attach", "-f", f"{mortal.url}/0", "-o", "io-timeout=2")
        assert process.stdout is not None
        process.stdout.readline()
        mortal.kill()
        for pid in tool.servers():
            os.kill(pid, signal.SIGKILL)
        _, err = process.communicate(timeout=END_S * 2)
    assert process.returncode == 1
    first, last = err.splitlines()
    assert "nbd0: its server has died; " in first and first.endswith("; trying again")
    assert "nbd0: its server has died; " in last
    assert kernel.connected() == ["nbd0"]
    assert tool.ended("detach", "nbd0")[0] == 0


def test_a_successor_waits_for_the_target(
    tool: Attacher, kernel: FakeKernel, tmp_path: Path
) -> None:
    """Server and target die together, and the target comes back after a first successor has not
    found it."""
    spec = f"{tmp_path}/lun:size={SIZE}"
    with running_target([spec], tmp_path / "log") as first:
        process = tool.start("attach", "-f", f"{first.url}/0", "-o", "io-timeout=60")
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        first.kill()
        (dead,) = tool.servers()
        os.kill(dead, signal.SIGKILL)
        assert "; trying again" in process.stderr.readline()
    second = TargetProcess([spec], tmp_path / "log", first.listen)
    try:
        assert "nbd0: its server has died; it has a new one" in process.stderr.readline()
        assert len(tool.servers()) == 1
        process.terminate()
        assert process.communicate(timeout=END_S) == ("", "")
        assert process.returncode == 0
    finally:
        second.stop()
