"""Fixtures of the tests of kernel devices."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.nbd.kernel.attachers import SIZE, Attacher
from tests.nbd.kernel.fake_kernel import FakeKernel
from tests.support.nbdkit import need
from tests.support.target import TargetProcess, running_target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TargetProcess]:
    files = tmp_path_factory.mktemp("target")
    specs = [f"{files}/{number}:size={SIZE << number}" for number in range(3)]
    with running_target(specs, files / "log") as process:
        yield process


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[FakeKernel]:
    kernel = FakeKernel(tmp_path)
    yield kernel
    kernel.end()


@pytest.fixture(params=["own", "nbdkit"])
def tool(kernel: FakeKernel, request: pytest.FixtureRequest) -> Iterator[Attacher]:
    """An Attacher, for each kind of server; checks that nothing is left at the end."""
    tool = Attacher(kernel, by_nbdkit=request.param == "nbdkit")
    if tool.by_nbdkit:
        need("nbdkit")
    yield tool
    try:
        tool.assert_nothing_left()
    finally:
        for pid in tool.servers():
            os.kill(pid, signal.SIGKILL)
