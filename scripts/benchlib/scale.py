"""Shows what a session costs as their number grows: its requests, its memory, and its opening.

    scripts/bench scale [--seconds S] [--rounds N]

4 KiB random reads by the Python API, in one process with one trio loop, without a front-end
(scale_load.py). Each run starts a new client and a new target: memory that an earlier run has left
free would hide what a session takes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import IO, NamedTuple

import click
from rich.console import Console
from rich.table import Table

from benchlib import machine, proc
from benchlib.command import run_command
from benchlib.goals import OURS, OURS_ISCSI, OURS_TCP
from benchlib.load import JobFailed
from benchlib.report import rate_text
from benchlib.results import Spread
from benchlib.servers import Absent, Server
from benchlib.storage import FILE_SIZE, fill, places
from benchlib.subjects import Bench, with_iscsi

CLIENT = "client"
TARGET = "target"
PROGRAM = Path(__file__).resolve().parent / "scale_load.py"
GRACE_S = 120.0  # beyond the time of the load, before a client counts as hung
_AT_AN_END = 8  # sessions: how long the first and the last of them take to open
_PIPE_WIDTH = 160


class Load(NamedTuple):
    """The load of one row: in each of the ``sessions`` so many requests ``in_flight``."""

    sessions: int
    in_flight: int


# 32 requests in flight over all sessions, and at least one in each.
LOADS = tuple(Load(sessions, max(1, 32 // sessions)) for sessions in (1, 8, 32, 128, 256))

Opener = Callable[[Bench], tuple[Server, str]]


def _over_iscsi(bench: Bench) -> tuple[Server, str]:
    server, url = bench.our_target()
    return server, with_iscsi(url)


SUBJECTS: dict[str, Opener] = {
    OURS: lambda bench: bench.our_target(),
    OURS_ISCSI: _over_iscsi,
    OURS_TCP: lambda bench: bench.tgtd(),
}


@dataclass(slots=True, frozen=True)
class Run:
    """What one run has shown. ``cpu_seconds``: by process, while requests were sent. ``idle``: by
    process, bytes of memory that a session takes which is open, and has carried no request of the
    load yet; empty where there is one session alone. ``opened_ms``: of each session."""

    ios: int
    seconds: float
    cpu_seconds: dict[str, float]
    idle: dict[str, float]
    opened_ms: list[float]


class Row:
    """All runs of one load on one subject."""

    def __init__(self, load: Load, subject: str) -> None:
        self.load = load
        self.subject = subject
        self.runs: list[Run] = []
        self.absent = ""  # why the subject is not available here

    @property
    def name(self) -> str:
        return f"scale/{self.load.sessions}-sessions/{self.subject}"

    def rate(self) -> Spread:
        """Requests per second."""
        return Spread.of([run.ios / run.seconds for run in self.runs])

    def cpu_us(self, process: str) -> float:
        """Microseconds for a request; median."""
        return median(run.cpu_seconds[process] / run.ios * 1e6 for run in self.runs)

    def idle(self, process: str) -> float | None:
        """Bytes; median. None: not measured."""
        found = [run.idle[process] for run in self.runs if run.idle]
        return median(found) if found else None

    def opened_ms(self) -> tuple[float, float]:
        """How long a session takes to open: one of the first, and one of the last; medians. The
        very first counts only where it is the only one: it loads what all share."""
        first, last = [], []
        for run in self.runs:
            others = run.opened_ms[1:] or run.opened_ms
            first += others[:_AT_AN_END]
            last += others[-_AT_AN_END:]
        return median(first), median(last)


class Client:
    """A running scale_load.py, which stops twice to be looked at."""

    def __init__(self, process: subprocess.Popen[str], errors: IO[bytes]) -> None:
        """``errors``: its stderr."""
        self._process = process
        self._errors = errors

    @property
    def pid(self) -> int:
        return self._process.pid

    def said(self) -> str:
        """The next line that it prints. Raises JobFailed where it has ended instead."""
        line = _pipe(self._process.stdout).readline()
        if not line:
            status = self._process.wait()
            self._errors.seek(0)
            words = self._errors.read().decode(errors="replace").strip() or "it said nothing"
            raise JobFailed(f"the client ended with status {status}: {words.splitlines()[-1]}")
        return line

    def go_on(self) -> None:
        with suppress(BrokenPipeError):  # it has ended: ``said`` tells why
            pipe = _pipe(self._process.stdin)
            pipe.write("\n")
            pipe.flush()


@contextmanager
def started_client(url: str, load: Load, seconds: float) -> Iterator[Client]:
    """A client, which is killed at the end of the block, or long after its time."""
    words = [url, str(load.sessions), str(load.in_flight), str(seconds)]
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "--", sys.executable, "-P", str(PROGRAM), *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        watchdog = threading.Timer(seconds + GRACE_S, process.kill)
        watchdog.start()
        try:
            yield Client(process, errors)
        finally:
            watchdog.cancel()
            process.kill()


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None  # as the process was started
    return pipe


def measure(server: Server, url: str, load: Load, seconds: float) -> Run:
    """One run. Raises JobFailed, NoSuchProcess."""
    with started_client(url, load, seconds) as client:
        pids = {CLIENT: [client.pid], TARGET: server.pids}
        memory = []
        for _ in range(2):
            client.said()
            memory.append({name: proc.pss(its) for name, its in pids.items()})
            busy = proc.cpu_seconds(pids[TARGET])
            client.go_on()
        output = client.said()
        busy = proc.cpu_seconds(pids[TARGET]) - busy
    others = load.sessions - 1
    idle = {name: (memory[1][name] - memory[0][name]) / others for name in pids} if others else {}
    return parse_client(output, busy, idle)


def parse_client(output: str, target_seconds: float, idle: dict[str, float]) -> Run:
    """Read what the client printed at its end. Raises JobFailed."""
    try:
        told = json.loads(output)
        cpu = {CLIENT: float(told["cpu_seconds"]), TARGET: target_seconds}
        opened = [float(each) for each in told["opened_ms"]]
        run = Run(int(told["ios"]), float(told["seconds"]), cpu, idle, opened)
    except (ValueError, LookupError, TypeError) as error:
        raise JobFailed(f"the client's JSON is not understood: {error!r}") from None
    if not run.ios or not opened:
        raise JobFailed("the client: 0 requests done")
    return run


def measure_all(
    rows: Sequence[Row],
    subjects: dict[str, Opener],
    files: tuple[Path, Path],
    directory: Path,
    rounds: int,
    seconds: float,
    progress: Callable[[str], None],
) -> None:
    """Run all rows, one after the other; every second round in the opposite order. ``files``: of
    our target, and of the peer's. Raises JobFailed; a subject that cannot be had has no runs."""
    for number in range(rounds):
        for row in reversed(rows) if number % 2 else rows:
            progress(f"{row.name}, round {number + 1}")
            scratch = Path(tempfile.mkdtemp(dir=directory))
            with ExitStack() as stack:
                try:
                    server, url = subjects[row.subject](Bench(stack, scratch, *files))
                except Absent as reason:
                    row.absent = str(reason)
                    continue
                try:
                    row.runs.append(measure(server, url, row.load, seconds))
                except (JobFailed, proc.NoSuchProcess) as error:
                    words = str(error) if server.running() else server.last_words()
                    raise JobFailed(f"{row.name} failed: {words}") from None


