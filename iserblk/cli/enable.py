"""``iserblk enable``: named LUNs from boot to shutdown."""

from __future__ import annotations

import click

from iserblk.cli.command import Command
from iserblk.cli.units import need_systemd, order
from iserblk.named.files import load


@click.command("enable", cls=Command)
@click.argument("name", metavar="NAME")
def command(name: str) -> None:
    """Attach or mount NAME now, and at each boot, by a unit of systemd: `iserblk-mount@NAME` if it
    has a mount point, else `iserblk-attach@NAME`.

    Needs root, and systemd with the units of iserblk.
    """
    need_systemd()
    click.echo(order("enable", load(name)))
