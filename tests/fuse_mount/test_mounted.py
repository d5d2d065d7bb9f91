"""The kernel's mount tables, and the system calls that change them."""

from __future__ import annotations

import errno
import os

import pytest

from fuse_mount import mounted
from fuse_mount.mounted import How


def test_what_is_mounted_there() -> None:
    kind, number = mounted.is_mounted("/proc")
    assert (kind, number) == ("proc", os.minor(os.stat("/proc").st_dev))
    assert not mounted.is_ours("/proc")
    assert mounted.source_at("/proc") != ""


def test_a_place_below_a_mount_is_none() -> None:
    assert mounted.is_mounted("/proc/self") == ("", 0)
    assert mounted.source_at("/proc/self") == ""


@pytest.mark.parametrize(
    ("how", "root", "user"),
    [
        (How.FLUSHED, [], []),
        (How.FORCE, ["--force"], []),
        (How.LAZY, ["--lazy"], ["-z"]),
        (How.AT_ONCE, ["--force", "--lazy"], ["-z"]),
    ],
)
def test_the_command(
    monkeypatch: pytest.MonkeyPatch, how: How, root: list[str], user: list[str]
) -> None:
    """mount(8)'s helper is ours: it must not be called by itself."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert mounted.unmount_command("/m", how) == ["umount", "--internal-only", *root, "/m"]
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert mounted.unmount_command("/m", how) == ["fusermount3", "-u", *user, "/m"]


def test_a_system_call_that_fails() -> None:
    with pytest.raises(OSError, match="umount2") as caught:
        mounted.system_call("umount2", b"/there/is/none", 0)
    assert caught.value.errno in (errno.ENOENT, errno.EPERM)
