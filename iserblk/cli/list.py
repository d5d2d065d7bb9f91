"""``iserblk list``: the named LUNs."""

from __future__ import annotations

import click

from iserblk.cli.command import Command
from iserblk.cli.named_rows import fields, shown_url
from iserblk.cli.options import json_option
from iserblk.cli.output import end_partly, print_json
from iserblk.errors import IserblkError
from iserblk.named.files import check_name, directories, load, misnamed, names


@click.command("list", cls=Command)
@json_option
def command(as_json: bool) -> None:
    """List the named LUNs: where each is attached or mounted, and its URLs, without secrets.

    A named LUN whose file is wrong is in the list, with the reason; it is named on stderr as well,
    and the exit status is 1.
    """
    rows: list[tuple[str, str, str]] = []
    found: list[dict[str, object]] = []
    wrong: list[str] = []
    for file in sorted([*names(), *misnamed()]):
        name = repr(file)[1:-1]  # whatever is in the name of a file
        try:
            check_name(file)
            named = load(name)
            found.append(fields(named))
            place = " ".join(named.devices) or named.mountpoint
            rows.append((name, place, " ".join(map(shown_url, named.urls))))
        except IserblkError as error:
            found.append({"name": name, "error": str(error)})
            rows.append((name, "", f"cannot be used: {error}"))
            wrong.append(f"{name}: {error}")
    if as_json:
        print_json({"luns": found})
    else:
        _show(rows)
    end_partly(wrong, "cannot be used")


def _show(rows: list[tuple[str, str, str]]) -> None:
    if not rows:
        click.echo(f"no LUN has a name in {' or '.join(map(str, directories()))}")
    widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
    for name, place, about in rows:
        click.echo(f"{name:<{widths[0]}}  {place:<{widths[1]}}  {about}")
