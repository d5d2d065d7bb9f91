"""``iserblk detach``: ends an attach; loses no data if the target still answers."""

from __future__ import annotations

import click

from iserblk.errors import BadArgument
from iserblk.nbd.kernel import detaching, device
from iserblk.nbd.kernel.device import Places
from iserblk.url import is_url

PLACES = Places()


@click.command("detach")
@click.argument("paths", metavar="/dev/nbdX…", nargs=-1, required=True)
def command(paths: tuple[str, ...]) -> None:
    """Flush and disconnect /dev/nbdX; return when the device is free and its server has ended.

    Refuses while the device is mounted or open. Works even if the target has died. If the exit
    status is not 0, written data may be lost.
    """
    if any(map(is_url, paths)):  # it may have a secret
        raise BadArgument("a URL stands in place of the device: name one, e.g. /dev/nbd0")
    device.need_root()
    for each in [device.find(path, PLACES) for path in paths]:
        detaching.detach(each)
