"""A trio task waits for the signals that end its process."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import trio

from iserblk.endings import Endings, ending_signals


class UntilTold:
    """One task waits until ``endings`` have changed. ``first`` is that of ``endings``."""

    def __init__(self, numbers: tuple[signal.Signals, ...]) -> None:
        self.endings = Endings(numbers, self._told)
        self._token: trio.lowlevel.TrioToken | None = None  # of the loop in which the task waits
        self._changed = trio.Event()

    @property
    def first(self) -> int:
        return self.endings.first

    async def begun(self) -> int:
        """Wait for the first signal; return its number."""
        await self._until(lambda: self.endings.first != 0)
        return self.endings.first

    async def lost_patience(self) -> None:
        """Wait for the signal by which the user loses patience."""
        await self._until(lambda: self.endings.impatient)

    async def _until(self, come: Callable[[], bool]) -> None:
        self._token = trio.lowlevel.current_trio_token()
        while not come():
            # ``_wake`` runs in the loop: it cannot come between the look and the wait.
            self._changed = trio.Event()
            if not come():
                await self._changed.wait()

    def _told(self, _number: int) -> None:
        if self._token is not None:
            with suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._wake)

    def _wake(self) -> None:
        self._changed.set()


@contextmanager
def until_told(*, hangup: bool = True) -> Iterator[UntilTold]:
    """While this context is open, the signals that end the process are only noted. Once one has
    come, the end has begun, and is not to be interrupted: afterwards they are ignored.

    To be put around ``trio.run``, in the main thread: handlers that raise would do so inside trio's
    own code, and trio would report an internal error. ``hangup``: see ``ending_signals``.
    """
    numbers = ending_signals(hangup=hangup)
    before = {number: signal.getsignal(number) for number in numbers}
    told = UntilTold(numbers)
    told.endings.listen()
    try:
        yield told
    finally:
        if told.first:
            told.endings.ignore()
        else:
            for number, handler in before.items():
                signal.signal(number, handler)
