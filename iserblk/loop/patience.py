"""Time-outs that count only the time in which this process runs.

trio ends a wait by the clock. Where the process was stopped for longer than that, or a task blocked
the loop, the peer's answer has long come, and is not looked at any more: what was our own silence
counts as the peer's. Here no step of the clock counts for more than SLICE_S and what a busy machine
takes; so a wait that outlasts such a stop goes on, and takes in what has come meanwhile.

A task of trio's own counts for all waits of its loop; there is none while nothing waits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import trio

from iserblk.loop.tasks import task_time

SLICE_S = 0.5  # between two looks at the clock, at most
NOTHING_S = 1e-6  # less than this is what rounding leaves
BUSY_S = 0.5  # that a look may be late, and counts all the same


class Patience:
    """``left``: seconds for waits to come; they may be several, one after the other."""

    def __init__(self, seconds: float) -> None:
        self.left = seconds

    @contextmanager
    def limit(self) -> Iterator[trio.CancelScope]:
        """Cancel the body when no time is left; see ``cancelled_caught`` of the scope."""
        with trio.CancelScope() as scope:
            if self.left == math.inf:
                yield scope
                return
            counter = _counter()
            counter.add(self, scope)
            try:
                yield scope
            finally:
                counter.remove(self)

    @contextmanager
    def required(self) -> Iterator[trio.CancelScope]:
        """As ``limit``; raises trio.TooSlowError where the body was cancelled."""
        with self.limit() as scope:
            yield scope
        if scope.cancelled_caught:
            raise trio.TooSlowError


def move_on_after(seconds: float) -> AbstractContextManager[trio.CancelScope]:
    return Patience(seconds).limit()


def fail_after(seconds: float) -> AbstractContextManager[trio.CancelScope]:
    return Patience(seconds).required()


class _Counter:
    """Of one loop. ``_since``: up to when the time of each wait has been counted."""

    def __init__(self) -> None:
        self._scopes: dict[Patience, trio.CancelScope] = {}
        self._since: dict[Patience, float] = {}
        self._changed = trio.Event()
        self._runs = False

    def add(self, patience: Patience, scope: trio.CancelScope) -> None:
        self._scopes[patience] = scope
        self._since[patience] = task_time()
        self._changed.set()
        if not self._runs:
            self._runs = True
            trio.lowlevel.spawn_system_task(self._run, name="count time-outs")

    def remove(self, patience: Patience) -> None:
        self._count(patience, task_time(), SLICE_S)
        del self._scopes[patience], self._since[patience]
        self._changed.set()

    async def _run(self) -> None:
        try:
            while self._scopes:
                self._changed = trio.Event()
                # (What was cancelled may take its time to end: it asks for no look any more.)
                waits = [
                    each.left for each, scope in self._scopes.items() if not scope.cancel_called
                ]
                pause = min([SLICE_S, *waits])
                with trio.move_on_after(max(0.0, pause)):
                    await self._changed.wait()
                now = task_time()
                for patience, scope in self._scopes.items():
                    self._count(patience, now, pause)
                    if patience.left <= NOTHING_S:
                        scope.cancel()
        finally:
            self._runs = False

    def _count(self, patience: Patience, now: float, pause: float) -> None:
        patience.left -= min(now - self._since[patience], pause + BUSY_S)
        self._since[patience] = now


_counters: trio.lowlevel.RunVar[_Counter] = trio.lowlevel.RunVar("iserblk.loop.patience")


def _counter() -> _Counter:
    try:
        return _counters.get()
    except LookupError:
        made = _Counter()
        _counters.set(made)
        return made
