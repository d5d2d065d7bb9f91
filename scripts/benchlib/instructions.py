"""Counts the instructions that a request takes in our processes: callgrind on each of them.

    scripts/bench instructions [SECTION/JOB/SUBJECT] [--seconds S] [--keep DIR]

A clock shows how fast a machine is at that moment. A count of instructions is nearly the same on a
busy machine as on a quiet one: it compares two versions of the program where a clock cannot. It
leaves out the kernel, the caches, and what waiting costs. Needs valgrind (Debian: valgrind; it is
not a dependency of the project), which makes a process about 50 times slower.
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchlib import proc
from benchlib.command import run_command
from benchlib.load import Job, JobFailed
from benchlib.sections import SECTIONS, explain, measure
from benchlib.servers import Absent, Server
from benchlib.storage import FILE_SIZE, fill, places
from benchlib.subjects import Bench, Endpoint, iserblk

_START_TIMEOUT_S = 300.0
_CONTROL_TIMEOUT_S = 120.0
_PROGRAMS = ("valgrind", "callgrind_control")
_TOP = 25
_PIPE_WIDTH = 140

# "fn=(12) name", or "fn=(12)" where the name was said before; the costs of its lines follow. "cfn="
# names what it calls.
_FUNCTION = re.compile(r"c?fn=\((\d+)\)(?: (.+))?")
_COST = re.compile(r"[+*-]?\d* ?(\d+)$")
_RECURSION = re.compile(r"'\d+$")


@dataclass(slots=True, frozen=True)
class Count:
    """Instructions of one process, in all and by function."""

    total: int
    functions: Mapping[str, int]


def parse_dump(text: str) -> Count:
    """Read what callgrind writes: positions are lines, and instructions are the only event. Levels
    of recursion are added up."""
    names: dict[str, str] = {}
    functions: dict[str, int] = {}
    name = ""
    lines = iter(text.splitlines())
    for line in lines:
        function = _FUNCTION.match(line)
        if function is not None:
            if function[2] is not None:
                names[function[1]] = _RECURSION.sub("", function[2])
            if line.startswith("fn="):
                name = names.get(function[1], "???")
        elif line.startswith("calls="):
            next(lines, "")  # what the function called has cost
        elif name:
            cost = _COST.fullmatch(line)
            if cost is not None:
                functions[name] = functions.get(name, 0) + int(cost[1])
    return Count(sum(functions.values()), functions)


class Counting(Bench):
    """A bench whose servers of ours run under callgrind. ``counted``: what callgrind writes, by the
    server, into the directory ``dumps``."""

    def __init__(self, stack: ExitStack, directory: Path, ours: Path, theirs: Path) -> None:
        super().__init__(stack, directory, ours, theirs)
        self.counted: dict[Server, Path] = {}
        self.dumps = directory

    def start(
        self,
        name: str,
        command: Sequence[str],
        stop_signal: signal.Signals = signal.SIGTERM,
        environment: dict[str, str] | None = None,
        target: bool = False,
    ) -> Server:
        """See Bench."""
        if command[0] not in iserblk():
            return super().start(name, command, stop_signal, environment, target)
        out = self.dumps / f"{name}.callgrind"
        command = [
            "valgrind", "--quiet", "--tool=callgrind", f"--callgrind-out-file={out}",
            # Not the script, which makes room for this with execve.
            sys.executable, "-P", "-m", "iserblk.cli", *command[1:],
        ]  # fmt: skip
        # Dictionaries of strings are the same in each run.
        environment = {**(environment or {}), "PYTHONHASHSEED": "0"}
        server = super().start(name, command, stop_signal, environment, target)
        server.start_timeout_s = _START_TIMEOUT_S
        self.counted[server] = out
        return server


def _run(command: Sequence[str]) -> str:
    """Returns stdout. Raises JobFailed."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_CONTROL_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise JobFailed(f"{command[0]} did not end within {_CONTROL_TIMEOUT_S:.0f} s") from None
    if done.returncode:
        words = (done.stderr.strip() or done.stdout.strip() or "it said nothing").splitlines()[-1]
        raise JobFailed(f"{command[0]}: {words}")
    return done.stdout


