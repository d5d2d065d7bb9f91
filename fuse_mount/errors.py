"""What may go wrong with a mount, by the exit status that mount(8) has for it."""

from __future__ import annotations

from typing import ClassVar

from iserblk.errors import IserblkError


class MountError(IserblkError):
    """Root; ``str()`` is one line for the user."""


class UsageError(MountError):
    """A wrong option, URL or mount point; nothing was tried."""

    exit_status: ClassVar[int] = 1


class SystemProblem(MountError):
    """This machine lacks something: the text says what, and how to get it."""

    exit_status: ClassVar[int] = 2


class MountFailed(MountError):
    """The target, the LUN or the kernel said no; or the last flush failed."""

    exit_status: ClassVar[int] = 32


BY_STATUS: dict[int, type[MountError]] = {
    kind.exit_status: kind for kind in (UsageError, SystemProblem, MountFailed)
}
