"""``umount.fuse.iserblk``, which umount(8) runs for what ``mount.iserblk`` has mounted, as systemd
does at a shutdown.

    umount.fuse.iserblk MOUNTPOINT [-flnrv] [-N namespace] [-t type]

Unmounting alone would not wait for the server: it would flush, and log out, while systemd stops the
network. This helper ends when the server has ended, as ``iserblk umount`` does. Exit statuses are
those of mount(8).
"""

from __future__ import annotations

import getopt
import sys
from collections.abc import Sequence
from typing import NoReturn

from fuse_mount.errors import UsageError
from fuse_mount.helper import exit_status
from fuse_mount.mount import unmount
from fuse_mount.mounted import How

SHORT_OPTIONS = "flnrvN:t:"  # those that umount(8) gives its helpers


def main(arguments: Sequence[str]) -> int:
    """Unmount. Returns the exit status of mount(8)."""
    return exit_status("umount.fuse.iserblk", _unmount, arguments)


def _unmount(arguments: Sequence[str]) -> None:
    try:
        options, words = getopt.gnu_getopt(list(arguments), SHORT_OPTIONS)
    except getopt.GetoptError as error:
        raise UsageError(f"{error}; write umount MOUNTPOINT") from None
    if len(words) != 1:
        raise UsageError("give one mount point: umount MOUNTPOINT")
    names = {name for name, _ in options}
    if "-N" in names:
        raise UsageError("unmounting in another namespace (-N) is not supported; use nsenter")
    how = How.LAZY if "-l" in names else How.FORCE if "-f" in names else How.FLUSHED
    # At a shutdown, what holds the files elsewhere (a container) is being stopped as well.
    unmount(words[0], how, waits=True)


def run() -> NoReturn:
    """The program ``umount.fuse.iserblk`` of a wheel."""
    sys.exit(main(sys.argv[1:]))


if __name__ == "__main__":
    run()
