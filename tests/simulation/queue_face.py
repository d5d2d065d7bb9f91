"""The face of a simulated world that is a request queue: reads and writes go through the product's
(``iserblk.disk.request_queue``); one task waits for the ends of all of them.

Now and then that task is cancelled while it waits, and waits again. Or the queue is closed with
requests under way, and another one takes its place: whether these requests were carried out, nobody
is told, and their buffers are the callers' again.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import trio

from iserblk.disk.request_queue import RequestQueue, open_queue
from iserblk.disk.seam import DirectDisk
from iserblk.errors import IserblkError
from tests.simulation.cases import QUEUE_CLOSE, QUEUE_WAIT
from tests.simulation.faces import Around
from tests.simulation.history import Wrong

SEVERAL = "queue: several ended together"
CLOSED = "queue: closed with requests under way"
WENT_ON = "queue: waited for again"
STATES: Final = (SEVERAL, CLOSED, WENT_ON)
_FREE: Final = 64  # buffers of reads of a closed queue that are looked at later


class Closed(IserblkError):
    """The queue was closed: the request was carried out, or not."""


class _Asked:
    """A request. ``error``: what it has failed with, when it has ``ended``."""

    def __init__(self, buffer: memoryview, writes: bool) -> None:
        self.buffer = buffer
        self.writes = writes
        self.error: IserblkError | None = None
        self.ended = trio.Event()


class QueueFace:
    """``read_into`` and ``write`` are those of a disk, and raise Closed, too."""

    def __init__(self, around: Around, disk: DirectDisk) -> None:
        self._around = around
        self._disk = disk
        self._open: dict[_Asked, None] = {}
        self._free: list[tuple[memoryview, bytes]] = []  # with what was in it when it became free
        self._begun = trio.Event()
        self._there = trio.Event()
        self._queue: RequestQueue | None = None
        self._life = trio.CancelScope()
        self._wait = trio.CancelScope()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._run)
            yield
            if self._open:
                raise Wrong(f"{len(self._open)} requests of the queue are open")
            nursery.cancel_scope.cancel()
        self._look_at_buffers()

    def die(self) -> None:
        """The requests end by themselves."""

    # -- what the clients do ----------------------------------------------------------------------

    async def read_into(self, buffer: memoryview, offset: int) -> None:
        await self._ask(buffer, offset, False, False)

    async def write(self, buffer: memoryview, offset: int, fua: bool) -> None:
        await self._ask(buffer, offset, True, fua)

    async def _ask(self, buffer: memoryview, offset: int, writes: bool, fua: bool) -> None:
        while self._queue is None:
            await self._there.wait()
        asked = _Asked(buffer, writes)
        if writes:
            self._queue.write(buffer, offset, asked, fua=fua)
        else:
            self._queue.read(buffer, offset, asked)
        self._open[asked] = None
        self._begun.set()
        await asked.ended.wait()
        if asked.error is not None:
            raise asked.error

    # -- the queue --------------------------------------------------------------------------------

    async def _run(self) -> None:
        """One queue after the other."""
        while True:
            with trio.CancelScope() as self._life:
                async with open_queue(self._disk) as self._queue:
                    self._there.set()
                    await self._fetch(self._queue)
            self._look_at_buffers()
            if self._open:
                self._around.count(CLOSED)
            for asked in self._open:
                if not asked.writes:
                    self._free.append((asked.buffer, bytes(asked.buffer)))
                asked.error = Closed("the queue was closed")
                asked.ended.set()
            self._open.clear()
            await trio.lowlevel.checkpoint()  # (its own cancellation is the end)

    async def _fetch(self, queue: RequestQueue) -> None:
        was_cancelled = False
        while True:
            if not queue.open:
                self._begun = trio.Event()
                await self._begun.wait()
            with trio.CancelScope() as self._wait:
                over = await queue.ended()
                if len(over) > 1:
                    self._around.count(SEVERAL)
                if over and was_cancelled:
                    self._around.count(WENT_ON)
                was_cancelled = False
                for each in over:
                    asked = each.tag
                    assert isinstance(asked, _Asked)
                    asked.error = each.error
                    if each.error is not None and self._life.cancel_called:
                        # (It was carried out by a task of the queue, which was cancelled first.)
                        asked.error = Closed(str(each.error))
                    asked.ended.set()
                    del self._open[asked]  # (KeyError: it has ended twice)
            was_cancelled = was_cancelled or self._wait.cancelled_caught

    def _look_at_buffers(self) -> None:
        """Those of reads that are free again: nothing comes into them. Raises Wrong."""
        for buffer, content in self._free:
            if bytes(buffer) != content:
                raise Wrong("the buffer of a request changes when its queue was closed")
        del self._free[:-_FREE]

    # -- faults -----------------------------------------------------------------------------------

    def strike(self, kind: str) -> None:
        self._around.trace("%s, with %d requests", kind, len(self._open))
        if kind == QUEUE_CLOSE:
            if self._queue is not None:  # (else it is being closed, and clients wait for the next)
                self._queue, self._there = None, trio.Event()  # of this one nobody asks any more
            self._life.cancel()
        else:
            assert kind == QUEUE_WAIT
            self._wait.cancel()
