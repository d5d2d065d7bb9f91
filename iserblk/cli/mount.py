"""``iserblk mount``: mounts LUNs as files. Exit statuses are those of mount(8)."""

from __future__ import annotations

import os

import click

from fuse_mount.errors import UsageError
from fuse_mount.mount import mount_background, mount_foreground, whole_path
from iserblk.cli.command import UsageStatus
from iserblk.cli.notify import ready
from iserblk.cli.options import connection, connection_options_but
from iserblk.errors import IserblkError
from iserblk.named.files import load, may_be_name
from iserblk.named.resolving import names_lun
from iserblk.options import LASTING_WORDS
from iserblk.url import is_url


@click.command("mount", cls=UsageStatus)
@click.argument("urls", metavar="URL…", nargs=-1)  # or the name of LUNs, as everywhere
@click.argument("mountpoint", metavar="MOUNTPOINT")
@click.option(
    "-f",
    "--foreground",
    is_flag=True,
    help="Stay in the foreground; print `ready MOUNTPOINT` when the files are usable.",
)
@click.option(
    "-o", "words", metavar="OPT,OPT", multiple=True, help="Mount options, see above: ro, uid=, …"
)
@connection_options_but(defaults=LASTING_WORDS)
def command(
    urls: tuple[str, ...],
    mountpoint: str,
    foreground: bool,
    words: tuple[str, ...],
    **options: str | None,
) -> None:
    """Mount one file per LUN (lun0, lun1, …) in the empty directory MOUNTPOINT.

    Returns when the files are usable; `iserblk umount MOUNTPOINT` ends the mount. For a named LUN
    that has a mount point, MOUNTPOINT may be left out.

    -o takes ro, allow_other, uid=, gid=, umask=, direct_io, auto_cache, kernel_cache, and the
    options of the connection as NAME=VALUE. It ignores the usual words of fstab lines (defaults,
    _netdev, nofail, noauto, user, x-…).
    """
    # Also a name that no LUN has, so that the error is about the name.
    wrong = may_be_name(mountpoint) and not os.path.lexists(mountpoint)
    if not urls and (names_lun(mountpoint) or wrong):
        urls = (mountpoint,)
        mountpoint = own_place(mountpoint, f"name it: `iserblk mount {mountpoint} MOUNTPOINT`")
    if not urls:  # click gives the only argument to the last one
        missing = "MOUNTPOINT" if is_url(mountpoint) else "URL…"
        raise click.UsageError(f"Missing argument '{missing}'.", click.get_current_context())
    given = [f"{name}={value}" for name, value in connection(options).items()]
    escaped = [word.replace("\\", "\\\\").replace(",", "\\,") for word in given]
    if foreground:
        place = whole_path(mountpoint)
        mount_foreground(urls, mountpoint, [*words, *escaped], lambda: ready(place))
    else:
        mount_background(urls, mountpoint, [*words, *escaped])


def own_place(name: str, remedy: str) -> str:
    """The mount point of a named LUN. Raises UsageError; ``remedy``: where it has none."""
    try:
        place = load(name).mountpoint
    except IserblkError as error:
        raise UsageError(str(error)) from None
    if not place:
        raise UsageError(f"{name} has no mount point of its own: {remedy}")
    return place
