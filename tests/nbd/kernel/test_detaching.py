"""detach: of devices in use, and of those that another process has taken."""

from __future__ import annotations

import os
import signal
import subprocess

from tests.nbd.kernel.attachers import Attacher, path_of
from tests.nbd.kernel.fake_kernel import FakeKernel
from tests.support.target import END_S, TargetProcess


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
    assert kernel.attribute("nbd0", "dead_timeout") == "60"
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
