"""Helpers on trio: a sleep that another task ends, and waiting while a socket is full."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import trio

from iserblk.loop.tasks import until_writable


class Nap:
    """A place where a single task sleeps until another task wakes it."""

    __slots__ = ("_task",)

    def __init__(self) -> None:
        self._task: trio.lowlevel.Task | None = None

    async def sleep(self) -> None:
        """Sleep until ``wake``. May be cancelled."""
        self._task = trio.lowlevel.current_task()
        await trio.lowlevel.wait_task_rescheduled(self._abort)

    def wake(self) -> None:
        """Wake the sleeping task. Does nothing when no task sleeps."""
        if self._task is not None:
            trio.lowlevel.reschedule(self._task)
            self._task = None

    def _abort(self, _raise_cancel: object) -> trio.lowlevel.Abort:
        self._task = None
        return trio.lowlevel.Abort.SUCCEEDED


class Endpoint(Protocol):
    """An object with a socket, as WriteWatch needs it."""

    def fileno(self) -> int: ...

    def wants_write(self) -> bool: ...


class WriteWatch:
    """A task that calls ``progress`` when a socket that was full takes more bytes.

    In trio, waiting to read and waiting to write need two tasks. Sockets are seldom full, so this
    task sleeps until ``wake``, and costs nothing until then.
    """

    def __init__(self, endpoint: Endpoint, progress: Callable[[], None]) -> None:
        self._endpoint = endpoint
        self._progress = progress
        self._nap = Nap()

    @trio.lowlevel.enable_ki_protection  # KeyboardInterrupt in ``progress`` would lose its results
    async def run(self) -> None:
        """The body of the task. Runs until it is cancelled, the endpoint is closed (its owner calls
        ``trio.lowlevel.notify_closing``), or ``progress`` raises."""
        endpoint = self._endpoint
        while True:
            if endpoint.wants_write():
                try:
                    await until_writable(endpoint.fileno())
                except trio.ClosedResourceError:
                    return
                self._progress()
            else:
                await self._nap.sleep()

    def wake(self) -> None:
        """Check again whether the endpoint wants to write."""
        self._nap.wake()
