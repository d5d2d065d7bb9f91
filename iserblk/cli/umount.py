"""``iserblk umount``: flushes and unmounts. Exit statuses are those of mount(8)."""

from __future__ import annotations

import click

from fuse_mount.mount import unmount
from iserblk.cli.main import UsageStatus


@click.command("umount", cls=UsageStatus)
@click.argument("mountpoint", metavar="MOUNTPOINT")
def command(mountpoint: str) -> None:
    """Flush and unmount MOUNTPOINT; return when the process that served it has ended."""
    unmount(mountpoint)
