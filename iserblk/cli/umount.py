"""``iserblk umount``: flushes and unmounts. Exit statuses are those of mount(8)."""

from __future__ import annotations

import click

from fuse_mount.errors import UsageError
from fuse_mount.mount import unmount, whole_path
from fuse_mount.mounted import How
from iserblk.cli.command import UsageStatus
from iserblk.cli.here import places_of
from iserblk.cli.mount import own_place
from iserblk.files import is_there
from iserblk.named.files import may_be_name
from iserblk.named.resolving import names_lun
from iserblk.printable import shell_word


@click.command("umount", cls=UsageStatus)
@click.argument("mountpoint", metavar="MOUNTPOINT")
@click.option(
    "-f",
    "--force",
    is_flag=True,
    help="Do not flush, and wait for nothing: all requests fail at once, also of what uses the"
    " files.",
)
def command(mountpoint: str, force: bool) -> None:
    """Flush and unmount MOUNTPOINT, or that of a named LUN; return when the process that served it
    has ended. If the target is away, this takes a minute at most; what was not flushed may then be
    lost, and the exit status is 1."""
    if may_be_name(mountpoint) and not is_there(mountpoint):
        if not names_lun(mountpoint):
            whole_path(mountpoint)  # raises where the current directory is gone
            raise UsageError(
                f"{mountpoint}: no such directory, and no LUN of that name; `findmnt -t"
                " fuse.iserblk` shows where LUNs are mounted, `iserblk list` the names"
            )
        mountpoint = own_place(
            mountpoint,
            " and ".join(
                f"it is mounted at {place}: `iserblk umount {shell_word(place)}`"
                for place in places_of(mountpoint, "mount")
            )
            or "`findmnt -t fuse.iserblk` shows where LUNs are mounted",
        )
    unmount(mountpoint, How.AT_ONCE if force else How.FLUSHED)
