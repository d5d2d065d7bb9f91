"""``iserblk show``: one named LUN."""

from __future__ import annotations

import click

from iserblk.cli.command import Command
from iserblk.cli.named_rows import fields, shown_url, shown_word, users
from iserblk.cli.options import json_option
from iserblk.cli.output import print_json, print_table
from iserblk.cli.units import state_of
from iserblk.named.files import load


@click.command("show", cls=Command)
@click.argument("name", metavar="NAME")
@json_option
def command(name: str, as_json: bool) -> None:
    """Show the URLs, options and place of a named LUN, and the state of its unit. Secrets are not
    shown."""
    named = load(name)
    enabled, active = state_of(named)
    if as_json:
        print_json({**fields(named), "enabled": enabled, "active": active})
        return
    rows = [("URL", shown_url(text)) for text in named.urls]
    rows += [("user", user) for user in users(named)]
    rows += [("device", device) for device in named.devices]
    rows += [("mount point", named.mountpoint)] if named.mountpoint else []
    rows += [("option", shown_word(word)) for word in named.words]
    rows += [("at boot", "yes" if enabled else "no")] if enabled is not None else []
    rows += [("now", "in use by its unit" if active else "not in use by its unit")] * (
        active is not None
    )
    print_table(f"{name}: {named.path}", rows)
