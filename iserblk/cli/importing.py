"""``iserblk import``: named LUNs from open-iscsi's node records."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import click

from iserblk.cli.command import Command
from iserblk.cli.named_rows import shown_url, shown_word
from iserblk.cli.options import json_option
from iserblk.cli.output import end_partly, print_json
from iserblk.errors import BadArgument, IserblkError, TargetNotFound
from iserblk.named.files import Named, load, names, save, secret_path
from iserblk.named.open_iscsi import Imported, default_nodes, read_nodes
from iserblk.url import parse_url

log = logging.getLogger(__name__)


_NOT_POSSIBLE = "not possible"


@click.command("import", cls=Command)
@click.argument("targets", metavar="[IQN…]", nargs=-1)
@click.option(
    "--from",
    "directory",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="open-iscsi's directory of nodes. Default: /etc/iscsi/nodes or /var/lib/iscsi/nodes.",
)
@click.option("--dry-run", is_flag=True, help="Only show what would be made.")
@json_option
def command(targets: tuple[str, ...], directory: Path | None, dry_run: bool, as_json: bool) -> None:
    """Make a named LUN of each target, or of the targets IQN…, that open-iscsi has node records of.

    Portals, CHAP, the interface's initiator name, digests and what else has a counterpart here are
    taken over; what has none is named. Nothing of open-iscsi is changed. A named LUN has all LUNs
    of the target. A target that a named LUN has already is left alone.

    What is no node record, and a target that cannot be taken over, is named on stderr, and does not
    keep the others from being imported; the exit status is 1 then.
    """
    nodes = read_nodes(directory or default_nodes())
    wanted = {each.lower() for each in targets}
    unread = [each for each in nodes.unread if not wanted or each.target.lower() in wanted]
    if missing := wanted - {each.target.lower() for each in nodes.targets}:
        name = min(missing)
        of_it = [f": {each.words}" for each in unread if each.target.lower() == name]
        raise TargetNotFound(f"open-iscsi has no node record of {name}{''.join(of_it[:1])}")
    known = _known_targets()
    rows: list[dict[str, object]] = []
    for each in nodes.targets:
        if wanted and each.target.lower() not in wanted:
            continue
        rows.append(_import(each, known, dry_run))
    words = [each.words for each in unread]
    if as_json:
        print_json({"targets": rows, "unread": words})
    else:
        _show_all(rows)
    end_partly(words + [f"{row['target']}: {row['outcome']}: {_reason(row)}" for row in rows
                        if row["outcome"] == _NOT_POSSIBLE])  # fmt: skip


def _reason(row: dict[str, object]) -> str:
    """Why nothing was taken over."""
    left_out = row["left_out"]
    assert isinstance(left_out, list)
    return str(left_out[-1])


def _show_all(rows: list[dict[str, object]]) -> None:
    if not rows:
        click.echo("open-iscsi has no node records")
    for row in rows:
        _show(row)
    if any(row["automatic"] and row["outcome"] == "added" for row in rows):
        click.echo(
            "open-iscsi logs in at boot where that is said: `iserblk enable NAME` does it here;"
            " first end it there, as both would write: iscsiadm -m node -T IQN -u, and"
            " iscsiadm -m node -T IQN -o update -n node.startup -v manual"
        )


def _known_targets() -> dict[str, str]:
    """The named LUN of each target that has one."""
    known = {}
    for name in names():
        try:
            known.update({parse_url(text).iqn.lower(): name for text in load(name).urls})
        except IserblkError as error:
            log.warning("%s; a target that it has may be imported again", error)
    return known


def _import(each: Imported, known: dict[str, str], dry_run: bool) -> dict[str, object]:
    name, outcome = each.name, "added"
    if there := known.get(each.target.lower()):
        name, outcome = there, "there already"
    elif not each.urls:
        name, outcome = "", _NOT_POSSIBLE
    else:
        name = _free(each.name)
        options = dict(each.options)
        if each.secrets:
            options["chap-secret-file"] = str(secret_path(name))
        words = tuple(f"{key}={value}" for key, value in options.items())
        named = Named(name, tuple(each.urls), words=words)
        try:
            named.text()
            if dry_run:
                outcome = "would be added"
            else:
                save(named, each.secrets)
        except BadArgument as error:
            name, outcome = "", _NOT_POSSIBLE
            each.left_out.append(str(error))
    return {
        "target": each.target,
        "name": name,
        "outcome": outcome,
        "urls": [shown_url(text) for text in each.urls],
        "options": [shown_word(f"{key}={value}") for key, value in each.options.items()],
        "chap": ("none", "one-way", "mutual")[len(each.secrets)],
        "automatic": each.automatic,
        "left_out": each.left_out,
    }


def _free(wanted: str) -> str:
    taken = {name.lower() for name in names()}
    name, number = wanted, 2
    while name.lower() in taken or os.path.lexists(secret_path(name)):
        name, number = f"{wanted}-{number}", number + 1
    return name


def _show(row: dict[str, object]) -> None:
    name = f", as {row['name']}" if row["name"] else ""
    click.echo(f"{row['target']}: {row['outcome']}{name}")
    lists = (("", row["urls"]), ("option ", row["options"]), ("left out: ", row["left_out"]))
    for head, lines in lists:
        assert isinstance(lines, list)
        for line in lines:
            click.echo(f"  {head}{line}")
    if row["chap"] != "none":
        click.echo(f"  CHAP, {row['chap']}")
    if row["automatic"]:
        click.echo("  open-iscsi logs in at boot")
