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
from iserblk.loop.here import loop_here
from iserblk.loop.seam import Watch
from iserblk.loop.strands import Strand, Strands, open_strands, park, pause

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

    When a strand finds no request, it parks, and the loop watches the descriptor. While any strand
    is parked, the loop does so, or another strand was woken and will look for a request. So no
    request is missed, nor the end.
    """

    def __init__(self) -> None:
        self._poller = Poller()
        self._watch: Watch | None = None
        self._closed = False
        self._parked: deque[Strand] = deque()
        self._at_once = 0

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
                current_task=lambda: strands.here().running,
                current_trio_token=trio.lowlevel.current_trio_token,
            ),
        )

    @asynccontextmanager
    async def open_nursery(self) -> AsyncIterator[Strands]:
        try:
            async with open_strands() as group:
                yield group
        finally:
            self._forget()

    def _forget(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()

    def notify_closing(self, _fd: int) -> None:
        """As in trio: tasks that wait for the descriptor, now or later, get ClosedResourceError."""
        self._closed = True
        self._forget()
        while self._parked:
            self._parked.popleft().wake()

    async def wait_readable(self, fd: int) -> None:
        """Return when a request can be read. The caller must read it before it awaits anything.

        Raises ClosedResourceError after ``notify_closing``, and OSError when the system has no room
        to watch it.
        """
        while True:
            if self._closed:
                raise trio.ClosedResourceError
            if self._watch is None:
                self._watch = loop_here().watch(fd, self._come)
                self._poller.add(fd)
            if self._poller.wait(0):
                self._at_once += 1
                if self._at_once > _MOST_AT_ONCE:
                    self._at_once = 0
                    await pause()
                    continue
                if self._parked:
                    self._parked.popleft().wake()  # this strand looks for the next request
                return
            self._watch.want(readable=True, writable=False)
            running = strands.here().running
            assert running is not None
            self._parked.append(running)
            await park()

    def _come(self) -> None:
        """Requests have come, or the end."""
        if not self._parked:  # all are at work, and look for the next one themselves
            if self._watch is not None:
                self._watch.want(readable=False, writable=False)
            return
        self._at_once = 0
        resumer = strands.here()
        resumer.held = True
        self._parked.popleft().wake()
        resumer.held = False
        resumer.run()
