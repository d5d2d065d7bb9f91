"""``iserblk remove``: removes the name of LUNs, not the LUNs."""

from __future__ import annotations

import click

from iserblk.cli.command import Command
from iserblk.cli.here import Use, look_around, luns_of, uses_of
from iserblk.cli.units import state_of
from iserblk.errors import Busy
from iserblk.named.files import delete, load
from iserblk.printable import shell_word


@click.command("remove", cls=Command)
@click.argument("name", metavar="NAME")
def command(name: str) -> None:
    """Remove the name NAME, with its options and the CHAP secret that was kept with it. The LUNs
    stay as they are.

    Refuses while the unit of NAME is enabled or active, and while a LUN of NAME is in use on this
    machine.
    """
    named = load(name)
    if any(state_of(named)):
        raise Busy(f"{name}: its unit is in use: first `iserblk disable {name}`")
    uses = uses_of(luns_of(named), look_around())
    if uses:
        raise Busy(f"{name}: in use: {'; '.join(dict.fromkeys(map(_first, uses)))}")
    delete(named)
    click.echo(f"removed {named.path}")


def _first(use: Use) -> str:
    """What uses the LUN, and what is to be done first."""
    where = shell_word(use.where)
    if use.what == "attach":
        return f"it is attached at {use.where}: first `iserblk detach {where}`"
    if use.what == "mount":
        return f"it is mounted at {use.where}: first `iserblk umount {where}`"
    at = f" at {use.where}" if use.where else ""
    return f"iserblk {use.what}{at} (process {use.pid}) uses it: first end that"
