"""Measures in the lab's guest: /dev/nbdX by our NBD server and by nbdkit.

    python -m benchlib.device_guest ROUNDS SECONDS

Each subject is a device of its own, with a LUN of one target; they take turns within a round.
Writes $LAB_RESULTS/bench.json: a list of samples ``{job, subject, ios, seconds, bytes,
cpu_seconds}``. ``cpu_seconds`` is the processor time of the device's server.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import trio

from benchlib import proc
from benchlib.device import PEER
from benchlib.lab_guest import SIZE, kernel
from benchlib.load import Job

JOBS = (
    Job("4k-randread-d32", "randread", 4096, 32),
    Job("4k-randwrite-d32", "randwrite", 4096, 32),
)
SUBJECTS = {
    "iserblk, 1 connection": ["--connections", "1"],
    "iserblk, 4 connections": ["--connections", "4"],
    "nbdkit, 1 connection": ["--nbdkit", "--connections", "1"],
    PEER: ["--nbdkit", "--connections", "4"],
}
_ISERBLK = (sys.executable, "-P", "-m", "iserblk.cli")
_RUN = Path("/run/iserblk")


@contextmanager
def target() -> Iterator[str]:
    """A target with a LUN for each subject, full of data: holes are quicker to read. Its URL."""
    with tempfile.TemporaryDirectory() as directory:
        places = [Path(directory) / str(number) for number in range(len(SUBJECTS))]
        for place in places:
            place.write_bytes(os.urandom(SIZE))
        luns = [f"--lun={place}" for place in places]
        words = ["--iqn", "iqn.2026-11.example:bench", "--listen", "127.0.0.1:0"]
        process = subprocess.Popen(
            [*_ISERBLK, "target", *words, *luns], stdout=subprocess.PIPE, text=True
        )
        try:
            assert process.stdout is not None
            ready, _, url = process.stdout.readline().strip().partition(" ")
            assert ready == "ready"
            yield url
        finally:
            process.terminate()
            process.wait()


@contextmanager
def devices(url: str) -> Iterator[dict[str, str]]:
    """The device of each subject."""
    found: dict[str, str] = {}
    try:
        for number, (subject, words) in enumerate(SUBJECTS.items()):
            command = [*_ISERBLK, "attach", f"{url}/{number}", f"/dev/nbd{number}", *words]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            found[subject] = f"nbd{number}"
        yield found
    finally:
        subprocess.run([*_ISERBLK, "detach", *found.values()], check=True)


async def main(rounds: int, seconds: float) -> None:
    samples: list[dict[str, object]] = []
    file = Path(os.environ["LAB_RESULTS"]) / "bench.json"
    with target() as url, devices(url) as found:
        for job in JOBS:
            for number in range(rounds):
                # Each round begins with another subject.
                order = list(found.items())
                for subject, name in order[number % 4 :] + order[: number % 4]:
                    print(f"{job.name}, round {number + 1}: {subject}", flush=True)
                    server = [int((_RUN / name / "server.pid").read_text())]
                    before = proc.cpu_seconds(server)
                    count = await kernel(f"/dev/{name}", job, seconds)
                    used = proc.cpu_seconds(server) - before
                    samples.append(
                        {"job": job.name, "subject": subject, **asdict(count), "cpu_seconds": used}
                    )
                    file.write_text(json.dumps(samples))


if __name__ == "__main__":
    trio.run(main, int(sys.argv[1]), float(sys.argv[2]))
