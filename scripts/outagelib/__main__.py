"""The command line of scripts/outage."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import click
from lablib.command import run_command
from lablib.setups import TOP, peer
from rich.console import Console

from outagelib import report, say
from outagelib.cases import CASES, TARGETS
from outagelib.picture import draw
from outagelib.work import programs_of_postgresql

_GUEST_S = 3600
_MEMORY = "3G"
_WIDTH = 110


@click.command(epilog="Exit status: 0 every case has run, 1 not, 7 bad argument.")
@click.option("--case", "names", multiple=True, type=click.Choice(list(CASES)), metavar="NAME",
              help="Only this outage; repeatable.")  # fmt: skip
@click.option("--file-system", "file_systems", multiple=True, type=click.Choice(["ext4", "xfs"]),
              default=["ext4"], help="The file system (default ext4); repeatable.")  # fmt: skip
@click.option("--target", "targets", multiple=True, type=click.Choice(list(TARGETS)),
              default=["LIO"],
              help="The target (default LIO, the kernel's own); repeatable.")  # fmt: skip
@click.option("--program", type=click.Choice(list(report.PROGRAMS)), default="records",
              help="What works in the file systems (default records).")  # fmt: skip
@click.option("--away", type=click.FloatRange(1, 3000), metavar="S",
              help="Seconds for which the target is away, in place of the case's.")  # fmt: skip
@click.option("--json", "file", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
              help="Also write what was measured to FILE.")  # fmt: skip
@click.option("--plot", type=click.Path(file_okay=False, path_type=Path), metavar="DIR",
              help="Also draw each outage: outage-CASE.svg in DIR.")  # fmt: skip
@click.option("--from", "results", metavar="FILE",
              type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="Run nothing: show what --json has written to FILE.")  # fmt: skip
@click.option("--list", "only_list", is_flag=True, help="Print the cases, and do nothing.")
def outage(
    names: tuple[str, ...], file_systems: tuple[str, ...], targets: tuple[str, ...], program: str,
    away: float | None, file: Path | None, plot: Path | None, results: Path | None,
    only_list: bool,
) -> int:  # fmt: skip
    """Make an outage of a target, and show what becomes of file systems on it."""
    if only_list:
        for case in CASES.values():
            click.echo(f"{case.name:8}  {case.about}")
        return 0
    if results is not None:
        try:
            found = report.read(results)
        except ValueError as error:
            raise click.UsageError(f"--from {results}: {error}") from None
        found = [each for each in found if not names or each.case in names]
    else:
        found = []
        wish = {
            "targets": {each: str(peer(TARGETS[each])) if TARGETS[each] else "/"
                        for each in targets},
            "file_systems": list(dict.fromkeys(file_systems)),
            "database": _database() if program == "pgbench" else "",
        }  # fmt: skip
        for name in names or CASES:
            found += _run(name, wish, away)
    console = Console(width=_WIDTH)
    for each in found:
        console.print(report.table(each))
    if file is not None:
        report.write(file, found)
    if plot is not None:
        plot.mkdir(parents=True, exist_ok=True)
        for each in found:
            picture = plot / f"outage-{each.name}.svg"
            draw(each).write(picture)
            say(f"drew {picture}")
    missed = {*(names or CASES)} - {each.case for each in found}
    return 1 if results is None and missed else 0


def _database() -> str:
    """Where the programs of PostgreSQL are. Raises UsageError."""
    programs = programs_of_postgresql()
    if programs is None:
        raise click.UsageError("--program pgbench: no PostgreSQL below /usr/lib/postgresql: "
                               "apt-get install postgresql (which starts a server)")  # fmt: skip
    return str(programs)


def _run(name: str, wish: Mapping[str, object], away: float | None) -> list[report.Outage]:
    """One case, in a guest of its own; none, with a message, if it has not come to its end."""
    away_s = CASES[name].away_s if away is None else away
    with tempfile.TemporaryDirectory(prefix="iserblk-outage-") as directory:
        status = to_its_end(
            [
                *(sys.executable, "-P", "-m", "lablib", "--setup", "tcp", "--memory", _MEMORY),
                *("--timeout", str(_GUEST_S + away_s), "--results", directory),
                *("env", f"PYTHONPATH={TOP / 'scripts'}:{TOP}"),
                *("python", "-P", "-m", "outagelib.guest"),
                json.dumps({"case": name, "away_s": away_s, **wish}),
            ]
        )
        measured = Path(directory) / "outage.json"
        if not measured.exists():
            say(f"{name}: the guest has ended with status {status}, and measured nothing")
            return []
        return report.read(measured)


def to_its_end(words: list[str]) -> int:
    """Run a command of ours; its exit status. Interrupted, it lets that end first: the guest, which
    nothing else would end, is its."""
    environment = {**os.environ, "PYTHONPATH": str(TOP / "scripts")}
    process = subprocess.Popen(words, env=environment, stdin=subprocess.DEVNULL)
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.terminate()
        process.wait()
        raise


if __name__ == "__main__":
    sys.exit(run_command(outage, "scripts/outage", say, "stopped; the guest is gone"))
