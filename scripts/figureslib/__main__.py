"""scripts/figures: options, and what is printed."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import click
from benchlib.command import run_command
from benchlib.nbd_load import LoadFailed
from benchlib.servers import Absent

from figureslib.path import JOURNEYS, Way, journeys, read
from figureslib.source import MOST_ATTRIBUTES, MOST_LINES, Figures, count

TOP = Path(__file__).resolve().parents[2]


@click.command()
@click.argument(
    "directory", default=TOP, type=click.Path(path_type=Path, exists=True, file_okay=False)
)
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@click.option("--no-path", is_flag=True, help="Only what the source says.")
@click.option("--calls", type=click.Choice(JOURNEYS), help="Only the calls of a journey, in order.")
def figures(directory: Path, as_json: bool, no_path: bool, calls: str | None) -> None:
    """Count what the code's structure is judged by, in this checkout or in DIRECTORY."""
    top = directory.resolve()
    if not (top / "iserblk").is_dir():
        raise click.UsageError(f"{directory} is no checkout of iserblk")
    if not no_path and not (top / ".venv/bin/python").exists():
        raise click.UsageError(
            f"{directory} has no .venv: run its scripts/setup, or give --no-path"
        )
    if calls is not None:
        _list_calls(top, calls)
        return
    counted = count(top)
    try:
        way = None if no_path else read(top)
    except (Absent, LoadFailed, OSError) as error:
        raise click.ClickException(str(error)) from None
    if as_json:
        click.echo(json.dumps({**asdict(counted), "read": asdict(way) if way else None}, indent=2))
    else:
        _show(counted, way)


def _list_calls(top: Path, name: str) -> None:
    """Of the shortest of several."""
    try:
        taken = journeys(top)[name]
    except (Absent, LoadFailed, OSError) as error:
        raise click.ClickException(str(error)) from None
    shortest = min(taken, key=lambda each: len(each.nbd))
    for process, listed in (("iserblk nbd", shortest.nbd), ("iserblk target", shortest.target)):
        click.echo(f"{name}, {process}:")
        for file, function in listed:
            click.echo(f"    {file} {function}")


def _show(counted: Figures, way: Way | None) -> None:
    if way is not None:
        click.echo(f"READ, nbd: calls        {way.calls:.0f}")
        click.echo(f"READ, nbd: files        {len(way.files)}")
        click.echo(f"READ, nbd: crossings    {way.crossings:.0f}")
    click.echo(f"lines of the product    {counted.product_lines:,}")
    click.echo(f"lines of the tests      {counted.test_lines:,}")
    click.echo(f"locks below the faces   {sum(counted.locks.values())}")
    _list(counted.locks)
    click.echo(f"importers of TaskSlot   {len(counted.task_slot)}")
    _list(dict.fromkeys(counted.task_slot, 0))
    click.echo(f"classes of more than {MOST_ATTRIBUTES} attributes   {len(counted.classes)}")
    _list(counted.classes)
    click.echo(f"functions of more than {MOST_LINES} lines  {len(counted.functions)}")
    _list(counted.functions)


def _list(found: Mapping[str, int]) -> None:
    for name, number in sorted(found.items(), key=lambda item: (-item[1], item[0])):
        click.echo(f"    {number or '':4} {name}")


if __name__ == "__main__":
    sys.exit(run_command(figures, "scripts/figures"))
