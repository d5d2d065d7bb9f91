"""Other mounts of a file system, in a directory that looks like /proc."""

from __future__ import annotations

from pathlib import Path

import pytest

from fuse_mount.holders import Holder, holder

OURS = "36 35 0:45 / /mnt/a\\040place rw,nosuid - fuse.iserblk iscsi://h/iqn/0 rw,user_id=0\n"
OTHER = "37 35 0:46 / /mnt/other rw - fuse.iserblk iscsi://h/iqn/1 rw\n"
ROOT = "1 0 8:1 / / rw - ext4 /dev/sda1 rw\n"


def process(proc: Path, pid: str, namespace: str | None, mounts: str, name: str = "sleep") -> None:
    home = proc / pid
    (home / "ns").mkdir(parents=True)
    if namespace is not None:
        (home / "ns/mnt").symlink_to(f"mnt:[{namespace}]")
    (home / "mountinfo").write_text(mounts)
    (home / "comm").write_text(f"{name}\n")


def test_none(tmp_path: Path) -> None:
    process(tmp_path, "self", "1", ROOT)
    process(tmp_path, "10", "1", ROOT + OURS)  # not looked at: the namespace is known
    process(tmp_path, "11", "2", ROOT + OTHER)
    process(tmp_path, "12", "3", "no such lines\n\n")
    (tmp_path / "13").mkdir()  # it has ended
    (tmp_path / "uptime").write_text("1")
    assert holder("fuse.iserblk", "0:45", tmp_path) is None


@pytest.mark.parametrize("namespace", ["2", None], ids=["seen", "of another user"])
def test_another_namespace(tmp_path: Path, namespace: str | None) -> None:
    process(tmp_path, "self", "1", ROOT)
    process(tmp_path, "9", "1", ROOT)
    process(tmp_path, "70", namespace, ROOT + OURS, "a\x1b[2Jb")
    found = holder("fuse.iserblk", "0:45", tmp_path)
    assert found == Holder(70, "a\\x1b[2Jb", "/mnt/a place")
    words = found.words("/mnt/a place")
    assert words.endswith("end that process, or run nsenter -t 70 -m umount '/mnt/a place'")
    assert ", at " not in words and ", at /mnt/a place:" in found.words("/mnt/b")


def test_another_directory(tmp_path: Path) -> None:
    process(tmp_path, "self", "1", ROOT + OURS)
    found = holder("fuse.iserblk", "0:45", tmp_path)
    assert found is not None
    assert found.words("/mnt/b") == "it is mounted at /mnt/a place, too: unmount that as well"
