"""``iserblk remove``: removes the name of LUNs, not the LUNs."""

from __future__ import annotations

import click

from iserblk.cli.command import Command
from iserblk.cli.units import state_of
from iserblk.errors import Busy
from iserblk.named.files import delete, load


@click.command("remove", cls=Command)
@click.argument("name", metavar="NAME")
def command(name: str) -> None:
    """Remove the name NAME, with its options and the CHAP secret that was kept with it. The LUNs,
    and what is attached or mounted, stay as they are.

    Refuses while the unit of NAME is enabled or active.
    """
    named = load(name)
    if any(state_of(named)):
        raise Busy(f"{name}: its unit is in use: first `iserblk disable {name}`")
    delete(named)
    click.echo(f"removed {named.path}")
