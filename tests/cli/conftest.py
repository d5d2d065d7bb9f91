"""Fixtures of the commands' tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.target import TargetProcess, running_target


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("target")


@pytest.fixture(scope="module")
def target(files: Path) -> Iterator[TargetProcess]:
    """A target: tests write to LUN 0; LUN 1 is small, with blocks of 4096 bytes; 2 is read-only."""
    (files / "read-only").write_bytes(b"written once" * 4096)
    specs = ["big:size=64M", "small:size=4M:block=4096", "read-only:ro"]
    with running_target([str(files / spec) for spec in specs], files / "log") as process:
        yield process


@pytest.fixture(scope="module")
def url(target: TargetProcess) -> str:
    return target.url
