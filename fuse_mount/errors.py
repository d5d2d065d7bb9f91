"""Exceptions of mounting, one for each exit status of mount(8) that we use."""

from __future__ import annotations

from typing import ClassVar

from iserblk.errors import IserblkError


class MountError(IserblkError):
    """Base class. ``str()`` is one line for the user. ``exit_status`` is that of mount(8)."""


class UsageError(MountError):
    """A wrong option, URL or mount point. Nothing is mounted."""

    exit_status: ClassVar[int] = 1


class DataAtRisk(MountError):
    """It is unmounted, and what was not flushed may be lost. (As for every command of iserblk, the
    status is 1; mount(8) has none for it.) ``unflushed``: bytes; None: not known."""

    exit_status: ClassVar[int] = 1

    def __init__(self, text: str, unflushed: int | None = None) -> None:
        super().__init__(text)
        self.unflushed = unflushed


class SystemProblem(MountError):
    """This machine lacks something. The text tells what, and how to get it."""

    exit_status: ClassVar[int] = 2


class MountFailed(MountError):
    """The target, the LUN or the kernel refused; or a flush failed, and it is still mounted."""

    exit_status: ClassVar[int] = 32


BY_STATUS: dict[int, type[MountError]] = {
    kind.exit_status: kind for kind in (UsageError, SystemProblem, MountFailed)
}
