"""Shows how the cost of a request grows with requests in flight, connections, exports and length.

    scripts/bench growth [--seconds S] [--rounds N]

Random reads through the built-in NBD server, over iSER. Each row's requests go to one process
of the server, which exports all LUNs of one target, in one session; rows with the same number of
exports share both. All rows have the same client (nbd_load.py).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import click
from rich.console import Console
from rich.table import Table

from benchlib import machine, proc
from benchlib.command import run_command
from benchlib.goals import SERVER
from benchlib.load import Job, JobFailed, Measurement
from benchlib.nbd_load import BLOCK
from benchlib.report import by_process, rate_text
from benchlib.results import Row, Spread
from benchlib.sections import explain, measure
from benchlib.servers import Absent
from benchlib.storage import FILE_SIZE, fill, places
from benchlib.subjects import Bench, Endpoint, nbd_server

_CLIENT = Path(__file__).resolve().parent / "nbd_load.py"
_WARM_UP = 1  # rounds
_PIPE_WIDTH = 140


class Load(NamedTuple):
    """The load of one row. Each export has the same number of ``connections``, which are counted
    over all exports, as are the requests in flight. ``block``: bytes of a request."""

    in_flight: int
    connections: int
    exports: int
    block: int = BLOCK

    @property
    def job(self) -> Job:
        name = f"{size_text(self.block)}-randread-d{self.in_flight}-c{self.connections}"
        return Job(name, "randread", self.block, self.in_flight, self.connections)

    @property
    def row(self) -> Row:
        return Row("growth", self.job, f"{self.exports}-exports")


LOADS = (
    *(Load(in_flight, 1, 1) for in_flight in (1, 8, 32, 128, 256)),
    *(Load(32, connections, 1) for connections in (4, 16)),
    *(Load(32, exports, exports) for exports in (16, 64)),
    *(Load(32, 1, 1, block) for block in (512, 16 << 10, 64 << 10)),
    *(Load(8, 1, 1, block) for block in (256 << 10, 1 << 20, 8 << 20)),
)


def size_text(size: int) -> str:
    """Of so many bytes: a whole number, with k or m where it can be."""
    for unit, bytes_of in (("m", 1 << 20), ("k", 1 << 10)):
        if size % bytes_of == 0:
            return f"{size // bytes_of}{unit}"
    return str(size)


@dataclass(slots=True)
class Growth:
    """Rows by load. ``stretch``: by depth, the CPU time of the server for a 4 KiB request in the
    dearest row of that depth, divided by that in the cheapest; only for depths of several rows."""

    rows: dict[Load, Row]

    def requests(self, load: Load) -> Spread:
        """For each second."""
        measured = [sample.measured for sample in self.rows[load].samples]
        return Spread.of([m.ios / m.seconds for m in measured])

    def server_us(self, load: Load) -> Spread:
        samples = self.rows[load].samples
        return Spread.of([s.cpu_seconds[SERVER] / s.measured.ios * 1e6 for s in samples])

    def stretch(self) -> dict[int, float]:
        found = {}
        alike = [load for load in self.rows if load.block == BLOCK]
        for depth in dict.fromkeys(load.in_flight for load in alike):
            costs = [self.server_us(load).median for load in alike if load.in_flight == depth]
            if len(costs) > 1:
                found[depth] = max(costs) / min(costs)
        return found


def client_command(socket: Path, exports: int, job: Job, seconds: float) -> list[str]:
    """A command line of the client: its connections take the exports in turn."""
    names = [f"lun{number % exports}" for number in range(job.connections)]
    words = [str(socket), str(seconds), str(job.block), str(job.depth), *names]
    return [sys.executable, "-P", str(_CLIENT), *words]


def parse_client(output: str, job: Job, _seconds: float) -> Measurement:
    """Read what the client printed. Raises JobFailed."""
    try:
        counted = json.loads(output)
        ios, took = int(counted["ios"]), float(counted["seconds"])
    except (ValueError, LookupError, TypeError) as error:
        raise JobFailed(f"the client's JSON is not understood: {error!r}") from None
    if not ios:
        raise JobFailed("the client: 0 requests done")
    return Measurement(ios, ios * job.block, took)


def open_servers(bench: Bench, file: Path, exports: Iterable[int]) -> dict[int, Endpoint]:
    """A target and a server for each number of exports. Raises Absent.

    All LUNs are ``file``, read-only: so the rows with many exports read no more memory than those
    with one.
    """
    found = {}
    for count in sorted(set(exports)):
        luns = [f"{file}:ro:serial=bench{number}" for number in range(count)]
        target, url = bench.start_target(f"target-{count}", luns)
        server, socket = nbd_server(bench, f"{count}-exports", [f"{url}?mpa-crc=yes"])
        servers = {SERVER: server, "target": target}
        command = partial(client_command, socket, count)
        found[count] = Endpoint("client", command, parse_client, servers)
    return found


def measure_growth(
    loads: Sequence[Load],
    endpoints: dict[int, Endpoint],
    rounds: int,
    seconds: float,
    progress: Callable[[str], None],
) -> Growth:
    """Run all loads, one after the other; every second round in the opposite order. A first round
    does not count. Raises JobFailed."""
    rows = {load: load.row for load in loads}
    for number in range(_WARM_UP + rounds):
        for load in reversed(loads) if number % 2 else loads:
            row, endpoint = rows[load], endpoints[load.exports]
            progress(f"{row.name}, round {number}")
            try:
                sample = measure(endpoint, row.job, seconds)
            except (JobFailed, proc.NoSuchProcess) as reason:
                raise JobFailed(f"{row.name} failed: {explain(endpoint, reason)}") from None
            if number >= _WARM_UP:
                row.samples.append(sample)
    return Growth(rows)


def print_growth(console: Console, growth: Growth) -> None:
    table = Table(title="random reads, built-in NBD server over iSER", title_justify="left")
    for heading in (
        "in flight", "connections", "exports", "bytes", "median (low–high)", "MiB/s", "server µs"
    ):  # fmt: skip
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("CPU time per request")
    for load, row in growth.rows.items():
        cost, requests = growth.server_us(load), growth.requests(load)
        table.add_row(
            *(str(number) for number in load[:3]),
            size_text(load.block),
            rate_text(requests, large=False),
            f"{requests.median * load.block / (1 << 20):,.0f}",
            f"{cost.median:.1f} ({cost.low:.1f}–{cost.high:.1f})",
            by_process(row.cpu_us_per_io(), "µs"),
        )
    console.print(table)
    for depth, ratio in growth.stretch().items():
        console.print(
            f"{depth} in flight: a request takes {ratio:.2f} times the server's CPU time in the"
            " dearest row, compared with the cheapest"
        )


@click.command()
@click.option("--seconds", type=click.FloatRange(0.1), default=3.0,
              help="Seconds of each run (default 3).")  # fmt: skip
@click.option("--rounds", type=click.IntRange(1), default=3,
              help="Rounds of each row (default 3), after one that does not count.")  # fmt: skip
def growth(seconds: float, rounds: int) -> None:
    """Show how the cost of a request grows with requests in flight, connections, exports and
    length."""
    console = Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH)
    about = machine.describe()
    console.print(", ".join(f"{name} {value}" for name, value in about.items()), highlight=False)
    with ExitStack() as stack:
        scratch, disks = places(stack)
        file = disks / "lun"
        fill([file], FILE_SIZE)
        status = stack.enter_context(Console(stderr=True).status("starting"))
        try:
            bench = Bench(stack, scratch, file, file)
            endpoints = open_servers(bench, file, [load.exports for load in LOADS])
            found = measure_growth(LOADS, endpoints, rounds, seconds, status.update)
        except (Absent, JobFailed) as error:
            raise click.ClickException(str(error)) from None
    print_growth(console, found)


if __name__ == "__main__":
    sys.exit(run_command(growth, "scripts/bench growth"))
