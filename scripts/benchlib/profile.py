"""Where the time of a request goes, per layer: py-spy on every Python process of ours.

    scripts/bench profile [SECTION/JOB/SUBJECT] [--seconds S] [--keep DIR]

Needs py-spy (`.venv/bin/python -m pip install py-spy`; no dependency of the project), and root or
ptrace rights. Samples count threads that are on a CPU. A layer's time is that of its own code and
of the C functions that it calls itself; compiled modules count for the Python code calling them.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from benchlib.load import JobFailed
from benchlib.proc import NoSuchProcess
from benchlib.results import Sample
from benchlib.sections import SECTIONS, measure
from benchlib.servers import Absent, Server
from benchlib.storage import FILE_SIZE, fill, place_for_files
from benchlib.subjects import Bench

_HERTZ = 200
_SETTLE_S = 1.0  # py-spy samples inside the run, not its start and end
_TOP = 15

# "read_into (/…/iserblk/disk/blocking.py:120)"; the path may hold anything, the line may be absent.
_FRAME = re.compile(r"(?P<function>.+) \((?P<path>.*?)(?::(?P<line>\d+))?\)$")
_OTHERS = frozenset(("nbd_plugin", "fuse_mount", "benchlib", "trio", "pyfuse3", "click"))
_INSTALLED = frozenset(("site-packages", "dist-packages"))


def layer(path: str) -> str:
    """The layer that a source file belongs to: a package of iserblk, or who else."""
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
    """(layer, "function path:line") of the innermost frame → samples, of py-spy's raw format."""
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


def table(title: str, counts: Iterable[tuple[str, int]], total: int, cpu_us: float) -> Table:
    """Shares, and what they are of the CPU time of one request."""
    made = Table(title=title, title_justify="left")
    made.add_column("where")
    made.add_column("share", justify="right")
    made.add_column("CPU µs per request", justify="right")
    for name, count in counts:
        share = count / total
        made.add_row(name, f"{share:.1%}", f"{share * cpu_us:.1f}")
    return made


def record(spy: str, pid: int, seconds: float, file: Path, errors: list[str]) -> None:
    """Sample one process into ``file``; what goes wrong is added to ``errors``."""
    done = subprocess.run(
        [spy, "record", "--pid", str(pid), "--duration", str(max(1, round(seconds))),
         "--rate", str(_HERTZ), "--format", "raw", "--full-filenames", "--output", str(file)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode or not file.exists():
        errors.append(f"py-spy on {pid}: {(done.stderr.strip() or 'failed').splitlines()[-1]}")


def sample(
    bench: Bench, row: tuple[str, str, str], seconds: float, spy: str, directory: Path
) -> tuple[Sample, dict[str, Path]]:
    """Run one job on one subject with py-spy on each of its Python servers.

    Returns the run, and the raw profile by server. Raises Absent, JobFailed, NoSuchProcess.
    """
    section = next(section for section in SECTIONS if section.name == row[0])
    job = next(job for job in section.jobs if job.name == row[1])
    endpoint = section.openers[row[2]](bench)
    files: dict[str, Path] = {}
    threads: list[threading.Timer] = []
    errors: list[str] = []
    for name, server in endpoint.servers.items():
        pid = python_process(server)
        if pid is not None:
            files[name] = directory / f"{name}.raw"
            arguments = (spy, pid, seconds, files[name], errors)
            threads.append(threading.Timer(_SETTLE_S, record, arguments))
    for thread in threads:
        thread.start()
    try:
        measured = measure(endpoint, job, seconds + 2 * _SETTLE_S)
    finally:
        for thread in threads:
            thread.join()
    if errors:
        raise JobFailed(errors[0])
    return measured, files


def python_process(server: Server) -> int | None:
    """The one of the server's processes that does the work: the last with an interpreter in it."""
    for pid in reversed(server.pids):
        maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
        if "/python3" in maps or "libpython3" in maps:
            return pid
    return None


@click.command()
@click.argument("row", default="nbd/4k-randread-d32/iserblk", metavar="[SECTION/JOB/SUBJECT]")
@click.option("--seconds", type=click.FloatRange(1), default=10.0, help="Of sampling.")
@click.option("--keep", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
              help="Keep py-spy's raw stacks there, for flame graphs.")  # fmt: skip
def profile(row: str, seconds: float, keep: Path | None) -> None:
    """Show where the time of ROW goes, per layer and per line, for each Python server in it."""
    known = {found.name for section in SECTIONS for found in section.rows("*")}
    if row not in known:
        raise click.UsageError(f"no row is called {row}; scripts/bench --list shows them all")
    spy = shutil.which("py-spy", path=f"{Path(sys.executable).parent}") or shutil.which("py-spy")
    if spy is None:
        raise click.UsageError("py-spy is missing: .venv/bin/python -m pip install py-spy")
    section, job, subject = row.split("/")
    with ExitStack() as stack:
        name = stack.enter_context(tempfile.TemporaryDirectory(prefix="iserblk-profile-"))
        disks = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="iserblk-profile-", dir=place_for_files())
        )
        files = (Path(disks) / "ours", Path(disks) / "theirs")
        fill(files, FILE_SIZE)
        directory = keep or Path(name)
        directory.mkdir(parents=True, exist_ok=True)
        bench = Bench(stack, Path(name), *files)
        try:
            run, raw = sample(bench, (section, job, subject), seconds, spy, directory)
        except (Absent, JobFailed, NoSuchProcess) as error:
            raise click.ClickException(str(error)) from None
        show(run, raw)


def show(run: Sample, raw: dict[str, Path]) -> None:
    console = Console(width=None if sys.stdout.isatty() else 140)
    measured = run.measured
    console.print(f"{measured.ios / measured.seconds:,.0f} requests/s while sampled")
    for name, file in raw.items():
        counts = parse_raw(file.read_text(encoding="utf-8"))
        total = counts.total()
        if not total:
            console.print(f"{name}: idle, no samples")
            continue
        cpu_us = run.cpu_seconds[name] / measured.ios * 1e6
        layers: Counter[str] = Counter()
        for (where, _), count in counts.items():
            layers[where] += count
        title = f"{name}: {cpu_us:.0f} µs of CPU time per request, {total} samples"
        console.print(table(title, layers.most_common(), total, cpu_us))
        lines = [(f"{where}: {line}", count) for (where, line), count in counts.most_common(_TOP)]
        console.print(table(f"{name}: lines", lines, total, cpu_us))


if __name__ == "__main__":
    profile(prog_name="scripts/bench profile")
