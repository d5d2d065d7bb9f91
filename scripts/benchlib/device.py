"""``scripts/bench device``: devices by iserblk and by the kernel's initiator, in one guest."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import click
from rich.console import Console

from benchlib.command import run_command
from benchlib.lab import measure, table_of
from benchlib.load import CONNECTION_JOBS, JOBS
from benchlib.results import Row

TCP, TCP_FOUR, TCP_NBDKIT = "iserblk-tcp", "iserblk-tcp-4-connections", "iserblk-nbdkit-tcp"
ISER = "iserblk-iser"
OPEN_ISCSI_TCP, OPEN_ISCSI_ISER = "open-iscsi-tcp", "open-iscsi-iser"
# Each subject, and that with which it is compared: open-iscsi by the same transport.
PEERS = {
    TCP: OPEN_ISCSI_TCP,
    TCP_FOUR: OPEN_ISCSI_TCP,
    TCP_NBDKIT: OPEN_ISCSI_TCP,
    OPEN_ISCSI_TCP: OPEN_ISCSI_TCP,
    ISER: OPEN_ISCSI_ISER,
    OPEN_ISCSI_ISER: OPEN_ISCSI_ISER,
}
_SETUP = "rxe-lio-initiator"


def rows(patterns: Sequence[str]) -> list[Row]:
    """Those whose name ``device/JOB/SUBJECT`` matches a glob, by job, then by subject."""
    found = [Row("device", job, each) for job in (*JOBS, *CONNECTION_JOBS) for each in PEERS]
    return [row for row in found if any(fnmatchcase(row.name, each) for each in patterns)]


@click.command()
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--seconds", type=click.FloatRange(1), default=5, show_default=True)
@click.option("--timeout", type=click.IntRange(60), default=3600, show_default=True)
@click.option("--rows", "patterns", multiple=True, default=("*",), metavar="GLOB",
              help="device/JOB/SUBJECT to run; may be given more than once.")  # fmt: skip
@click.option("--list", "only_list", is_flag=True, help="Print the rows and do nothing.")
@click.option("--json", "file", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE")
def command(
    rounds: int,
    seconds: float,
    timeout: int,
    patterns: tuple[str, ...],
    only_list: bool,
    file: Path | None,
) -> int:
    """Compare /dev/nbdX by `iserblk attach` with /dev/sdX by open-iscsi (iscsi_tcp, and ib_iser on
    Soft-RoCE), on one LIO target."""
    for pattern in patterns:
        if not rows([pattern]):
            raise click.UsageError(f"no row is called {pattern}; --list shows them all")
    if only_list:
        click.echo("\n".join(row.name for row in rows(patterns)))
        return 0
    status, samples = measure(_SETUP, "device_guest", rounds, seconds, timeout, file, *patterns)
    if samples:
        Console(width=120).print(table_of(samples, PEERS.__getitem__))
    return status


if __name__ == "__main__":
    sys.exit(run_command(command, "scripts/bench device"))
