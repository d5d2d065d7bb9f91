"""``iserblk list``: the named LUNs."""

from __future__ import annotations

import click

from iserblk.cli.named_rows import fields, shown_url
from iserblk.cli.options import json_option
from iserblk.cli.output import print_json
from iserblk.errors import IserblkError
from iserblk.named.files import directories, load, names


@click.command("list")
@json_option
def command(as_json: bool) -> None:
    """List the named LUNs: where each is attached or mounted, and its URLs, without secrets."""
    rows: list[tuple[str, str, str]] = []
    found: list[dict[str, object]] = []
    for name in names():
        try:
            named = load(name)
            found.append(fields(named))
            place = " ".join(named.devices) or named.mountpoint
            rows.append((name, place, " ".join(map(shown_url, named.urls))))
        except IserblkError as error:
            found.append({"name": name, "error": str(error)})
            rows.append((name, "", f"cannot be used: {error}"))
    if as_json:
        print_json({"luns": found})
        return
    if not rows:
        click.echo(f"no LUN has a name in {' or '.join(map(str, directories()))}")
    widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
    for name, place, about in rows:
        click.echo(f"{name:<{widths[0]}}  {place:<{widths[1]}}  {about}")
