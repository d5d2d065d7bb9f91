"""``iserblk umount``: flushes and unmounts. Exit statuses are those of mount(8)."""

from __future__ import annotations

import os

import click

from fuse_mount.mount import unmount
from iserblk.cli.main import UsageStatus
from iserblk.cli.mount import own_place
from iserblk.named.resolving import names_lun


@click.command("umount", cls=UsageStatus)
@click.argument("mountpoint", metavar="MOUNTPOINT")
def command(mountpoint: str) -> None:
    """Flush and unmount MOUNTPOINT, or that of a named LUN; return when the process that served it
    has ended."""
    if names_lun(mountpoint) and not os.path.lexists(mountpoint):
        mountpoint = own_place(mountpoint)
    unmount(mountpoint)
