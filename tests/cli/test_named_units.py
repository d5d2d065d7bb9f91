"""`iserblk enable` and `disable`: what they ask of systemctl, and what they say without it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from iserblk.cli import units
from iserblk.errors import BadArgument, IserblkError, NotSupported, PermissionDenied
from iserblk.named.files import Named
from tests.cli.commands import bad
from tests.cli.test_units import install
from tests.support.nbdkit import need

URL = "iser://host/iqn.2026-11.example:disk/0"

# Notes its arguments; a file FAILS beside it makes a word of systemctl fail, and says why.
SYSTEMCTL = """#!/bin/sh
here=$(dirname "$0")
echo "$*" >>"$here/asked"
[ ! -e "$here/$1.fails" ] || { cat "$here/$1.fails" >&2; exit 1; }
"""


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """A systemctl of ours in PATH; returns what it was asked. Named LUNs are in ``tmp_path``."""
    program = tmp_path / "systemctl"
    program.write_text(SYSTEMCTL)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(units, "RUNNING", tmp_path)
    monkeypatch.setattr(units, "DIRECTORY", tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: 0)

    def answer() -> list[str]:
        found = (tmp_path / "asked").read_text().splitlines()
        (tmp_path / "asked").unlink()
        return found

    return answer


def named(directory: Path, **place: object) -> Named:
    return Named("disk", (URL,), path=directory / "disk.conf", **place)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("place", "unit"),
    [
        ({}, "iserblk-attach@disk.service"),
        ({"devices": ("/dev/nbd0",)}, "iserblk-attach@disk.service"),
        ({"mountpoint": "/mnt"}, "iserblk-mount@disk.service"),
    ],
)
def test_enabled_and_disabled(
    place: dict[str, object], unit: str, tmp_path: Path, asked: Callable[[], list[str]]
) -> None:
    units.need_systemd()
    lun = named(tmp_path, **place)
    assert units.order("enable", lun) == f"{unit} is enabled and started"
    assert asked() == [f"cat -- {unit}", f"enable --now -- {unit}"]
    assert units.order("disable", lun) == f"{unit} is disabled and stopped"
    assert asked()[1] == f"disable --now -- {unit}"
    assert units.state_of(lun) == (True, True)
    (tmp_path / "is-active.fails").write_text("")
    assert units.state_of(lun) == (True, False)
    assert asked()[:2] == [f"is-enabled --quiet -- {unit}", f"is-active --quiet -- {unit}"]


def test_errors_of_systemctl(tmp_path: Path, asked: Callable[[], list[str]]) -> None:
    (tmp_path / "enable.fails").write_text("Job for it failed.\nSee the log.\n")
    with pytest.raises(IserblkError, match=r"failed\. See the log\.; `systemctl status iserblk-a"):
        units.order("enable", named(tmp_path))
    (tmp_path / "cat.fails").write_text("No files found.\n")
    with pytest.raises(NotSupported, match=r"no unit .*: run scripts/install-units"):
        units.order("enable", named(tmp_path))


def test_what_cannot_be_enabled(
    tmp_path: Path, asked: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    both = named(tmp_path, devices=("/dev/nbd0",), mountpoint="/mnt")
    with pytest.raises(BadArgument, match="both DEVICE and MOUNTPOINT"):
        units.order("enable", both)
    assert units.state_of(both) == (None, None)
    elsewhere = named(tmp_path / "elsewhere")
    with pytest.raises(BadArgument, match=f"the units read {tmp_path}"):
        units.order("enable", elsewhere)
    assert units.state_of(elsewhere) == (None, None)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(PermissionDenied, match="only root"):
        units.need_systemd()
    monkeypatch.setattr(units, "RUNNING", tmp_path / "none")
    assert units.state_of(named(tmp_path)) == (None, None)
    with pytest.raises(NotSupported, match="systemd does not run here"):
        units.need_systemd()


@pytest.mark.parametrize("command", ["enable", "disable"])
def test_without_systemd(command: str, tmp_path: Path) -> None:
    if units.RUNNING.is_dir():
        pytest.skip("systemd runs here")
    assert "systemd does not run here" in bad(27, command, "disk")


@pytest.mark.parametrize("place", [{}, {"mountpoint": "/mnt"}])
def test_systemd_knows_the_units(place: dict[str, object], tmp_path: Path) -> None:
    """systemctl itself enables them: in a directory, where it asks no service manager."""
    need("systemctl")
    root = tmp_path / "root"
    assert install(root).returncode == 0
    unit = units.unit_of(named(tmp_path, **place))
    for what, there in (("enable", True), ("disable", False)):
        done = subprocess.run(
            ["systemctl", "--root", root, what, unit], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        link = root / "etc/systemd/system/remote-fs.target.wants" / unit
        assert link.is_symlink() == there
