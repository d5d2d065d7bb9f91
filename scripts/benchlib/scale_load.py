"""A client with many sessions, by the Python API, that reads 4 KiB at random places.

    python scale_load.py URL SESSIONS IN_FLIGHT SECONDS

Opens SESSIONS sessions, one after the other, each with a disk of its own, and keeps IN_FLIGHT
requests open in each. Its caller may look at its memory twice: when one session is open, and when
all are, it prints a line, and goes on when it has read one. At the end it prints JSON: ``ios`` and
``seconds``, ``cpu_seconds`` of this process while it read, and ``opened_ms``, how long each session
took to open. Exit status 1: a session could not be opened, or a read failed.
"""

from __future__ import annotations

import json
import random
import sys
import time

import trio

from iserblk.aio import open_disks
from iserblk.disk.seam import AsyncDisk
from iserblk.errors import IserblkError

BLOCK = 4096


async def serve_session(
    url: str, over: trio.Event, task_status: trio.TaskStatus[AsyncDisk] = trio.TASK_STATUS_IGNORED
) -> None:
    """Keep a session open until ``over``. Each has a task, so that all log out at the same time."""
    async with open_disks([url], {}) as found:
        task_status.started(found.disks[found.default])
        await over.wait()


async def look(what: str) -> None:
    """Let the caller look at this process."""
    print(what, flush=True)
    await trio.lowlevel.wait_readable(sys.stdin)
    sys.stdin.readline()


class Reader:
    """Reads until ``until`` (monotonic seconds). ``ios``: what was read."""

    def __init__(self, until: float) -> None:
        self.ios = 0
        self._until = until

    async def read(self, disk: AsyncDisk) -> None:
        """The body of a task: one request after the other."""
        buffer = memoryview(bytearray(BLOCK))
        blocks = disk.size // BLOCK
        while time.monotonic() < self._until:
            await disk.read_into(buffer, int(random.random() * blocks) * BLOCK)
            self.ios += 1


async def run(url: str, sessions: int, in_flight: int, seconds: float) -> dict[str, object]:
    """What is to be printed. Raises IserblkError, perhaps in groups."""
    over = trio.Event()
    opened_ms = []
    disks: list[AsyncDisk] = []
    async with trio.open_nursery() as nursery:
        for _ in range(sessions):
            began = time.monotonic()
            disks.append(await nursery.start(serve_session, url, over))
            opened_ms.append((time.monotonic() - began) * 1000)
            if len(disks) == 1:
                await look("one is open")
        await look("all are open")
        began, busy = time.monotonic(), time.process_time()
        reader = Reader(began + seconds)
        async with trio.open_nursery() as readers:
            for disk in disks * in_flight:
                readers.start_soon(reader.read, disk)
        took, busy = time.monotonic() - began, time.process_time() - busy
        over.set()
    return {"ios": reader.ios, "seconds": took, "cpu_seconds": busy, "opened_ms": opened_ms}


def main() -> int:
    url, sessions, in_flight, seconds = sys.argv[1:]
    problem: BaseException | None = None
    found: dict[str, object] = {}
    try:
        found = trio.run(run, url, int(sessions), int(in_flight), float(seconds))
    except* (IserblkError, OSError) as group:
        problem = group
    while isinstance(problem, BaseExceptionGroup):
        problem = problem.exceptions[0]
    if problem is not None:
        print(problem, file=sys.stderr)
        return 1
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
