"""``iserblk umount``: flushes and unmounts. Exit statuses are those of mount(8)."""

from __future__ import annotations

import os

import click

from fuse_mount.errors import UsageError
from fuse_mount.mount import unmount, whole_path
from iserblk.cli.command import UsageStatus
from iserblk.cli.mount import own_place
from iserblk.named.files import may_be_name
from iserblk.named.resolving import names_lun


@click.command("umount", cls=UsageStatus)
@click.argument("mountpoint", metavar="MOUNTPOINT")
def command(mountpoint: str) -> None:
    """Flush and unmount MOUNTPOINT, or that of a named LUN; return when the process that served it
    has ended."""
    if may_be_name(mountpoint) and not os.path.lexists(mountpoint):
        if not names_lun(mountpoint):
            whole_path(mountpoint)  # raises where the current directory is gone
            raise UsageError(
                f"{mountpoint}: no such directory, and no LUN of that name; `findmnt -t"
                " fuse.iserblk` shows where LUNs are mounted, `iserblk list` the names"
            )
        mountpoint = own_place(mountpoint, "`findmnt -t fuse.iserblk` shows where LUNs are mounted")
    unmount(mountpoint)
