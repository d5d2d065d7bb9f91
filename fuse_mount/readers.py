"""What pyfuse3's session loop needs of trio, with its tasks run as strands.

pyfuse3 takes the name ``trio`` in its own namespace for the loop that it runs on (its asyncio
support replaces it there), and needs little of it: a nursery for its tasks, and a lock around
``lowlevel.wait_readable``, so that they read one after the other. With trio's own, each request
costs several turns of the loop. Here the tasks are strands: a request costs none, as long as there
are others.
"""

from __future__ import annotations

import select
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from types import SimpleNamespace

import trio

from iserblk.waiting import strands
from iserblk.waiting.descriptors import Nap
from iserblk.waiting.strands import Strand, Strands, open_strands, park, pause

# Requests read without a turn of the loop in between: others want to run, too.
_MOST_AT_ONCE = 64


class _Done:
    """An awaitable that costs no coroutine."""

    def __await__(self) -> Iterator[None]:
        return iter(())


_DONE = _Done()


class _NoLock:
    """``Readers.wait_readable`` itself lets one task at a time wait for the kernel."""

    def __aenter__(self) -> _Done:
        return _DONE

    def __aexit__(self, *_: object) -> _Done:
        return _DONE


class Readers:
    """The strands that read requests from one descriptor.

    A trio task waits in the kernel's poll when one of them has found nothing. While any is parked,
    that task waits there, or another has been wakened and will look: so no request is overlooked,
    nor the end.
    """

    def __init__(self) -> None:
        self._poll = select.poll()
        self._fd = -1
        self._closed = False
        self._parked: deque[Strand] = deque()
        self._at_once = 0
        self._watching = False
        self._watcher = Nap()

    def namespace(self) -> object:
        """To stand for ``trio`` in pyfuse3."""
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
        """As trio's: a task that waits, or will, gets ClosedResourceError."""
        self._closed = True
        trio.lowlevel.notify_closing(fd)
        while self._parked:
            self._parked.popleft().wake()

    async def wait_readable(self, fd: int) -> None:
        """Return when a request can be read; the caller does so before it awaits anything.

        Raises ClosedResourceError after ``notify_closing``.
        """
        if fd != self._fd:
            self._poll.register(fd, select.POLLIN)
            self._fd = fd
        while True:
            if self._closed:
                raise trio.ClosedResourceError
            if self._poll.poll(0):
                self._at_once += 1
                if self._at_once > _MOST_AT_ONCE:
                    self._at_once = 0
                    await pause()
                    continue
                if self._parked:
                    self._parked.popleft().wake()  # it looks for the next one
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
                await trio.lowlevel.wait_readable(self._fd)
            except trio.ClosedResourceError:
                return
            self._watching = False
            self._at_once = 0
            if self._parked:
                strands.held = True
                self._parked.popleft().wake()
                strands.held = False
                strands.run()
