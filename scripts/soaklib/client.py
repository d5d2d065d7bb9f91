"""A client of a soak, as a process of its own:

    python -m soaklib.client ORDER

ORDER is JSON, see ``Order``. The client works until its standard input ends; a visitor, for its
number of steps. Then it flushes, and reads all that it has written. It prints lines of JSON: what
was wrong, what has failed, and every few seconds latencies and the size of the LUN.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import trio

from iserblk.disk import aio, blocking
from iserblk.disk.seam import AsyncDisk
from iserblk.errors import ConnectFailed, IserblkError, TransportError
from soaklib.area import COMES, Area, Ledger
from soaklib.faces import BlockingFace, Face, FileFace, NbdFace, do_async
from soaklib.latencies import Latencies
from soaklib.work import Step, Worker

_REPORT_S = 5.0
_AFTER_ERROR_S = 1.0
_MOST_LINES = 20  # of what is wrong, or has failed


@dataclass(frozen=True)
class Order:
    """``face``: nbd, file, blocking or trio. ``places``: URLs, or a path. ``areas``: for each
    worker its number, and the offset of its area. ``steps``: of a visitor. ``dies``: it is then
    killed, in the middle of a write. ``ledger``: of a visitor; ``state``: where the areas are left
    at the end. ``metrics``: where those of the LUN are served; "": nowhere."""

    name: str
    face: str
    places: list[str]
    areas: list[tuple[int, int]]
    blocks: int
    seed: str
    io_timeout_s: float
    state: str
    steps: int = 0
    dies: bool = False
    ledger: str = ""
    connections: int = 1
    metrics: str = ""

    def words(self) -> str:
        return json.dumps(asdict(self))


class Client:
    def __init__(self, order: Order) -> None:
        self.order = order
        self.stop = threading.Event()
        self._lock = threading.Lock()
        self._latencies = Latencies()
        self._told = 0
        self._ledger = -1
        self.workers = []
        for owner, offset in order.areas:
            area = Area(owner, offset, order.blocks)
            if order.ledger:
                self._open_ledger(area)
            seed = f"{order.seed} {owner}"
            self.workers.append(Worker(area, seed, self._wrong, self._note))

    def _open_ledger(self, area: Area) -> None:
        path = Path(self.order.ledger)
        if path.exists():
            Ledger(area, path.read_bytes())
        self._ledger = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._note(f"\n{COMES}")  # perhaps behind a part of a line

    def _note(self, line: str) -> None:
        if self._ledger >= 0:
            os.write(self._ledger, f"{line}\n".encode())

    def _say(self, **what: object) -> None:
        line = json.dumps(what) + "\n"
        with contextlib.suppress(BrokenPipeError):
            os.write(1, line.encode())

    def _wrong(self, text: str) -> None:
        self.tell(wrong=text)

    def tell(self, **what: str) -> None:
        with self._lock:
            self._told += 1
            told = self._told
        if told <= _MOST_LINES:
            self._say(**what)

    def ended(self, worker: Worker, step: Step, began: float, data: bytes) -> None:
        took = time.monotonic() - began
        with self._lock:
            self._latencies.add(took)
        worker.ended(step, data)

    def failed(self, worker: Worker, step: Step, began: float, error: Exception) -> None:
        took = time.monotonic() - began
        self.tell(failed=f"{step.kind} at {step.offset} after {took:.1f} s: {error}")
        worker.failed(step)

    def report(self, size: int) -> None:
        with self._lock:
            latencies, self._latencies = self._latencies, Latencies()
        self._say(latencies=latencies.counts, size=size)

    # --- in threads --------------------------------------------------------------------------

    def _step(self, face: Face, worker: Worker, step: Step) -> None:
        began = time.monotonic()
        try:
            data = face.do(step)
        except (OSError, IserblkError) as error:
            self.failed(worker, step, began, error)
            self.stop.wait(_AFTER_ERROR_S)
        else:
            self.ended(worker, step, began, data)

    def _work(self, face: Face, worker: Worker) -> None:
        while not self.stop.wait(worker.pause()):
            self._step(face, worker, worker.next())

    def _end(self, face: Face) -> None:
        for worker in self.workers:
            for step in worker.last():
                self._step(face, worker, step)

    def run(self) -> None:
        with self._face() as face:
            self._say(ready=True)
            threads = [
                threading.Thread(target=self._work, args=(face, worker)) for worker in self.workers
            ]
            for thread in threads:
                thread.start()
            while not self.stop.wait(_REPORT_S):
                self.report(face.size)
            for thread in threads:
                thread.join()
            self._end(face)
            self.report(face.size)

    def visit(self) -> None:
        order = self.order
        with self._face() as face:
            (worker,) = self.workers
            for step in worker.all():
                self._step(face, worker, step)
            for _ in range(order.steps):
                self._step(face, worker, worker.next())
            if order.dies:
                step = worker.next()
                threading.Thread(target=self._step, args=(face, worker, step), daemon=True).start()
                os.kill(os.getpid(), signal.SIGKILL)
            self._end(face)
            self.report(face.size)

    @contextmanager
    def _face(self) -> Iterator[Face]:
        order = self.order
        place = Path(order.places[0])
        if order.face == "blocking":
            with self._opened() as disks:
                yield BlockingFace(disks.disks[disks.default])
            return
        face: Face
        if order.face == "nbd":
            face = NbdFace(place, order.connections, order.io_timeout_s)
        else:
            face = FileFace(place)
        with contextlib.closing(face):
            yield face

    def _opened(self) -> blocking.ThreadDiskSet:
        """Opening has no patience with portals that are away: its caller has."""
        until = time.monotonic() + self.order.io_timeout_s
        while True:
            try:
                return blocking.open_disks(self.order.places, self._options)
            except (TransportError, ConnectFailed):
                if time.monotonic() > until:
                    raise
            time.sleep(_AFTER_ERROR_S)

    @property
    def _options(self) -> dict[str, str]:
        options = {"io_timeout": f"{self.order.io_timeout_s:g}"}
        if self.order.metrics:
            options["metrics"] = self.order.metrics
        return options

    # --- in trio -----------------------------------------------------------------------------

    async def run_async(self) -> None:
        async with aio.open_disks(self.order.places, self._options) as disks:
            self._say(ready=True)
            disk = disks.disks[disks.default]
            async with trio.open_nursery() as nursery:
                for worker in self.workers:
                    nursery.start_soon(self._work_async, disk, worker)
                nursery.start_soon(self._report_async, disk)
                await trio.to_thread.run_sync(self.stop.wait)
            for worker in self.workers:
                for step in worker.last():
                    await self._step_async(disk, worker, step)
            self.report(disk.size)

    async def _step_async(self, disk: AsyncDisk, worker: Worker, step: Step) -> None:
        began = time.monotonic()
        try:
            data = await do_async(disk, step)
        except IserblkError as error:
            self.failed(worker, step, began, error)
            await trio.sleep(_AFTER_ERROR_S)
        else:
            self.ended(worker, step, began, data)

    async def _work_async(self, disk: AsyncDisk, worker: Worker) -> None:
        while not self.stop.is_set():
            await self._step_async(disk, worker, worker.next())
            await trio.sleep(worker.pause())

    async def _report_async(self, disk: AsyncDisk) -> None:
        while not self.stop.is_set():
            self.report(disk.size)
            await trio.sleep(_REPORT_S)

    def leave(self) -> None:
        """The areas, for those who look at the LUN afterwards."""
        areas = [asdict_of(worker.area) for worker in self.workers]
        Path(self.order.state).write_text(json.dumps(areas))


def asdict_of(area: Area) -> dict[str, object]:
    return {
        "owner": area.owner,
        "offset": area.offset,
        "flushed": area.flushed,
        "newest": area.newest,
    }


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    client = Client(Order(**json.loads(sys.argv[1])))

    def wait_for_the_end() -> None:
        while os.read(0, 1):
            pass
        client.stop.set()

    try:
        if client.order.steps:
            client.visit()
        else:
            threading.Thread(target=wait_for_the_end, daemon=True).start()
            if client.order.face == "trio":
                trio.run(client.run_async)
            else:
                client.run()
    except (OSError, IserblkError) as error:
        client.tell(failed=str(error))
        return 1
    client.leave()
    return 0


if __name__ == "__main__":
    sys.exit(main())
