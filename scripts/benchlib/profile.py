"""Shows where the time of a request goes, by layer: py-spy on each of our Python processes.

    scripts/bench profile [SECTION/JOB/SUBJECT] [--seconds S] [--keep DIR]

Needs py-spy (`.venv/bin/python -m pip install py-spy`; it is not a dependency of the project), and
root or ptrace rights. A layer's time is that of its own code and of the C functions that it calls
directly; compiled modules count for the Python code that calls them.

Threads that wait for the GIL or for each other look busy to py-spy. So in a process with many
threads only the holder of the GIL is sampled, and the rest of its CPU time is shown in one line.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from benchlib import proc
from benchlib.command import run_command
from benchlib.load import JobFailed
from benchlib.results import Row, Sample
from benchlib.sections import SECTIONS, measure
from benchlib.servers import Absent
from benchlib.storage import FILE_SIZE, fill, places
from benchlib.subjects import Bench

HERTZ = 100  # more would slow down a process of 40 threads: py-spy stops every thread
_SETTLE_S = 1.0  # py-spy does not sample the start and end of the run
_MANY_THREADS = 8
_WITHOUT_GIL = "(without the GIL: system calls, thread switches, nbdkit)"
_TOP = 15

# "read_into (/…/iserblk/disk/blocking.py:120)"; the path may be any text, the line may be absent.
_FRAME = re.compile(r"(?P<function>.+) \((?P<path>.*?)(?::(?P<line>\d+))?\)$")
_OTHERS = frozenset(("nbd_plugin", "fuse_mount", "benchlib", "trio", "pyfuse3", "click"))
_INSTALLED = frozenset(("site-packages", "dist-packages"))


def layer(path: str) -> str:
    """The layer of a source file: a package of iserblk, or the name of another package."""
    directories = Path(path).parts[:-1]
    for depth in range(len(directories) - 1, -1, -1):
        name = directories[depth]
        if name in _OTHERS:
            return name
        if name == "iserblk":
            return ".".join(directories[depth:])
        if name in _INSTALLED:
            break
    return "python"


def parse_raw(text: str) -> Counter[tuple[str, str]]:
    """Samples by innermost frame, (layer, "function path:line"), from py-spy's raw format."""
    found: Counter[tuple[str, str]] = Counter()
    for line in text.splitlines():
        stack, _, count = line.rpartition(" ")
        frame = _FRAME.match(stack.rpartition(";")[2])
        if frame is None:
            found["python", "(no Python frame)"] += int(count)
            continue
        short = "/".join(frame["path"].lstrip("/").split("/")[-3:])
        found[layer(frame["path"]), f"{frame['function']} {short}:{frame['line'] or '?'}"] += int(
            count
        )
    return found


@dataclass(slots=True, frozen=True)
class Recording:
    """One process to sample, and py-spy's raw stacks of it."""

    pid: int
    file: Path
    gil_only: bool

    def command(self, spy: str, seconds: int) -> list[str]:
        options = ["--duration", str(seconds), "--rate", str(HERTZ), "--format", "raw"]
        options += ["--full-filenames", "--output", str(self.file), "--pid", str(self.pid)]
        return [spy, "record", *options, *(["--gil"] if self.gil_only else [])]


def record(spy: str, recording: Recording, seconds: int, errors: list[str]) -> None:
    """Sample one process; an error's text is added to ``errors``."""
    command = recording.command(spy, seconds)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or not recording.file.exists():
        words = (done.stderr.strip() or "it said nothing").splitlines()[-1]
        errors.append(f"py-spy on {recording.pid}: {words}")


def python_process(pids: Sequence[int]) -> int | None:
    """The process that does the work: the last of ``pids`` that has a Python interpreter."""
    for pid in reversed(pids):
        with suppress(OSError):
            maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
            if "/python3" in maps or "libpython3" in maps:
                return pid
    return None


