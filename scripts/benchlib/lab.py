"""``scripts/bench --lab``: compares our verbs provider with the kernel's initiator in one guest."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from benchlib.command import run_command

_TOP = Path(__file__).resolve().parents[2]
PEER = "ib_iser"
GOALS = {"4k": 1 / 3, "1m": 0.8}  # parts of ib_iser's rate, by the size in the job's name
CPU_GOALS = {"4k": 2.0}  # times ib_iser's CPU time for a request, at most
OURS = ("iserblk-window", "iserblk-region")

Samples = list[dict[str, Any]]


@click.command()
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--seconds", type=click.FloatRange(1), default=5, show_default=True)
@click.option("--timeout", type=click.IntRange(60), default=1500, show_default=True)
@click.option("--json", "file", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE")
def command(rounds: int, seconds: float, timeout: int, file: Path | None) -> int:
    """Compare iserblk on verbs with ib_iser and libiscsi on one LIO target over Soft-RoCE."""
    status, samples = measure("rxe-lio-initiator", "lab_guest", rounds, seconds, timeout, file)
    if samples:
        report(samples)
    return status


def measure(
    setup: str,
    module: str,
    rounds: int,
    seconds: float,
    timeout: int,
    file: Path | None,
    *more: str,
) -> tuple[int, Samples]:
    """Run ``module`` of benchlib in a guest, with ``more`` arguments; (exit status of the command,
    what it measured). Also writes the samples to ``file``."""
    with tempfile.TemporaryDirectory(prefix="iserblk-bench-") as directory:
        done = subprocess.run(
            [
                *(_TOP / "scripts/lab", "--setup", setup, "--timeout", str(timeout)),
                *("--results", directory, "env", f"PYTHONPATH={_TOP / 'scripts'}:{_TOP}"),
                *("python", "-P", "-m", f"benchlib.{module}", str(rounds), str(seconds)),
                *more,
            ],
            check=False,
        )
        results = Path(directory) / "bench.json"
        if not results.exists():
            click.echo("bench: the guest measured nothing", err=True)
            return 1, []
        samples: Samples = json.loads(results.read_text())
    if file is not None:
        file.write_text(json.dumps(samples, indent=1) + "\n")
    return (1 if done.returncode else 0), samples


def of_subject(samples: Samples, job: str, subject: str) -> Samples:
    """Without those that failed."""
    return [e for e in samples if (e["job"], e["subject"]) == (job, subject) and e.get("ios")]


def rates(samples: Samples, job: str, subject: str) -> list[float]:
    return [each["ios"] / each["seconds"] for each in of_subject(samples, job, subject)]


def cpu_seconds(samples: Samples, job: str, subject: str) -> list[float]:
    """For a request."""
    return [each["cpu_seconds"] / each["ios"] for each in of_subject(samples, job, subject)]


def ratio(
    samples: Samples,
    job: str,
    subject: str,
    peer: str = PEER,
    of: Callable[[Samples, str, str], list[float]] = rates,
) -> float | None:
    """The median of the ratios within the rounds."""
    ours, theirs = of(samples, job, subject), of(samples, job, peer)
    if not ours or not theirs:
        return None
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=False))


def report(samples: Samples) -> None:
    console = Console(width=100)
    console.print(table_of(samples, lambda _subject: PEER))
    for job in dict.fromkeys(each["job"] for each in samples):
        size = job.partition("-")[0]
        goal = GOALS[size]
        for subject in OURS:
            share = ratio(samples, job, subject)
            verdict = "not measured" if share is None else "met" if share >= goal else "missed"
            console.print(f"{job}, {subject}: ≥ {goal:.2f} of {PEER}: {verdict}")
            most = CPU_GOALS.get(size)
            cost = ratio(samples, job, subject, of=cpu_seconds)
            if most is not None and cost is not None:
                verdict = "met" if cost <= most else "missed"
                console.print(
                    f"{job}, {subject}: CPU time {cost:.2f}, ≤ {most:.2f} of {PEER}: {verdict}"
                )


def table_of(samples: Samples, peer_of: Callable[[str], str]) -> Table:
    """A row for each job and subject, with the ratios to its peer."""
    subjects = dict.fromkeys(each["subject"] for each in samples)
    peers = ", ".join(dict.fromkeys(map(peer_of, subjects)))
    table = Table(
        title=f"in one emulated guest, only ratios say something; they are to {peers}",
        title_justify="left",
    )
    for name in ("job", "subject", "requests/s", "MiB/s", "ratio", "CPU ms/request", "ratio"):
        table.add_column(name, justify="left" if name in ("job", "subject") else "right")
    for job in dict.fromkeys(each["job"] for each in samples):
        table.add_section()
        for subject in dict.fromkeys(e["subject"] for e in samples if e["job"] == job):
            found = of_subject(samples, job, subject)
            if not found:
                table.add_row(job, subject, "failed")
                continue
            rate = statistics.median(rates(samples, job, subject))
            size = found[0]["bytes"] / found[0]["ios"]
            cpu = statistics.median(cpu_seconds(samples, job, subject)) * 1e3
            peer = peer_of(subject)
            table.add_row(
                job, subject, f"{rate:,.0f}", f"{rate * size / (1 << 20):,.1f}",
                _share(ratio(samples, job, subject, peer)), f"{cpu:.2f}",
                _share(ratio(samples, job, subject, peer, cpu_seconds)),
            )  # fmt: skip
    return table


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


if __name__ == "__main__":
    sys.exit(run_command(command, "scripts/bench --lab"))
