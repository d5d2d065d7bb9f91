"""What pyfuse3's session loop needs of trio, with several requests read in one turn of the loop.

pyfuse3 takes the name ``trio`` in its own namespace for the loop that it runs on (its asyncio
support replaces it there), and needs little of it: a lock around ``lowlevel.wait_readable``, so
that its tasks read one after the other. With trio's own, each request costs two turns of the loop:
one in which the next task gets the lock and asks for the descriptor, one until it is readable. Here
a task that finds the descriptor readable goes on at once, and one that was woken by the kernel
wakes as many others as lately found a request.
"""

from __future__ import annotations

import select
from collections import deque
from types import SimpleNamespace

import trio
from outcome import Error, Value

# Requests read without a turn of the loop in between: others want to run, too.
_MOST_AT_ONCE = 64


class _NoLock:
    """``Readers.wait_readable`` itself lets one task at a time wait for the kernel."""

    async def __aenter__(self) -> None:
        return

    async def __aexit__(self, *_: object) -> None:
        return


class Readers:
    """The tasks that read requests from one descriptor.

    At most one of them sleeps in the kernel's poll. While any is parked, one sleeps there or has
    been woken and will look, so that no request is overlooked, nor the end.
    """

    def __init__(self) -> None:
        self._poll = select.poll()
        self._fd = -1
        self._sleeping = False
        self._closed = False
        self._parked: deque[trio.lowlevel.Task] = deque()
        self._woken = 0  # tasks that were woken and have not looked yet
        self._at_once = 0
        self._found = 0  # requests, by tasks that were woken for the last one from the kernel

    def namespace(self) -> object:
        """To stand for ``trio`` in pyfuse3."""
        return SimpleNamespace(
            Lock=_NoLock,
            ClosedResourceError=trio.ClosedResourceError,
            open_nursery=trio.open_nursery,
            from_thread=trio.from_thread,
            lowlevel=SimpleNamespace(
                wait_readable=self.wait_readable,
                notify_closing=self.notify_closing,
                current_task=trio.lowlevel.current_task,
                current_trio_token=trio.lowlevel.current_trio_token,
            ),
        )

    def notify_closing(self, fd: int) -> None:
        """As trio's: whoever waits, or will, gets ClosedResourceError."""
        self._closed = True
        trio.lowlevel.notify_closing(fd)
        while self._parked:
            error = trio.ClosedResourceError("the file system is being unmounted")
            trio.lowlevel.reschedule(self._parked.popleft(), Error(error))

    async def wait_readable(self, fd: int) -> None:
        """Return when a request can be read; the caller does so before it awaits anything.

        Raises ClosedResourceError after ``notify_closing``.
        """
        if fd != self._fd:
            self._poll.register(fd, select.POLLIN)
            self._fd = fd
        woken = False
        while True:
            if self._closed:
                raise trio.ClosedResourceError
            if self._poll.poll(0):
                self._found += woken
                self._at_once += 1
                if self._at_once > _MOST_AT_ONCE:
                    self._at_once = 0
                    await trio.lowlevel.checkpoint()
                    continue
                if not self._sleeping and not self._woken:
                    self._wake(1)
                return
            if self._sleeping:
                await self._park()
                woken = True
                continue
            self._sleeping = True
            try:
                await trio.lowlevel.wait_readable(fd)
            finally:
                self._sleeping = False
                self._at_once = 0
                # As many as found something the last time, and one that will sleep: who finds
                # nothing was woken in vain, and who was not woken is woken by those that find.
                self._wake(self._found + 1)
                self._found = 0

    def _wake(self, count: int) -> None:
        for _ in range(min(count, len(self._parked))):
            self._woken += 1
            trio.lowlevel.reschedule(self._parked.popleft(), Value(None))

    async def _park(self) -> None:
        task = trio.lowlevel.current_task()

        def abort(_raise_cancel: object) -> trio.lowlevel.Abort:
            self._parked.remove(task)
            return trio.lowlevel.Abort.SUCCEEDED

        self._parked.append(task)
        await trio.lowlevel.wait_task_rescheduled(abort)
        self._woken -= 1
