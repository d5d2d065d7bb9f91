"""``python3 -m fuse_mount URL… MOUNTPOINT [-o OPTION,…]``: mount, and stay in the foreground."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
from typing import NoReturn

from fuse_mount.errors import MountError, UsageError
from fuse_mount.mount import mount_foreground
from iserblk.credentials import hide_command_line
from iserblk.printable import log_to_stderr, printable


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """End with 1: argparse's own status 2 means a system problem to mount(8)."""
        self.exit(UsageError.exit_status, f"{self.prog}: {message}\n")


def main(arguments: list[str] | None = None) -> int:
    """Mount, and serve until the unmount. Returns the exit status: 0 after a clean unmount, 128 +
    the number of a signal that came before the mount, else the error status of mount(8)."""
    parser = _Parser(prog="fuse_mount", description="Mount the LUNs of iSER targets as files.")
    parser.add_argument("url", nargs="+", metavar="URL", help="iser://HOST/IQN[/LUN]")
    parser.add_argument("mountpoint", metavar="MOUNTPOINT")
    parser.add_argument("-o", dest="options", action="append", default=[], metavar="OPTION,…")
    parser.add_argument("-f", action="store_true", help="stay in the foreground (always so here)")
    parser.add_argument("-v", "--verbose", action="store_true", help="say more on stderr")
    given = parser.parse_args(arguments)
    log_to_stderr(logging.DEBUG if given.verbose else logging.WARNING, "fuse_mount")
    try:
        mount_foreground(
            given.url,
            given.mountpoint,
            given.options,
            lambda: print(f"ready {given.mountpoint}", flush=True),
        )
    except MountError as error:
        print(f"fuse_mount: {printable(str(error))}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:  # before the server handles signals
        return 128 + signal.SIGINT
    return 0


if __name__ == "__main__":
    hide_command_line()
    sys.exit(main())
