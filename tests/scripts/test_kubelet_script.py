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


# What a run does to the settings below a directory, with a file that keeps them; and how it ends.
RUN = """
import os, signal, sys
from pathlib import Path
from kubeletlib.settings import kept
folder = Path(sys.argv[1])
with kept(folder / "proc", folder / "kept.json"):
    (folder / "proc/kernel/panic").write_text("10\\n")
    if sys.argv[2] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if sys.argv[2] == "fails":
        raise SystemExit(3)
"""


def test_settings_of_the_kernel_are_set_back(tmp_path: Path) -> None:
    """Behind a run that was killed by the next one, which says so."""
    setting = tmp_path / "proc" / "kernel" / "panic"
    setting.parent.mkdir(parents=True)
    setting.write_text("0\n")

    def run(end: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-P", "-c", RUN, tmp_path, end],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": str(ROOT / "scripts")},
        )

    for end, status in (("well", 0), ("fails", 3), ("killed", -9)):
        done = run(end)
        assert (done.returncode, done.stderr) == (status, "")
        assert setting.read_text() == ("10\n" if end == "killed" else "0\n")
        assert (tmp_path / "kept.json").exists() == (end == "killed")
    done = run("well")
    assert done.returncode == 0 and done.stderr.startswith("kubelet: a run before was killed")
    assert done.stderr.endswith(": kernel.panic=0\n")
    assert setting.read_text() == "0\n" and not (tmp_path / "kept.json").exists()
