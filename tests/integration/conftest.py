"""Real targets for the tests of this directory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

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
