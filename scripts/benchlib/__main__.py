"""The command line of scripts/bench."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from benchlib import goals, machine, plots, report
from benchlib.command import run_command
from benchlib.results import Row
from benchlib.sections import SECTIONS, Plan, Section, Stopped, run_section
from benchlib.storage import FILE_SIZE, fill, place_for_files

_QUIET_LOAD = 0.5
_PIPE_WIDTH = 200


@click.command(epilog="Exit status: 0 all measured, 1 a row failed, 7 bad argument.")
@click.option("--quick", is_flag=True, help="One round of one second each.")
@click.option("--rows", "patterns", multiple=True, default=("*",), metavar="GLOB",
              help="SECTION/JOB/SUBJECT to run; may be given more than once.")  # fmt: skip
@click.option("--list", "only_list", is_flag=True, help="Print the rows and do nothing.")
@click.option("--rounds", type=click.IntRange(1), help="Rounds of each row (default 3).")
@click.option("--warm-up", type=click.IntRange(0), metavar="ROUNDS",
              help="Rounds before these, not counted (default 1, with --quick 0).")  # fmt: skip
@click.option("--starts", type=click.IntRange(1), default=1,
              help="Repeat all rounds N times, each with new servers (default 1).")  # fmt: skip
@click.option("--seconds", type=click.FloatRange(0.1), help="Seconds of each run (default 3).")
@click.option("--json", "json_file", type=click.Path(path_type=Path), metavar="FILE",
              help="Also write all results and samples to FILE.")  # fmt: skip
@click.option("--plot", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
              help="Also draw the tables: SVG files in DIR.")  # fmt: skip
@click.option("--from", "results", metavar="FILE",
              type=click.Path(path_type=Path, exists=True, dir_okay=False),
              help="Measure nothing: show what --json has written to FILE.")  # fmt: skip
@click.option("--keep-going", is_flag=True, help="Go on after a row that failed.")
@click.option("--dir", "directory", type=click.Path(path_type=Path, exists=True, file_okay=False),
              help="Directory for backing files (default /dev/shm, else TMPDIR).")  # fmt: skip
def bench(
    quick: bool,
    patterns: tuple[str, ...],
    only_list: bool,
    rounds: int | None,
    warm_up: int | None,
    starts: int,
    seconds: float | None,
    json_file: Path | None,
    plot: Path | None,
    results: Path | None,
    keep_going: bool,
    directory: Path | None,
) -> int:
    """Compare iserblk with its peers and with the ceilings of its front-ends, in one run.

    docs/running-benchmarks.md explains the rows, and how to read them.
    """
    rows = {section: section.rows(*patterns) for section in SECTIONS}
    every = [row for found in rows.values() for row in found]
    for pattern in patterns:
        if not any(section.rows(pattern) for section in SECTIONS):
            raise click.UsageError(f"no row is called {pattern}; --list shows them all")
    if only_list:
        click.echo("\n".join(row.name for row in every))
        return 0
    if plot is not None:
        plot.mkdir(parents=True, exist_ok=True)
    console = Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH)
    if results is not None:
        try:
            about, found = report.read_json(results)
        except ValueError as error:
            raise click.UsageError(f"--from {results}: {error}") from None
        every = [row for row in found if any(fnmatchcase(row.name, each) for each in patterns)]
        _introduce(console, about)
        _finish(console, about, every, json_file, plot)
        return 0
    plan = Plan(
        rounds=rounds or (1 if quick else 3),
        seconds=seconds or (1.0 if quick else 3.0),
        keep_going=keep_going,
        warm_up=warm_up if warm_up is not None else (0 if quick else 1),
        starts=starts,
    )
    about = machine.describe()
    _introduce(console, about)
    if about["load_average"] > _QUIET_LOAD:
        console.print(f"This machine is busy (load {about['load_average']:.1f}): expect noise.")
    complete = measure_all(rows, plan, directory or place_for_files())
    _finish(console, about, every, json_file, plot)
    return 0 if complete else 1


def _introduce(console: Console, about: dict[str, Any]) -> None:
    console.print(", ".join(f"{name} {value}" for name, value in about.items()), highlight=False)


def _finish(
    console: Console,
    about: dict[str, Any],
    rows: Sequence[Row],
    json_file: Path | None,
    directory: Path | None,
) -> None:
    """Print the tables, write the results, draw them."""
    outcomes = goals.judge(rows)
    report.print_report(console, rows, outcomes)
    if json_file is not None:
        report.write_json(json_file, report.as_json(about, rows, outcomes))
    for file in plots.write_plots(directory, rows) if directory is not None else ():
        click.echo(f"bench: drew {file}", err=True)


def measure_all(rows: dict[Section, list[Row]], plan: Plan, directory: Path) -> bool:
    """Fill the rows of every section. Returns True if no row failed."""
    errors = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="iserblk-bench-", dir=directory) as name:
        files = (Path(name) / "ours", Path(name) / "theirs")
        fill(files, FILE_SIZE)
        with errors.status("starting") as status:
            for section, its_rows in rows.items():
                try:
                    run_section(section, plan, files, its_rows, status.update)
                except Stopped as reason:
                    click.echo(f"bench: {reason}; --keep-going measures the others", err=True)
                    return False
    return not any(row.failed for found in rows.values() for row in found)


if __name__ == "__main__":
    sys.exit(run_command(bench, "scripts/bench"))