def print_rows(console: Console, rows: Sequence[Row]) -> None:
    table = Table(title="4 KiB random reads, Python API, one process", title_justify="left")
    for heading in (
        "sessions",
        "in flight",
        "subject",
        "median (low–high)",
        "client µs",
        "target µs",
        "client KiB",
        "target KiB",
        "ms to open",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    before = None
    for row in (row for row in rows if row.runs):
        if before not in {None, row.load}:
            table.add_section()
        before = row.load
        first, last = row.opened_ms()
        table.add_row(
            str(row.load.sessions),
            str(row.load.sessions * row.load.in_flight),
            row.subject,
            rate_text(row.rate(), large=False),
            f"{row.cpu_us(CLIENT):.1f}",
            f"{row.cpu_us(TARGET):.1f}",
            _kib(row.idle(CLIENT)),
            _kib(row.idle(TARGET)),
            f"{first:.1f} – {last:.1f}",
        )
    console.print(table)
    for subject in dict.fromkeys(row.subject for row in rows):
        its = [row for row in rows if row.subject == subject and row.runs]
        if len(its) > 1:
            one, most = its[0], its[-1]
            client, target = (most.cpu_us(each) / one.cpu_us(each) for each in (CLIENT, TARGET))
            console.print(
                f"{subject}: with {most.load.sessions} sessions a request takes {client:.2f} times"
                f" the client's CPU time, and {target:.2f} times the target's, of one with"
                f" {one.load.sessions}"
            )
    for reason in dict.fromkeys(f"{row.subject}: {row.absent}" for row in rows if row.absent):
        console.print(reason)


def _kib(size: float | None) -> str:
    return "" if size is None else f"{size / 1024:,.0f}"


@click.command()
@click.option("--seconds", type=click.FloatRange(0.1), default=3.0,
              help="Seconds of each run (default 3).")  # fmt: skip
@click.option("--rounds", type=click.IntRange(1), default=3,
              help="Rounds of each row (default 3), each run with new processes.")  # fmt: skip
def scale(seconds: float, rounds: int) -> None:
    """Show what a session costs as their number grows: requests, memory, opening."""
    console = Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH)
    about = machine.describe()
    console.print(", ".join(f"{name} {value}" for name, value in about.items()), highlight=False)
    rows = [Row(load, subject) for load in LOADS for subject in SUBJECTS]
    with ExitStack() as stack:
        scratch, disks = places(stack)
        files = (disks / "ours", disks / "theirs")
        fill(files, FILE_SIZE)
        status = stack.enter_context(Console(stderr=True).status("starting"))
        try:
            measure_all(rows, SUBJECTS, files, scratch, rounds, seconds, status.update)
        except JobFailed as error:
            raise click.ClickException(str(error)) from None
    print_rows(console, rows)


if __name__ == "__main__":
    sys.exit(run_command(scale, "scripts/bench scale"))
