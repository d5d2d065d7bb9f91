"""``mount.iserblk``, which mount(8) runs for ``mount -t iserblk URL MOUNTPOINT`` and fstab lines.

    mount.iserblk URL MOUNTPOINT [-sfnv] [-N namespace] [-o options] [-t type]

It ends when the files are usable; the server stays in the background. Exit statuses are those of
mount(8).
"""

from __future__ import annotations

import getopt
import logging
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from fuse_mount.errors import MountError, MountFailed, UsageError
from fuse_mount.mount import mount_background
from iserblk.credentials import hide_command_line
from iserblk.printable import log_to_stderr, printable

SHORT_OPTIONS = "sfnvN:o:t:"  # those that mount(8) gives its helpers


def main(arguments: Sequence[str]) -> int:
    """Mount in the background. Returns the exit status of mount(8)."""
    return exit_status("mount.iserblk", _mount, arguments)


def exit_status(
    program: str, work: Callable[[Sequence[str]], None], arguments: Sequence[str]
) -> int:
    """Do ``work`` as ``program``, which mount(8) or umount(8) runs; errors go to stderr. Returns
    the exit status of mount(8)."""
    log_to_stderr(logging.WARNING, program)
    try:
        work(arguments)
    except MountError as error:
        print(f"{program}: {printable(str(error))}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        return MountFailed.exit_status
    return 0


def _mount(arguments: Sequence[str]) -> None:
    try:
        options, words = getopt.gnu_getopt(list(arguments), SHORT_OPTIONS)
    except getopt.GetoptError as error:
        raise UsageError(f"{error}; write mount -t iserblk URL MOUNTPOINT [-o OPTIONS]") from None
    if len(words) != 2:
        raise UsageError("give one URL and one mount point: mount -t iserblk URL MOUNTPOINT")
    given = [value for name, value in options if name == "-o"]
    names = {name for name, _ in options}
    if "-N" in names:
        raise UsageError("mounting in another namespace (-N) is not supported; use nsenter")
    if "-v" in names:
        logging.getLogger().setLevel(logging.DEBUG)
    if "-f" not in names:  # mount --fake
        mount_background([words[0]], words[1], given)


def run() -> NoReturn:
    """The program ``mount.iserblk`` of a wheel."""
    hide_command_line()
    sys.exit(main(sys.argv[1:]))


if __name__ == "__main__":
    run()