def _control(option: str, pid: str) -> None:
    """Raises JobFailed."""
    said = _run(["callgrind_control", option, pid])
    if "OK" not in said:  # its exit status is 0 whatever happens
        raise JobFailed(f"callgrind_control {option} {pid}: {said.strip() or 'it said nothing'}")


def count(
    bench: Counting, endpoint: Endpoint, job: Job, seconds: float
) -> tuple[int, dict[str, Count]]:
    """The number of requests, and the instructions that all of them took, by process. Raises
    JobFailed, NoSuchProcess."""
    ours = {
        name: (str(server.pids[0]), bench.counted[server])
        for name, server in endpoint.servers.items()
        if server in bench.counted
    }
    measure(endpoint, job, seconds)  # what is done once is done now
    for pid, _ in ours.values():
        _control("--zero", pid)
    measured = measure(endpoint, job, seconds).measured
    counts = {}
    for name, (pid, out) in ours.items():
        _control("--dump", pid)
        dump = out.with_name(f"{out.name}.1")
        counts[name] = parse_dump(dump.read_text(encoding="utf-8", errors="replace"))
    return measured.ios, counts


def show(ios: int, counts: Mapping[str, Count]) -> None:
    """Print, for each process, the instructions of one request: in all, and by function."""
    console = Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH)
    console.print(f"{ios:,} requests counted")
    for name, counted in counts.items():
        console.print(
            f"\n{name}: {counted.total / ios:,.0f} instructions per request, in user mode"
        )
        table = Table()
        table.add_column("function")
        table.add_column("instructions", justify="right")
        dearest = sorted(counted.functions.items(), key=lambda item: -item[1])
        for function, instructions in dearest[:_TOP]:
            table.add_row(escape(function), f"{instructions / ios:,.0f}")
        console.print(table)


@click.command()
@click.argument("name", default="nbd/4k-randread-d32/iserblk", metavar="[SECTION/JOB/SUBJECT]")
@click.option("--seconds", type=click.FloatRange(1), default=5.0,
              help="Seconds of load, twice: the first do not count (default 5).")  # fmt: skip
@click.option("--keep", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
              help="Keep callgrind's files in DIR.")  # fmt: skip
def instructions(name: str, seconds: float, keep: Path | None) -> None:
    """Count the instructions of a request of one row, in each of our servers."""
    known = {row.name: row for section in SECTIONS for row in section.rows("*") if not section.mtu}
    if name not in known:
        raise click.UsageError(
            f"no row without a network is called {name}; scripts/bench --list shows them all"
        )
    for program in _PROGRAMS:
        if shutil.which(program) is None:
            raise click.UsageError(f"{program} is missing: apt install valgrind")
    row = known[name]
    section = next(section for section in SECTIONS if section.name == row.section)
    with ExitStack() as stack:
        scratch, disks = places(stack)
        files = (disks / "ours", disks / "theirs")
        fill(files, FILE_SIZE)
        directory = keep or scratch
        directory.mkdir(parents=True, exist_ok=True)
        bench = Counting(stack, scratch, *files)
        bench.dumps = directory
        try:
            endpoint = section.openers[row.subject](bench)
            if not bench.counted:
                raise click.UsageError(f"{name} has no server of ours")
            try:
                ios, counts = count(bench, endpoint, row.job, seconds)
            except (JobFailed, proc.NoSuchProcess) as error:
                raise JobFailed(explain(endpoint, error)) from None
        except (Absent, JobFailed) as error:
            raise click.ClickException(str(error)) from None
        show(ios, counts)


if __name__ == "__main__":
    sys.exit(run_command(instructions, "scripts/bench instructions"))
