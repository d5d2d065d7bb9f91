"""Real targets for the tests of this directory."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.failing_disk import BLOCK, FailingDisk
from tests.support.target import IQN, TargetProcess, running_target

StartTarget = Callable[..., TargetProcess]


@pytest.fixture
def start_target(tmp_path: Path) -> Iterator[StartTarget]:
    """``start_target("FILE:option…", …)``: file names are relative to ``tmp_path``. ``profile``: a
    module of tests/support/profiles."""
    with ExitStack() as stack:

        def start(
            *specs: str,
            listen: str = "",
            iqn: str = IQN,
            header: int = 28,
            profile: str = "",
        ) -> TargetProcess:
            paths = [str(tmp_path / spec) for spec in specs]
            log, environment = tmp_path / "target.log", {"ISER_HEADER": str(header)}
            if profile:
                environment["PROFILE"] = profile
            return stack.enter_context(running_target(paths, log, listen, iqn, environment))

        yield start


@pytest.fixture
def failing(tmp_path: Path) -> Iterator[FailingDisk]:
    try:
        made = FailingDisk(tmp_path / "failing", block=BLOCK)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"it needs root, loop devices and mounts: {error}")
    yield made
    made.remove()
