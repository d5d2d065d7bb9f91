"""``iserblk mount`` and ``iserblk umount``, one after the other."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from iserblk.metrics.records import running
from tests.cli.commands import bad, good
from tests.support.fuse import need_fuse


def test_mount_and_umount(url: str, tmp_path: Path) -> None:
    need_fuse()
    place = tmp_path / "place"
    place.mkdir()
    assert good("mount", url, place, "-o", "noauto", "--io-timeout", "20") == ""
    try:
        assert sorted(path.name for path in place.iterdir()) == ["lun0", "lun1", "lun2"]
        assert (place / "lun2").read_bytes() == b"written once" * 4096
        assert "mounted there already" in bad(1, "mount", url, place)
    finally:
        assert good("umount", place) == ""
    assert list(place.iterdir()) == []
    assert "no LUNs are mounted" in bad(1, "umount", place)


def test_what_a_killed_mount_has_left_is_named_as_the_user_does(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a name in the current directory, which could be that of a LUN."""
    need_fuse()
    place = tmp_path / "place"
    place.mkdir()
    good("mount", url, place, "-o", "noauto", "--io-timeout", "20")
    (pid,) = (found.record.pid for found in running() if found.record.where == str(place))
    os.kill(pid, signal.SIGKILL)
    monkeypatch.chdir(tmp_path)
    try:
        assert good("umount", "place") == ""
    except BaseException:
        subprocess.run(["umount", "--lazy", place], check=False)
        raise
    assert list(place.iterdir()) == []
