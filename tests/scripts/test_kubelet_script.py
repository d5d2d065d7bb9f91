"""scripts/kubelet, as far as it needs no kubelet."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.target import ROOT


def kubelet(*arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "kubeletlib", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT / "scripts"), **changes},
    )


def test_help() -> None:
    done = kubelet("--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "tests/kubelet" in done.stdout


@pytest.mark.parametrize("arguments", [("--jobs", "0"), ("--jobs", "many")])
def test_wrong_arguments_do_nothing(arguments: tuple[str, ...]) -> None:
    done = kubelet(*arguments)
    assert done.returncode == 7
    (line,) = done.stderr.splitlines()
    assert line.startswith("kubelet: ") and "--jobs" in line


def test_a_program_that_is_missing(tmp_path: Path) -> None:
    """In one line, and nothing is downloaded."""
    done = kubelet("--only-build", PATH=str(tmp_path), XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 1 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("kubelet: ")