def sample(
    bench: Bench, row: Row, seconds: int, spy: str, directory: Path
) -> tuple[Sample, dict[str, Recording]]:
    """Run one job on one subject with py-spy on each of its Python processes, by name.

    Raises Absent, JobFailed, NoSuchProcess.
    """
    section = next(section for section in SECTIONS if section.name == row.section)
    endpoint = section.openers[row.subject](bench)
    recordings: dict[str, Recording] = {}
    errors: list[str] = []

    def watch() -> None:
        """The client, once it runs: the child of this process that is not a server."""
        families = {name: server.pids for name, server in endpoint.servers.items()}
        servers = {pid for family in families.values() for pid in family} | {os.getpid()}
        clients = [pid for pid in proc.family(os.getpid()) if pid not in servers]
        for name, family in {**families, endpoint.client: clients}.items():
            pid = python_process(family)
            if pid is not None:
                gil_only = len(os.listdir(f"/proc/{pid}/task")) > _MANY_THREADS
                recordings[name] = Recording(pid, directory / f"{name}.raw", gil_only)
        spies = [
            threading.Thread(target=record, args=(spy, recording, seconds, errors))
            for recording in recordings.values()
        ]
        for thread in spies:
            thread.start()
        for thread in spies:
            thread.join()

    watching = threading.Timer(_SETTLE_S, watch)
    watching.start()
    try:
        measured = measure(endpoint, row.job, seconds + 3 * _SETTLE_S)
    finally:
        watching.join()
    if errors:
        raise JobFailed(errors[0])
    return measured, recordings


def per_request(
    counts: Mapping[str, int], recording: Recording, run: Sample, name: str, seconds: int
) -> dict[str, float]:
    """CPU time of one request in µs, by key of ``counts``, the greatest first.

    Each sample of the GIL's holder counts as 1/HERTZ seconds. Other samples are shares of the
    process's CPU time.
    """
    measured = run.measured
    cpu_us = run.cpu_seconds[name] / measured.ios * 1e6
    if recording.gil_only:
        sample_us = 1e6 / (HERTZ * seconds) / (measured.ios / measured.seconds)
    else:
        sample_us = cpu_us / max(1, sum(counts.values()))
    found = {key: count * sample_us for key, count in counts.items()}
    if recording.gil_only:
        found[_WITHOUT_GIL] = max(0.0, cpu_us - sum(found.values()))
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def show(run: Sample, recordings: Mapping[str, Recording], seconds: int) -> None:
    """Print two tables for each process: time by layer, and the most expensive lines."""
    console = Console(width=None if sys.stdout.isatty() else 140)
    measured = run.measured
    console.print(f"{measured.ios / measured.seconds:,.0f} requests/s while sampled")
    for name, recording in recordings.items():
        counts = parse_raw(recording.file.read_text(encoding="utf-8"))
        layers: Counter[str] = Counter()
        lines: Counter[str] = Counter()
        for (where, line), count in counts.items():
            layers[where] += count
            lines[f"{where}: {line}"] += count
        kind = "of the GIL's holder" if recording.gil_only else "of running threads"
        cpu_us = run.cpu_seconds[name] / measured.ios * 1e6
        console.print(
            f"\n{name}: {cpu_us:.1f} µs of CPU time per request ({counts.total()} samples {kind})"
        )
        for counted, heading in ((layers, "layer"), (lines, "line")):
            table = Table()
            table.add_column(heading)
            table.add_column("µs", justify="right")
            times = per_request(counted, recording, run, name, seconds)
            for key, microseconds in list(times.items())[:_TOP]:
                table.add_row(key, f"{microseconds:.1f}")
            console.print(table)


@click.command()
@click.argument("name", default="nbd/4k-randread-d32/iserblk", metavar="[SECTION/JOB/SUBJECT]")
@click.option("--seconds", type=click.IntRange(1), default=10, help="Sampling time (default 10).")
@click.option("--keep", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
              help="Keep py-spy's raw stacks in DIR, for flame graphs.")  # fmt: skip
def profile(name: str, seconds: int, keep: Path | None) -> None:
    """Show where the time of one row goes, by layer and line, for each of its Python processes."""
    known = {row.name: row for section in SECTIONS for row in section.rows("*")}
    if name not in known:
        raise click.UsageError(f"no row is called {name}; scripts/bench --list shows them all")
    spy = shutil.which("py-spy", path=f"{Path(sys.executable).parent}") or shutil.which("py-spy")
    if spy is None:
        raise click.UsageError("py-spy is missing: .venv/bin/python -m pip install py-spy")
    with ExitStack() as stack:
        scratch, disks = places(stack)
        files = (disks / "ours", disks / "theirs")
        fill(files, FILE_SIZE)
        directory = keep or scratch
        directory.mkdir(parents=True, exist_ok=True)
        try:
            section = known[name].section
            mtu = next(each.mtu for each in SECTIONS if each.name == section)
            bench = Bench(stack, scratch, *files, mtu=mtu)
            run, recordings = sample(bench, known[name], seconds, spy, directory)
        except (Absent, JobFailed, proc.NoSuchProcess) as error:
            raise click.ClickException(str(error)) from None
        show(run, recordings, seconds)


if __name__ == "__main__":
    sys.exit(run_command(profile, "scripts/bench profile"))
