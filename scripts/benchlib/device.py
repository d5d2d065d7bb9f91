"""``scripts/bench device``: the kernel's devices on our NBD server and on nbdkit, in one guest."""

from __future__ import annotations

import sys
from pathlib import Path

import click
from rich.console import Console

from benchlib.command import run_command
from benchlib.lab import measure, table_of

PEER = "nbdkit, 4 connections"


@click.command()
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--seconds", type=click.FloatRange(1), default=5, show_default=True)
@click.option("--timeout", type=click.IntRange(60), default=1500, show_default=True)
@click.option("--json", "file", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE")
def command(rounds: int, seconds: float, timeout: int, file: Path | None) -> int:
    """Compare /dev/nbdX by `iserblk attach` and by `iserblk attach --nbdkit`, with one and four
    connections."""
    status, samples = measure("none", "device_guest", rounds, seconds, timeout, file)
    if samples:
        Console(width=100).print(table_of(samples, PEER))
    return status


if __name__ == "__main__":
    sys.exit(run_command(command, "scripts/bench device"))
