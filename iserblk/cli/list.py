"""``iserblk list``: the named LUNs."""

from __future__ import annotations

from collections.abc import Sequence

import click

from iserblk.cli.command import Command
from iserblk.cli.here import Use, look_around, luns_of, uses_of
from iserblk.cli.named_rows import fields, shown_url
from iserblk.cli.options import json_option
from iserblk.cli.output import end_partly, print_json
from iserblk.errors import IserblkError
from iserblk.named.files import check_name, directories, load, misnamed, names
from iserblk.printable import printable


@click.command("list", cls=Command)
@json_option
def command(as_json: bool) -> None:
    """List the named LUNs: where each is to be attached or mounted, what uses it on this machine
    now, and its URLs, without secrets.

    A named LUN whose file is wrong is in the list, with the reason; it is named on stderr as well,
    and the exit status is 1.
    """
    rows: list[tuple[str, str, str, str]] = []
    here = look_around()
    found: list[dict[str, object]] = []
    wrong: list[str] = []
    for file in sorted([*names(), *misnamed()]):
        name = repr(file)[1:-1]  # whatever is in the name of a file
        try:
            check_name(file)
            named = load(name)
            uses = uses_of(luns_of(named), here)
            found.append({**fields(named), "in_use": [_use(each) for each in uses]})
            place = " ".join(named.devices) or named.mountpoint
            rows.append((name, place, in_use_words(uses), " ".join(map(shown_url, named.urls))))
        except IserblkError as error:
            found.append({"name": name, "error": str(error)})
            rows.append((name, "", "", f"cannot be used: {error}"))
            wrong.append(f"{name}: {error}")
    if as_json:
        print_json({"luns": found})
    else:
        _show(rows)
    end_partly(wrong, "cannot be used")


def _use(use: Use) -> dict[str, object]:
    return {"what": use.what, "where": use.where, "state": use.state, "pid": use.pid or None}


def in_use_words(uses: Sequence[Use]) -> str:
    """What uses a named LUN, or "" where nothing does."""
    words = [f"{use.what} {use.where}".rstrip() for use in uses]
    return f"in use: {', '.join(dict.fromkeys(map(printable, words)))}" if words else ""


def _show(rows: list[tuple[str, str, str, str]]) -> None:
    if not rows:
        click.echo(f"no LUN has a name in {' or '.join(map(str, directories()))}")
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
    for *columns, about in rows:
        cells = [f"{each:<{width}}  " for each, width in zip(columns, widths, strict=True) if width]
        click.echo(f"{''.join(cells)}{about}")
