"""Strands: coroutines that are resumed by a plain call, many in one turn of trio's loop.

A wait costs a strand about an eighth of what it costs a trio task. A front-end with many short
requests runs each as a strand. Code that waits for anything but commands of the fast path goes
``elsewhere``: into a trio task.

A strand may await only ``park`` and functions that are built on it. A function of trio would act on
the task that happens to resume the strand; so awaiting one ends the strand with an error. Each
thread that runs a loop has strands of its own.
"""

from __future__ import annotations

import threading
import types
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import trio
from outcome import Error, Outcome, Value

from iserblk.loop.here import loop_here
from iserblk.loop.nap import Nap

T = TypeVar("T")


class Resumer:
    """The strands of one thread. ``running``: the one that is being resumed now; None outside of
    strands. ``held``: True while the code that set it is about to call ``run``: woken strands wait
    for that call."""

    def __init__(self) -> None:
        self.running: Strand | None = None
        self.held = False
        self.ready: deque[Strand] = deque()
        self.enough = False

    def run(self) -> int:
        """Resume all woken strands, also those that are woken during this call.

        Returns how many were resumed; or 0 when a strand called ``pause``, as it is then the turn
        of trio tasks. Never raises: the context manager of its group raises the error of a
        strand."""
        self.enough = False
        count = 0
        ready = self.ready
        try:
            while ready and not self.enough:
                count += 1
                strand = self.running = ready.popleft()
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
            self.running = None
        if not ready:
            return count
        for group in dict.fromkeys(strand.group for strand in ready):
            group.rouse()
        return 0


class _Threads(threading.local):
    def __init__(self) -> None:
        self.resumer = Resumer()


_threads = _Threads()


def here() -> Resumer:
    """The strands of the calling thread."""
    return _threads.resumer


class Strand:
    """A coroutine, and the group that it belongs to. ``owner``: the client that it works for, of a
    front-end that has several; their commands take turns.

    ``abandon``: set while the strand is parked and the target may still use its buffer. Then
    ``abandon(waiter)`` must be awaited before the coroutine is closed. ``stopping``: it is not
    resumed any more."""

    __slots__ = ("abandon", "coroutine", "group", "name", "owner", "stopping", "waiter")

    def __init__(
        self,
        coroutine: Coroutine[Any, Any, object],
        group: Strands,
        name: str,
        owner: object = None,
    ) -> None:
        self.coroutine = coroutine
        self.group = group
        self.name = name
        self.owner = owner
        self.abandon: Callable[[Any], Awaitable[None]] | None = None
        self.waiter: Any = None
        self.stopping = False

    def wake(self) -> None:
        """Resume the strand soon. It must be parked, or park before other code runs."""
        if self.group.closing or self.stopping:
            return
        resumer = self.group.here
        resumer.ready.append(self)
        if not resumer.held and resumer.running is None:
            self.group.rouse()


@types.coroutine
def park() -> Generator[None, None, None]:
    """Suspend the running strand until its ``wake`` is called."""
    yield


async def pause() -> None:
    """Let trio tasks run, then go on with the running strand."""
    resumer = here()
    assert resumer.running is not None
    resumer.enough = True
    resumer.ready.append(resumer.running)
    await park()


async def elsewhere(function: Callable[..., Awaitable[T]], *arguments: object) -> T:
    """Await ``function(*arguments)``; inside a strand, in a separate trio task."""
    strand = here().running
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
    value: T = result[0].unwrap()  # (outcome 1.2 has no types)
    return value


def _misused(strand: Strand, trap: object) -> BaseException:
    try:
        strand.coroutine.close()
    except BaseException as error:
        return error
    return RuntimeError(f"{strand.name}: a strand cannot wait for {trap!r}")


class Strands:
    """A group of strands, with some methods of trio's Nursery. ``open_strands`` makes it."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.nursery = nursery
        self.here = here()
        self.closing = False
        self._alive: dict[Strand, None] = {}
        self._error: BaseException | None = None
        self._all_ended = trio.Event()
        self._loop = loop_here()
        self._roused = False  # ``_resume`` is to be called
        self._nap = Nap()  # of ``run``

    def start_soon(
        self,
        function: Callable[..., Coroutine[Any, Any, object]],
        *arguments: object,
        name: str = "strand",
        owner: object = None,
    ) -> Strand:
        """Start ``function(*arguments)`` as a strand. ``name``: for error texts. ``owner``: see
        Strand."""
        strand = Strand(function(*arguments), self, name, owner)
        self._alive[strand] = None
        strand.wake()
        return strand

    def rouse(self) -> None:
        """Have the loop resume woken strands in its next turn."""
        if not self._roused:
            self._roused = True
            self._loop.call_soon(self._resume)

    def _resume(self) -> None:
        self._roused = False
        self.here.run()

    def ended(self, strand: Strand, error: BaseException | None) -> None:
        """Note that a strand has returned (None) or raised ``error``."""
        self._alive.pop(strand, None)
        self._error = self._error or error
        if not self._alive:
            self._all_ended.set()
        if error is not None:
            self._nap.wake()

    async def run(self) -> None:
        """The body of the group's own task. Raises the first error of a strand."""
        while self._error is None:
            await self._nap.sleep()
        raise self._error

    async def finish(self) -> None:
        """Wait until every strand that was started has ended."""
        while self._alive:
            self._all_ended = trio.Event()
            await self._all_ended.wait()

    async def stop(self, strand: Strand) -> bool:
        """Close one strand at the place where it is parked, as ``close`` does. False: it has ended,
        or is being closed already."""
        if strand not in self._alive or self.closing:
            return False
        strand.stopping = True
        ready = self.here.ready
        if strand in ready:
            ready.remove(strand)
        del self._alive[strand]  # ``close`` leaves it alone
        with trio.CancelScope(shield=True):
            await _end(strand)
        self.ended(strand, None)
        return True

    async def close(self) -> None:
        """Close the strands that have not ended, at the place where they are parked.

        Each is closed as soon as its own buffers are no longer used, without waiting for the other
        strands: their commands may wait for something that this strand holds."""
        self.closing = True
        ready = self.here.ready
        for strand in [each for each in ready if each.group is self]:
            ready.remove(strand)
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
    """A group of strands, as trio.open_nursery is one of tasks: leaving the context waits until all
    strands that were started have ended. When a strand fails, or the task of this context is
    cancelled, the other strands are closed where they are parked."""
    async with trio.open_nursery() as nursery:
        group = Strands(nursery)
        nursery.start_soon(group.run)
        try:
            yield group
            await group.finish()
        finally:
            await group.close()
        nursery.cancel_scope.cancel()
