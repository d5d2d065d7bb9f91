"""fio on a block device of this machine, and what the whole machine takes for it."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Protocol

from benchlib import proc
from benchlib.load import Job, JobFailed, fio_command, fio_file

START_S = 120.0
_END_S = 120.0
_LOOK_S = 0.02
# fio's own start is not measured: in an emulated guest it takes as much processor time as hundreds
# of requests. Requests count from the moment at which so many have been done.
_WARM = 4  # times the depth
_LONG_S = 3600.0  # fio is ended when the time is over


@dataclass(slots=True, frozen=True)
class Device:
    """A block device, /dev/``name``, and the process that serves it, if that is no kernel's."""

    name: str
    server: int | None = None


@dataclass(slots=True, frozen=True)
class Use:
    """What was done, and the processor time that it took: of the whole machine, with fio, the
    target and the kernel's threads, and the part of the server."""

    ios: int
    seconds: float
    bytes: int
    cpu_seconds: float
    server_seconds: float


class DiskBytes(Protocol):
    """``proc.disk_bytes``, or what stands in for it."""

    def __call__(self, name: str, *, writes: bool) -> int: ...


@dataclass(slots=True, frozen=True)
class _Now:
    moment: float
    bytes: int
    busy: float
    server: float


def use(device: Device, job: Job, size: int, seconds: float) -> Use:
    """Run ``job`` on the first ``size`` bytes; ``seconds`` of it are measured, by the kernel's
    counters. Raises JobFailed."""
    command = fio_command(job, [*fio_file(f"/dev/{device.name}"), f"--size={size}"], _LONG_S)
    return use_of(command, device, job, seconds, proc.disk_bytes)


def use_of(
    command: Sequence[str], device: Device, job: Job, seconds: float, disk_bytes: DiskBytes
) -> Use:
    """The same of any client that goes on until it is told to end. Raises JobFailed."""

    def now() -> _Now:
        done = disk_bytes(device.name, writes=job.writes)
        server = proc.cpu_seconds([device.server]) if device.server is not None else 0.0
        return _Now(time.monotonic(), done, proc.busy_seconds(), server)

    before = disk_bytes(device.name, writes=job.writes)
    wanted = before + _WARM * job.depth * job.block
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=said
        )
        try:
            deadline = time.monotonic() + START_S
            while disk_bytes(device.name, writes=job.writes) < wanted:
                _lives(process, said)
                if time.monotonic() > deadline:
                    raise JobFailed(f"no {wanted - before} bytes within {START_S:.0f} s")
                time.sleep(_LOOK_S)
            first = now()
            time.sleep(seconds)
            last = now()
            _lives(process, said)
        finally:
            _end(process)
    done = last.bytes - first.bytes
    if not done:
        raise JobFailed(f"nothing was done within {seconds:g} s")
    return Use(
        ios=done // job.block,
        seconds=last.moment - first.moment,
        bytes=done,
        cpu_seconds=last.busy - first.busy,
        server_seconds=last.server - first.server,
    )


def _lives(process: subprocess.Popen[bytes], said: IO[bytes]) -> None:
    """Raises JobFailed if it has ended."""
    if process.poll() is not None:
        said.seek(0)
        words = said.read().decode(errors="replace").strip().splitlines()
        last = words[-1] if words else "it said nothing"
        raise JobFailed(f"the client ended with status {process.returncode}: {last}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """fio answers the signal when what is in flight is done."""
    process.terminate()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
