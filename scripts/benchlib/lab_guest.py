"""Measures in the lab's guest: our verbs, the kernel's ib_iser and libiscsi, on LIO over rxe.

    python -m benchlib.lab_guest ROUNDS SECONDS

All subjects use one LIO target, and take turns within a round. Writes $LAB_RESULTS/bench.json: a
list of samples ``{job, subject, ios, seconds, bytes, cpu_seconds}``. ``cpu_seconds`` is the
processor time of the whole guest, with the target and the kernel's threads, which do the work of
Soft-RoCE for all subjects.
"""

from __future__ import annotations

import functools
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import trio

from benchlib import proc
from benchlib.load import Job, JobFailed, fio_runtime, iscsi_perf_command, parse_iscsi_perf
from iserblk.disk.aio import open_disks
from iserblk.disk.seam import AsyncDisk
from iserblk.rcap.verbs import connecting

JOBS = (
    Job("4k-randread-d32", "randread", 4096, 32),
    Job("4k-randwrite-d32", "randwrite", 4096, 32),
    Job("1m-read-d8", "read", 1 << 20, 8),
    Job("1m-write-d8", "write", 1 << 20, 8),
)
MODES = ("window", "region")
SIZE = 128 << 20  # bytes of the LUN that are used


@dataclass(slots=True)
class Count:
    ios: int
    seconds: float
    bytes: int


Subject = Callable[[Job, float], Awaitable[Count]]


async def ours(disk: AsyncDisk, job: Job, seconds: float) -> Count:
    """Keep ``job.depth`` requests in flight through the Python API."""
    offsets = offsets_of(job)
    count = 0

    async def worker() -> None:
        nonlocal count
        buffer = memoryview(bytearray(os.urandom(job.block)))
        operation = disk.write if job.writes else disk.read_into
        while time.perf_counter() < end:
            await operation(buffer, next(offsets))
            count += 1

    began = time.perf_counter()
    end = began + seconds
    async with trio.open_nursery() as nursery:
        for _ in range(job.depth):
            nursery.start_soon(worker)
    return Count(count, time.perf_counter() - began, count * job.block)


def offsets_of(job: Job) -> Iterator[int]:
    """Endless offsets as fio makes them: random, or ascending again and again."""
    blocks = SIZE // job.block
    choose = random.Random(1).randrange
    at = 0
    while True:
        yield (choose(blocks) if job.pattern.startswith("rand") else at % blocks) * job.block
        at += 1


async def kernel(device: str, job: Job, seconds: float) -> Count:
    command = [
        "fio", "--name=bench", f"--filename={device}", "--ioengine=libaio", "--direct=1",
        f"--rw={job.pattern}", f"--bs={job.block}", f"--iodepth={job.depth}", f"--size={SIZE}",
        "--time_based", fio_runtime(seconds), "--output-format=json", "--randrepeat=1",
    ]  # fmt: skip
    done = await trio.run_process(command, capture_stdout=True)
    result = json.loads(done.stdout)["jobs"][0]["write" if job.writes else "read"]
    return Count(result["total_ios"], result["runtime"] / 1e3, result["io_bytes"])


async def libiscsi(url: str, job: Job, seconds: float) -> Count:
    command = iscsi_perf_command(job, url, seconds)
    with trio.move_on_after(seconds * 5 + 60):
        done = await trio.run_process(command, capture_stdout=True, check=False)
        measured = parse_iscsi_perf(done.stdout.decode(), job, seconds)
        return Count(measured.ios, measured.seconds, measured.bytes)
    raise JobFailed("iscsi-perf hung")


def ib_iser() -> str:
    """Log in with ib_iser; returns the disk's device."""
    iqn, address = os.environ["LAB_URL"].split("/")[3], os.environ["LAB_ADDRESS"]
    node = ["iscsiadm", "-m", "node", "-T", iqn, "-p", f"{address}:3260"]
    for words in (["-o", "new", "-I", "iser"], ["-I", "iser", "--login"]):
        subprocess.run([*node, *words], check=True, stdout=subprocess.DEVNULL)
    for _ in range(600):
        for size in Path("/sys/class/iscsi_session").glob("*/device/target*/*/block/sd*/size"):
            if int(size.read_text()) * 512 >= SIZE and Path("/dev", size.parent.name).exists():
                return f"/dev/{size.parent.name}"
        time.sleep(0.2)
    raise RuntimeError("ib_iser made no disk")


@asynccontextmanager
async def subjects() -> AsyncIterator[dict[str, Subject]]:
    url = os.environ["LAB_URL"]
    connector = connecting.VerbsConnector
    async with AsyncExitStack() as stack:
        found: dict[str, Subject] = {}
        for mode in MODES:
            connecting.VerbsConnector = functools.partial(connector, mode=mode)  # type: ignore[misc,assignment]
            disks = await stack.enter_async_context(open_disks([url], {"rcap": "verbs"}))
            disk = disks.disks[disks.default]
            assert disk.info.connection["mode"] == mode
            found[f"iserblk-{mode}"] = functools.partial(ours, disk)
        found["ib_iser"] = functools.partial(kernel, ib_iser())
        found["iscsi-perf"] = functools.partial(libiscsi, url)
        yield found


async def main(rounds: int, seconds: float) -> None:
    samples: list[dict[str, object]] = []
    file = Path(os.environ["LAB_RESULTS"]) / "bench.json"
    async with subjects() as found:
        for job in JOBS:
            for number in range(rounds):
                for name, subject in list(found.items()):
                    if name == "iscsi-perf" and job.writes:
                        continue
                    print(f"{job.name}, round {number + 1}: {name}", flush=True)
                    before = proc.busy_seconds()
                    try:
                        count = await subject(job, seconds)
                    except (JobFailed, subprocess.CalledProcessError) as error:
                        print(f"  {name}: {error}", flush=True)
                        samples.append({"job": job.name, "subject": name, "failed": str(error)})
                        continue
                    samples.append(
                        {"job": job.name, "subject": name, **asdict(count),
                         "cpu_seconds": proc.busy_seconds() - before}
                    )  # fmt: skip
                    file.write_text(json.dumps(samples))


if __name__ == "__main__":
    trio.run(main, int(sys.argv[1]), float(sys.argv[2]))
