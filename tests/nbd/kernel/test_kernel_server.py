"""A server that dies under a device."""

from __future__ import annotations

import os
import signal

from tests.nbd.kernel.attachers import SIZE, Attacher, path_of
from tests.nbd.kernel.fake_kernel import FakeKernel
from tests.support.target import END_S, TargetProcess


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
    process = tool.start("attach", "-f", f"{target.url}/0")
    assert process.stdout is not None
    process.stdout.readline()
    os.kill(tool.servers()[0], signal.SIGKILL)
    _, err = process.communicate(timeout=END_S)
    assert process.returncode == 1
    assert "nbd0: detached, as its server has died" in err
