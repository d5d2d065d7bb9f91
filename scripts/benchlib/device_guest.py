"""Measures in the lab's guest: /dev/nbdX of iserblk, and /dev/sdX of the kernel's initiator.

    python -m benchlib.device_guest ROUNDS SECONDS GLOB…

Each subject is a device of its own, with a LUN of one target; they take turns within a round.
Writes $LAB_RESULTS/bench.json: a list of samples ``{job, subject, ios, seconds, bytes, cpu_seconds,
server_seconds}``, or ``{job, subject, failed}``; ``device_load.Use`` says what they are.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path

from benchlib import device_target, proc
from benchlib.device import (
    ISER,
    OPEN_ISCSI_ISER,
    OPEN_ISCSI_TCP,
    PEERS,
    TCP,
    TCP_FOUR,
    TCP_NBDKIT,
    rows,
)
from benchlib.device_load import Device, use
from benchlib.load import JobFailed
from benchlib.sections import in_rounds

_ISERBLK = (sys.executable, "-P", "-m", "iserblk.cli")
_RUN = Path("/run/iserblk")
_DISK_S = 240.0
_LOGINS = 4
_LOOK_S = 0.2


@contextmanager
def iserblk(number: int, transport: str, *words: str) -> Iterator[Device]:
    name = f"nbd{number}"
    url = device_target.url(transport, number)
    attach = [*_ISERBLK, "attach", url, f"/dev/{name}", *words]
    # On a busy machine an emulated guest may take longer for a login than iserblk waits.
    for _ in range(_LOGINS - 1):
        if subprocess.run(attach, check=False, stdout=subprocess.DEVNULL).returncode == 0:
            break
    else:
        subprocess.run(attach, check=True, stdout=subprocess.DEVNULL)
    try:
        yield Device(name, int((_RUN / name / "server.pid").read_text()))
    finally:
        subprocess.run([*_ISERBLK, "detach", name], check=True)


@contextmanager
def open_iscsi(number: int, transport: str, interface: str) -> Iterator[Device]:
    """Its session ends with the guest."""
    before = _disks(number)
    device_target.log_in(interface, transport)
    deadline = time.monotonic() + _DISK_S
    while not (new := _disks(number) - before):
        if time.monotonic() > deadline:
            raise RuntimeError(f"open-iscsi has made no disk within {_DISK_S:.0f} s")
        time.sleep(_LOOK_S)
    (name,) = new
    yield Device(name)


def _disks(number: int) -> set[str]:
    """The kernel makes a disk of each LUN of a session: those of the LUN of subject ``number``."""
    pattern = f"session*/device/target*/*:{device_target.lun(number)}/block/sd*"
    found = Path("/sys/class/iscsi_session").glob(pattern)
    return {each.name for each in found if Path("/dev", each.name).exists()}


OPENERS = {
    TCP: lambda number: iserblk(number, "iscsi"),
    TCP_FOUR: lambda number: iserblk(number, "iscsi", "--connections", "4"),
    TCP_NBDKIT: lambda number: iserblk(number, "iscsi", "--nbdkit"),
    OPEN_ISCSI_TCP: lambda number: open_iscsi(number, "iscsi", "default"),
    ISER: lambda number: iserblk(number, "iser", "-o", "rcap=verbs"),
    OPEN_ISCSI_ISER: lambda number: open_iscsi(number, "iser", "iser"),
}


def main(rounds: int, seconds: float, patterns: list[str]) -> None:
    samples: list[dict[str, object]] = []
    file = Path(os.environ["LAB_RESULTS"]) / "bench.json"
    wanted = rows(patterns)
    subprocess.run(["modprobe", "iscsi_tcp"], check=True)
    subjects = [each for each in PEERS if each in {row.subject for row in wanted}]
    print(f"making {len(subjects)} LUNs", flush=True)
    device_target.make(len(subjects))
    with ExitStack() as stack:
        devices = {}
        for number, subject in enumerate(subjects):
            print(f"attaching {subject}", flush=True)
            try:
                devices[subject] = stack.enter_context(OPENERS[subject](number))
            except (subprocess.CalledProcessError, RuntimeError) as error:
                print(f"  {subject}: {error}", flush=True)
                samples += [
                    {"job": row.job.name, "subject": subject, "failed": "it has no device"}
                    for row in wanted
                    if row.subject == subject
                ]
        for number, row in in_rounds([row for row in wanted if row.subject in devices], rounds):
            print(f"{row.job.name}, round {number + 1}: {row.subject}", flush=True)
            sample: dict[str, object] = {"job": row.job.name, "subject": row.subject}
            try:
                found = use(devices[row.subject], row.job, device_target.SIZE, seconds)
                sample |= asdict(found)
            except (JobFailed, proc.NoSuchProcess) as error:
                print(f"  {row.subject}: {error}", flush=True)
                sample["failed"] = str(error) or "its server has ended"
            samples.append(sample)
            file.write_text(json.dumps(samples))


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:])
