"""Load on a disk: the jobs, and the programs that run and measure them."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from benchlib import proc

_GRACE_S = 60.0  # beyond the run time, before a client counts as hung
_POLL_S = 0.05

# "iops average 43601 (170 MB/s)", overwritten in place; iscsi-perf counts MB of 2^20 bytes.
_ISCSI_PERF_AVERAGE = re.compile(r"iops average (\d+) \(")


class JobFailed(Exception):
    """A client failed, or its output cannot be read; the text says why, in one line."""


class Job(NamedTuple):
    """One kind of load."""

    name: str
    pattern: str  # fio's rw=
    block: int  # bytes of one request
    depth: int  # requests in flight, of all connections
    connections: int = 1  # of the client to the front-end; each has the same part of the depth

    @property
    def large(self) -> bool:
        """Whether the rate is in bytes per second, not in requests per second."""
        return self.block >= 1 << 20

    @property
    def writes(self) -> bool:
        return self.pattern.endswith("write")


JOBS = (
    Job("4k-randread-d1", "randread", 4096, 1),
    Job("4k-randwrite-d1", "randwrite", 4096, 1),
    Job("4k-randread-d32", "randread", 4096, 32),
    Job("4k-randwrite-d32", "randwrite", 4096, 32),
    Job("1m-read-d8", "read", 1 << 20, 8),
    Job("1m-write-d8", "write", 1 << 20, 8),
)
# Only NBD has clients that open several connections to one disk.
CONNECTION_JOBS = (
    Job("4k-randread-d32-c4", "randread", 4096, 32, 4),
    Job("4k-randwrite-d32-c4", "randwrite", 4096, 32, 4),
)
NET_JOBS = (
    *(job for job in JOBS if job.name != "4k-randwrite-d1"),
    Job("16k-randread-d32", "randread", 16384, 32),
    Job("16k-randwrite-d32", "randwrite", 16384, 32),
)
MEMORY_JOBS = (
    Job("1m-read-d32", "read", 1 << 20, 32),
    Job("1m-write-d32", "write", 1 << 20, 32),
)


@dataclass(slots=True, frozen=True)
class Measurement:
    """What a client counted in one run. Latencies are None if it does not measure them."""

    ios: int
    bytes: int
    seconds: float
    latency_p50_us: float | None = None
    latency_p99_us: float | None = None


@dataclass(slots=True, frozen=True)
class ClientUse:
    """Output of a client process, and the resources that it used."""

    output: str
    cpu_seconds: float
    peak_rss: int  # bytes


def run_client(command: Sequence[str], seconds: float) -> ClientUse:
    """Run a client that takes about ``seconds``. Raises JobFailed."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    peak = 0
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        try:
            process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", "--", *command],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
            )
        except FileNotFoundError as error:
            raise JobFailed(f"{error.filename} is not installed") from None
        deadline = time.monotonic() + seconds + _GRACE_S
        try:
            while process.poll() is None:
                if time.monotonic() > deadline:
                    raise JobFailed(f"{command[0]} did not end {_GRACE_S:.0f} s after its time")
                with suppress(proc.NoSuchProcess):
                    peak = max(peak, proc.peak_rss([process.pid]))
                time.sleep(_POLL_S)
        finally:
            process.kill()
            process.wait()
        stdout.seek(0)
        stderr.seek(0)
        output = stdout.read().decode(errors="replace")
        errors = stderr.read().decode(errors="replace")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if process.returncode:
        words = (errors.strip() or output.strip() or "it said nothing").splitlines()[-1]
        raise JobFailed(f"{command[0]} ended with status {process.returncode}: {words}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return ClientUse(output, cpu, peak)


def fio_command(job: Job, engine: Sequence[str], seconds: float) -> list[str]:
    """A command line of fio. ``engine``: the options that say what to read and write, and how.

    With several connections fio runs as many jobs, because each job of its nbd engine has its own
    connection, and reports them as one.
    """
    several = [f"--numjobs={job.connections}", "--group_reporting"] if job.connections > 1 else []
    return [
        "fio",
        f"--name={job.name}",
        *engine,
        f"--rw={job.pattern}",
        f"--bs={job.block}",
        f"--iodepth={job.depth // job.connections}",
        *several,
        fio_runtime(seconds),
        "--time_based",
        "--thread",  # one process: its CPU time and memory are one line
        "--norandommap",
        "--randrepeat=0",  # else each run, even a short one, uses the places of the run before it
        "--output-format=json",
    ]


def fio_runtime(seconds: float) -> str:
    """The option for the run time, in whole milliseconds: fio reads 0.8 as 0, and 1.5 as 1."""
    return f"--runtime={round(seconds * 1000)}ms"


def fio_nbd(socket_path: str) -> list[str]:
    return ["--ioengine=nbd", f"--uri=nbd+unix:///?socket={socket_path}"]


def fio_flushes(job: Job, limit: int) -> list[str]:
    """The option to flush whenever the writes since the last flush, with those in flight, reach
    ``limit`` bytes."""
    return [f"--fsync={max(1, limit // job.block - job.depth)}"]


def fio_file(path: str) -> list[str]:
    return ["--ioengine=libaio", "--direct=1", f"--filename={path}"]


def parse_fio(output: str, job: Job) -> Measurement:
    """Read fio's JSON; warnings may come before it. Raises JobFailed."""
    start = output.find("{\n")
    if start < 0:
        raise JobFailed("fio printed no JSON")
    try:
        result = json.loads(output[start:])["jobs"][0]
        side = result["write" if job.writes else "read"]
        measured = Measurement(
            ios=side["total_ios"],
            bytes=side["io_bytes"],
            seconds=side["runtime"] / 1000,
            latency_p50_us=side["clat_ns"]["percentile"]["50.000000"] / 1000,
            latency_p99_us=side["clat_ns"]["percentile"]["99.000000"] / 1000,
        )
        errors = result["error"]
    except (ValueError, LookupError, TypeError) as error:
        raise JobFailed(f"fio's JSON is not understood: {error!r}") from None
    if errors or not measured.ios or not measured.seconds:
        raise JobFailed(f"fio: error {errors}, {measured.ios} requests done")
    return measured


def iscsi_perf_command(job: Job, url: str, seconds: float, block_size: int = 512) -> list[str]:
    """A command line of iscsi-perf, which only reads."""
    command = ["iscsi-perf", "-b", str(job.block // block_size), "-m", str(job.depth)]
    if job.pattern.startswith("rand"):
        command.append("-r")
    return [*command, "-t", str(max(1, round(seconds))), url]


def parse_iscsi_perf(output: str, job: Job, seconds: float) -> Measurement:
    """Read the last of iscsi-perf's running averages. Raises JobFailed."""
    averages = _ISCSI_PERF_AVERAGE.findall(output)
    if not averages:
        raise JobFailed("iscsi-perf printed no average")
    duration = max(1, round(seconds))
    ios = int(averages[-1]) * duration
    if not ios:
        raise JobFailed("iscsi-perf: 0 requests done")
    return Measurement(ios, ios * job.block, duration)


def parse_floor(output: str, job: Job, _seconds: float) -> Measurement:
    """Read what `floor load` prints. Raises JobFailed."""
    try:
        ios, seconds = output.split()
        measured = Measurement(int(ios), int(ios) * job.block, float(seconds))
    except ValueError:
        raise JobFailed(f"floor printed {output!r}") from None
    if not measured.ios:
        raise JobFailed("floor: 0 requests done")
    return measured


def iserblk_bench_arguments(job: Job, url: str, seconds: float, face: str) -> list[str]:
    """Arguments of `iserblk`, for load from Python itself. Writes overwrite the LUN. ``face``: as
    ``--face`` of `iserblk bench`."""
    shape = ["--rw", job.pattern, "--bs", str(job.block), "--depth", str(job.depth)]
    shape += ["--face", face]
    return ["bench", url, *shape, "--time", str(seconds), "--destroy", "--json"]


def parse_iserblk_bench(output: str) -> Measurement:
    """Read the JSON of `iserblk bench`. Raises JobFailed."""
    try:
        counted = json.loads(output)
        latencies = counted["latency_us"]
        measured = Measurement(
            ios=counted["ios"],
            bytes=counted["bytes"],
            seconds=counted["seconds"],
            latency_p50_us=latencies["p50"],
            latency_p99_us=latencies["p99"],
        )
    except (ValueError, LookupError, TypeError) as error:
        raise JobFailed(f"the JSON of iserblk bench is not understood: {error!r}") from None
    if not measured.ios:
        raise JobFailed("iserblk bench: 0 requests done")
    return measured
