"""What both roles need of trio to drive a queue pair: waiting for a socket that is full."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import trio
from outcome import Value


class Endpoint(Protocol):
    def fileno(self) -> int: ...

    def wants_write(self) -> bool: ...


class WriteWatch:
    """Sleeps until ``wake``; then calls ``progress`` as often as the socket takes more.

    Waiting to read and waiting to write are two tasks in trio, and sockets are seldom full: so
    this one costs nothing until it is needed.
    """

    def __init__(self, endpoint: Endpoint, progress: Callable[[], None]) -> None:
        self._endpoint = endpoint
        self._progress = progress
        self._task: trio.lowlevel.Task | None = None

    @trio.lowlevel.enable_ki_protection  # an interrupt in ``progress`` would lose what it found
    async def run(self) -> None:
        """Body of a task; runs until it is cancelled, the endpoint is closed (its owner calls
        ``trio.lowlevel.notify_closing``), or ``progress`` raises."""
        endpoint = self._endpoint
        while True:
            if endpoint.wants_write():
                try:
                    await trio.lowlevel.wait_writable(endpoint.fileno())
                except trio.ClosedResourceError:
                    return
                self._progress()
            else:
                self._task = trio.lowlevel.current_task()
                await trio.lowlevel.wait_task_rescheduled(self._abort)

    def _abort(self, _raise_cancel: object) -> trio.lowlevel.Abort:
        self._task = None
        return trio.lowlevel.Abort.SUCCEEDED

    def wake(self) -> None:
        """Look again whether the endpoint wants to write."""
        if self._task is not None:
            trio.lowlevel.reschedule(self._task, Value(None))
            self._task = None
