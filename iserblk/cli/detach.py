"""``iserblk detach``: an end that loses nothing, where the target still answers."""

from __future__ import annotations

import click

from iserblk.nbd.kernel import detaching, device
from iserblk.nbd.kernel.device import Places

PLACES = Places()


@click.command("detach")
@click.argument("paths", metavar="/dev/nbdX…", nargs=-1, required=True)
def command(paths: tuple[str, ...]) -> None:
    """Flush, disconnect /dev/nbdX, and return when it is free and nbdkit has ended.

    Refuses while it is mounted or open. Works after the target has died, too; an exit status other
    than 0 then says that written data may be lost.
    """
    device.need_root()
    for each in [device.find(path, PLACES) for path in paths]:
        detaching.detach(each)
