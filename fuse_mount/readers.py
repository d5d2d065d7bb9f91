"""A replacement for ``trio`` in pyfuse3's session loop, which runs its tasks as strands.

pyfuse3 finds its event loop under the name ``trio`` in its own namespace (its asyncio support
replaces that name, too). It needs only a nursery for its tasks, and a lock around
``lowlevel.wait_readable``, so that one task at a time reads. With the real trio, each request
costs several turns of the loop. Here the tasks are strands (iserblk/loop/strands.py): while
more requests are waiting, a request costs no turn of the loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from types import SimpleNamespace

import trio

from iserblk.loop import strands
from iserblk.loop.blocking import Poller
from iserblk.loop.nap import Nap
from iserblk.loop.strands import Strand, Strands, open_strands, park, pause
from iserblk.loop.tasks import until_readable

# Requests read before the loop gets a turn, so that its other tasks run, too.
_MOST_AT_ONCE = 64


class _Done:
    """An awaitable that is done at once, and needs no coroutine."""

    def __await__(self) -> Iterator[None]:
        return iter(())


_DONE = _Done()


class _NoLock:
    """In place of ``trio.Lock``: it locks nothing, as ``Readers.wait_readable`` itself lets only
    one task at a time wait for the kernel."""

    def __aenter__(self) -> _Done:
        return _DONE

    def __aexit__(self, *_: object) -> _Done:
        return _DONE


class Readers:
    """The strands that read requests from one descriptor.

    When a strand finds no request, it parks, and a trio task waits for the descriptor. While any
    strand is parked, that task waits, or another strand was woken and will look for a request. So
    no request is missed, nor the end.
    """

    def __init__(self) -> None:
        self._poller = Poller()
        self._fd = -1
        self._closed = False
        self._parked: deque[Strand] = deque()
        self._at_once = 0
        self._watching = False
        self._watcher = Nap()

    def namespace(self) -> object:
        """The object to assign to ``pyfuse3.trio``."""
        return SimpleNamespace(
            Lock=_NoLock,
            ClosedResourceError=trio.ClosedResourceError,
            open_nursery=self.open_nursery,
            from_thread=trio.from_thread,
            lowlevel=SimpleNamespace(
                wait_readable=self.wait_readable,
                notify_closing=self.notify_closing,
                current_task=lambda: strands.running,
                current_trio_token=trio.lowlevel.current_trio_token,
            ),
        )

    @asynccontextmanager
    async def open_nursery(self) -> AsyncIterator[Strands]:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch)
            async with open_strands() as group:
                yield group
            nursery.cancel_scope.cancel()

    def notify_closing(self, fd: int) -> None:
        """As in trio: tasks that wait for ``fd``, now or later, get ClosedResourceError."""
        self._closed = True
        trio.lowlevel.notify_closing(fd)
        while self._parked:
            self._parked.popleft().wake()

    async def wait_readable(self, fd: int) -> None:
        """Return when a request can be read. The caller must read it before it awaits anything.

        Raises ClosedResourceError after ``notify_closing``.
        """
        if fd != self._fd:
            self._poller.add(fd)
            self._fd = fd
        while True:
            if self._closed:
                raise trio.ClosedResourceError
            if self._poller.wait(0):
                self._at_once += 1
                if self._at_once > _MOST_AT_ONCE:
                    self._at_once = 0
                    await pause()
                    continue
                if self._parked:
                    self._parked.popleft().wake()  # this strand looks for the next request
                return
            if not self._watching:
                self._watching = True
                self._watcher.wake()
            assert strands.running is not None
            self._parked.append(strands.running)
            await park()

    async def _watch(self) -> None:
        while True:
            if not self._watching:
                await self._watcher.sleep()
            try:
                await until_readable(self._fd)
            except trio.ClosedResourceError:
                return
            self._watching = False
            self._at_once = 0
            if self._parked:
                strands.held = True
                self._parked.popleft().wake()
                strands.held = False
                strands.run()
