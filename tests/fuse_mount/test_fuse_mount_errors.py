"""Errors of a mount, by mount(8)'s exit statuses."""

from __future__ import annotations

from fuse_mount.errors import BY_STATUS, MountError, MountFailed, SystemProblem, UsageError
from iserblk.errors import IserblkError


def test_the_exit_statuses_of_mount() -> None:
    """mount(8): 1 incorrect invocation, 2 system error, 32 mount failure."""
    assert {1: UsageError, 2: SystemProblem, 32: MountFailed} == BY_STATUS


def test_all_are_errors_of_ours() -> None:
    for kind in BY_STATUS.values():
        assert issubclass(kind, MountError) and issubclass(kind, IserblkError)
        assert str(kind("one line")) == "one line"
