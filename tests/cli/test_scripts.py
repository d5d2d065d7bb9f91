"""The scripts that everything starts with."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.fuse import need_fuse
from tests.support.nbdkit import need
from tests.support.target import ROOT

SCRIPTS = ("setup", "test", "demo")


def script(
    name: str, *arguments: str, start: Path = ROOT, **changes: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(start / "scripts" / name), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **changes},
    )


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_is_the_head_of_the_file(name: str) -> None:
    done = script(name, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"\n  scripts/{name}" in done.stdout
    assert "#" not in done.stdout and "set -" not in done.stdout


@pytest.mark.parametrize("name", ["setup", "demo"])
def test_wrong_arguments_do_nothing(name: str) -> None:
    assert script(name, "--frobnicate").returncode == 7


def test_setting_up_again_does_nothing_and_says_nothing() -> None:
    """These tests run in what `scripts/setup --tests` made."""
    done = script("setup", "--tests")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_command_is_found_from_anywhere(tmp_path: Path) -> None:
    """By a link, too, and without an activated environment."""
    link = tmp_path / "iserblk"
    link.symlink_to(ROOT / ".venv" / "bin" / "iserblk")
    done = subprocess.run(
        [str(link), "--version"],
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
        env={"PATH": "/usr/bin:/bin"},
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_command_does_not_run_what_lies_around(tmp_path: Path) -> None:
    """Root runs it, in directories of others, too."""
    (tmp_path / "iserblk").mkdir()
    (tmp_path / "iserblk" / "__init__.py").write_text("raise SystemExit(99)")
    done = subprocess.run(
        [str(ROOT / ".venv" / "bin" / "iserblk"), "--version"], check=False, cwd=tmp_path
    )
    assert done.returncode == 0


def left_of_demos(directory: Path) -> list[str]:
    """Files, mounts and processes that name ``directory``."""
    names = [str(directory), str(directory.resolve())]
    left = [path.name for path in directory.iterdir()]
    left += [line for line in Path("/proc/self/mountinfo").read_text().splitlines()
             if any(name in line for name in names)]  # fmt: skip
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = line.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # it has just ended
        if any(name in words for name in names):
            left.append(words)
    return left


def test_demo(tmp_path: Path) -> None:
    need("nbdkit", "nbdinfo", "nbdcopy", "mkfs.ext4")
    need_fuse()
    done = script("demo", TMPDIR=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "checksums are the same" in done.stdout
    assert left_of_demos(tmp_path) == []


@pytest.mark.parametrize(
    ("after", "number", "status"),
    [("2. ", signal.SIGTERM, 143), ("4. ", signal.SIGINT, 130), ("5. ", signal.SIGTERM, 143)],
)
def test_demo_cleans_up_when_it_is_stopped(
    after: str, number: int, status: int, tmp_path: Path
) -> None:
    need("nbdkit", "nbdinfo", "nbdcopy", "mkfs.ext4")
    need_fuse()
    with subprocess.Popen(
        [str(ROOT / "scripts" / "demo")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        start_new_session=True,
    ) as demo:
        assert demo.stdout is not None
        for line in demo.stdout:
            if line.startswith(after):
                demo.send_signal(number)
                break
        rest = demo.stdout.read()
    assert demo.returncode == status, rest
    assert left_of_demos(tmp_path) == []
