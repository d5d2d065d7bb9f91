"""``iserblk disable``: the opposite of enable."""

from __future__ import annotations

import click

from iserblk.cli.command import Command
from iserblk.cli.units import need_systemd, order
from iserblk.named.files import load


@click.command("disable", cls=Command)
@click.argument("name", metavar="NAME")
def command(name: str) -> None:
    """Flush and detach or unmount NAME, and leave it so at the next boot. The name stays.

    Waits until nothing is mounted from its device. Needs root, and systemd.
    """
    need_systemd()
    click.echo(order("disable", load(name)))
