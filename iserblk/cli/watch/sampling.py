"""Looks at the machine while the exporter's page is being watched, and only then.

The first request begins with two looks, a second apart, so that a page that is loaded once has
rates. Further requests, of any number of browsers, get what the last look has found. When none has
come for KEEP_S seconds, looking ends; what was found is kept, and events of the time between show
with the next look.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio

from iserblk.cli.watch.history import History, Look
from iserblk.loop.clock import processor_seconds
from iserblk.loop.tasks import sleep, task_time

FIRST_S = 1.0  # between the first two looks
EVERY_S = 2.0
KEEP_S = 60.0
WAIT_S = 5.0  # for the second look; a process that hangs makes looks long
_SHARE = 9  # a look may take one part of so many and one of a processor


class Sampling:
    """``history``: what has been found. Run ``run`` beside what calls ``current``."""

    def __init__(self, look: Callable[[], Awaitable[Look]]) -> None:
        self.history = History()
        self._look = look
        self._asked = float("-inf")
        self._wanted = trio.Event()
        self._looks = 0  # since looking began; 0: it rests
        self._next = trio.Event()

    async def current(self) -> History:
        """The history, with a look of just now."""
        self._asked = task_time()
        self._wanted.set()
        while self._looks == 0:
            await self._next.wait()
        with trio.move_on_after(WAIT_S):
            while self._looks == 1:
                await self._next.wait()
        return self.history

    async def run(self) -> None:
        """Look, as long as ``current`` is called; until cancelled."""
        while True:
            await self._wanted.wait()
            self._wanted = trio.Event()
            while task_time() - self._asked < KEEP_S:
                used = processor_seconds()
                self.history.add(await self._look())
                used = processor_seconds() - used
                self._looks += 1
                self._next.set()
                self._next = trio.Event()
                pause = FIRST_S if self._looks == 1 else EVERY_S
                await sleep(max(pause, _SHARE * used))
            self._looks = 0
