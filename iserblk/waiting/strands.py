"""Strands: coroutines that are resumed by a plain call, many in one turn of trio's loop.

Each time it waits, a strand costs about an eighth of what a trio task does. A front-end whose
requests are many and short runs them as strands; what waits for anything but commands of the fast
path goes ``elsewhere``, into a trio task.

A strand may await only ``park`` and what is built on it: a function of trio's, which would take the
task that happens to resume it for its own, ends the strand with an error. All of this belongs to
the thread that runs trio.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import trio
from outcome import Error, Outcome, Value

from iserblk.waiting.descriptors import Nap

T = TypeVar("T")

running: Strand | None = None
"""The strand whose code this is."""
held = False
"""Its setter calls ``run`` in a moment: wakened strands wait for that."""

_ready: deque[Strand] = deque()
_enough = False


class Strand:
    """``abandon``: while it is parked, what must have been awaited with ``waiter`` before its
    coroutine may be closed: the target may still use its buffer."""

    __slots__ = ("abandon", "coroutine", "group", "name", "waiter")

    def __init__(self, coroutine: Coroutine[Any, Any, object], group: Strands, name: str) -> None:
        self.coroutine = coroutine
        self.group = group
        self.name = name
        self.abandon: Callable[[Any], Awaitable[None]] | None = None
        self.waiter: Any = None

    def wake(self) -> None:
        """It is parked, or will be before anything else runs: it goes on soon."""
        if self.group.closing:
            return
        _ready.append(self)
        if not held and running is None:
            self.group.rouse()


@types.coroutine
def park() -> Generator[None, None, None]:
    """Wait for ``wake`` of the running strand."""
    yield


async def pause() -> None:
    """Let trio's tasks run, and then go on."""
    global _enough  # noqa: PLW0603
    assert running is not None
    _enough = True
    _ready.append(running)
    await park()


async def elsewhere(function: Callable[..., Awaitable[T]], *arguments: object) -> T:
    """Await it, in a trio task of its own if it is for a strand."""
    strand = running
    if strand is None:
        return await function(*arguments)
    result: list[Outcome[T]] = []

    async def work() -> None:
        try:
            result.append(Value(await function(*arguments)))
        except Exception as error:
            result.append(Error(error))
        strand.wake()

    strand.group.nursery.start_soon(work)
    await park()
    return result[0].unwrap()


def run() -> int:
    """Resume the strands that were wakened, and those that are meanwhile; returns how many, or 0
    when one of them pauses: then it is the turn of trio's tasks. Never raises: an error of a
    strand's comes out of its group's context manager."""
    global running, _enough  # noqa: PLW0603
    _enough = False
    count = 0
    try:
        while _ready and not _enough:
            count += 1
            strand = running = _ready.popleft()
            try:
                trap = strand.coroutine.send(None)
            except StopIteration:
                strand.group.ended(strand, None)
            except BaseException as error:
                strand.group.ended(strand, error)
            else:
                if trap is not None:
                    strand.group.ended(strand, _misused(strand, trap))
    finally:
        running = None
    if not _ready:
        return count
    for group in {strand.group for strand in _ready}:
        group.rouse()
    return 0


def _misused(strand: Strand, trap: object) -> BaseException:
    try:
        strand.coroutine.close()
    except BaseException as error:
        return error
    return RuntimeError(f"{strand.name}: a strand cannot wait for {trap!r}")


class Strands:
    """A group of them, with a part of trio's Nursery: see ``open_strands``."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.nursery = nursery
        self.closing = False
        self._alive: set[Strand] = set()
        self._error: BaseException | None = None
        self._all_ended = trio.Event()
        self._nap = Nap()  # of ``run``

    def start_soon(
        self,
        function: Callable[..., Coroutine[Any, Any, object]],
        *arguments: object,
        name: str = "strand",
    ) -> None:
        strand = Strand(function(*arguments), self, name)
        self._alive.add(strand)
        strand.wake()

    def rouse(self) -> None:
        """Have ``run`` called, and what ended looked at."""
        self._nap.wake()

    def ended(self, strand: Strand, error: BaseException | None) -> None:
        self._alive.remove(strand)
        self._error = self._error or error
        if not self._alive:
            self._all_ended.set()
        if error is not None:
            self.rouse()

    async def run(self) -> None:
        """The body of the task that resumes strands which nobody else does. Raises the first error
        of one."""
        while True:
            run()
            if self._error is not None:
                raise self._error
            if _ready:
                await trio.lowlevel.checkpoint()
            else:
                await self._nap.sleep()

    async def finish(self) -> None:
        """Returns when every strand that was started has ended."""
        while self._alive:
            self._all_ended = trio.Event()
            await self._all_ended.wait()

    async def close(self) -> None:
        """End those that are left where they are, each once nobody uses its buffers: what it holds
        another one's commands may be waiting for."""
        self.closing = True
        for strand in [each for each in _ready if each.group is self]:
            _ready.remove(strand)
        with trio.CancelScope(shield=True):
            async with trio.open_nursery() as nursery:
                for strand in self._alive:
                    nursery.start_soon(_end, strand)
        self._alive.clear()


async def _end(strand: Strand) -> None:
    if strand.abandon is not None:
        await strand.abandon(strand.waiter)
    strand.coroutine.close()


@asynccontextmanager
async def open_strands() -> AsyncIterator[Strands]:
    """As trio.open_nursery: leaves when all strands that were started have ended. When one of them
    fails, or this task is cancelled, the others are closed where they are parked."""
    async with trio.open_nursery() as nursery:
        group = Strands(nursery)
        nursery.start_soon(group.run)
        try:
            yield group
            await group.finish()
        finally:
            await group.close()
        nursery.cancel_scope.cancel()
