"""``iserblk detach``: ends an attach; loses no data if the target still answers."""

from __future__ import annotations

import logging

import click

from iserblk.cli.command import Command
from iserblk.cli.here import places_of
from iserblk.errors import BadArgument, IserblkError
from iserblk.named.files import load, may_be_name
from iserblk.named.resolving import names_lun
from iserblk.nbd.kernel import detaching, device
from iserblk.nbd.kernel.device import Directories
from iserblk.url import is_url

log = logging.getLogger(__name__)

DIRECTORIES = Directories()


@click.command("detach", cls=Command)
@click.argument("paths", metavar="/dev/nbdX…", nargs=-1, required=True)
@click.option(
    "--force",
    is_flag=True,
    help="Do not flush, and wait for nothing: all requests fail at once, also of what uses the"
    " device.",
)
def command(paths: tuple[str, ...], force: bool) -> None:
    """Flush and disconnect /dev/nbdX, or the device of a named LUN; return when the device is free
    and its server has ended.

    Refuses while the device is mounted or open. If the target is away, this takes a minute at most.
    If the exit status is not 0, written data may be lost. Of several devices, one that cannot be
    detached does not keep the others from it.
    """
    if any(map(is_url, paths)):  # it may have a secret
        raise BadArgument("a URL stands in place of the device: name one, e.g. /dev/nbd0")
    device.need_root()
    found = [each for path in paths for each in _devices(path)]
    problem: IserblkError | None = None
    for each in [device.find(path, DIRECTORIES) for path in found]:
        try:
            (detaching.force if force else detaching.detach)(each)
        except IserblkError as error:
            if problem is not None:
                log.error("%s", error)
            problem = problem or error
    if problem is not None:
        raise problem


def _devices(path: str) -> tuple[str, ...]:
    if not names_lun(path):
        if may_be_name(path) and not path.startswith("nbd"):
            raise BadArgument(
                f"{path}: no NBD device, and no LUN of that name: name a device, e.g. /dev/nbd0;"
                " `iserblk list` shows the names"
            )
        return (path,)
    devices = load(path).devices
    if not devices:
        attached = " and ".join(
            f"it is attached at {place}: `iserblk detach {place}`"
            for place in places_of(path, "attach")
        )
        remedy = attached or "name the device, e.g. /dev/nbd0"
        raise BadArgument(f"{path} has no device of its own: {remedy}")
    return devices
