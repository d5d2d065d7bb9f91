"""What several need of trio: a task that sleeps until it is needed, waiting for a socket that is
full, and signals around ``trio.run``."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import trio


class Nap:
    """Where one task sleeps until another one wakes it."""

    __slots__ = ("_task",)

    def __init__(self) -> None:
        self._task: trio.lowlevel.Task | None = None

    async def sleep(self) -> None:
        """Until ``wake``. May be cancelled."""
        self._task = trio.lowlevel.current_task()
        await trio.lowlevel.wait_task_rescheduled(self._abort)

    def wake(self) -> None:
        """Does nothing when nobody sleeps."""
        if self._task is not None:
            trio.lowlevel.reschedule(self._task)
            self._task = None

    def _abort(self, _raise_cancel: object) -> trio.lowlevel.Abort:
        self._task = None
        return trio.lowlevel.Abort.SUCCEEDED


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
        self._nap = Nap()

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
                await self._nap.sleep()

    def wake(self) -> None:
        """Look again whether the endpoint wants to write."""
        self._nap.wake()


@contextmanager
def signals_noted(*numbers: signal.Signals) -> Iterator[list[int]]:
    """To be put around ``trio.run``, in the main thread: signals that come before
    ``trio.open_signal_receiver`` takes them, or after it has given them back, are added to the list
    and do nothing else. What their handlers raise would come out in the middle of trio, which then
    calls itself broken."""
    noted: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _frame: noted.append(number))
        for number in numbers
    }
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
