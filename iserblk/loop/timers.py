"""Functions that are due at some time. Reads no clock."""

from __future__ import annotations

import math
from collections.abc import Callable
from heapq import heapify, heappop, heappush

FEW = 64  # cancelled timers that stay, whatever their share


class Timer:
    """See ``seam.Timer``."""

    __slots__ = ("_number", "_timers", "function", "queued", "when")

    def __init__(
        self, timers: Timers, when: float, number: int, function: Callable[[], object]
    ) -> None:
        self._timers = timers
        self._number = number
        self.queued = True
        self.when = when
        self.function: Callable[[], object] | None = function  # None: cancelled, or called

    def __lt__(self, other: Timer) -> bool:
        if self.when != other.when:
            return self.when < other.when
        return self._number < other._number

    def cancel(self) -> None:
        if self.function is not None:
            self.function = None
            if self.queued:
                self._timers.cancelled()


class Timers:
    """By time, and those of one time in the order in which they were added.

    ``first``: when the first is due; math.inf: there is none."""

    def __init__(self) -> None:
        self.first = math.inf
        self._heap: list[Timer] = []  # never begins with one that is cancelled
        self._made = 0
        self._dead = 0  # entries of the heap that are cancelled

    def __len__(self) -> int:
        """Those that are not cancelled."""
        return len(self._heap) - self._dead

    @property
    def kept(self) -> int:
        """With those that are cancelled, as far as they take memory."""
        return len(self._heap)

    def add(self, when: float, function: Callable[[], object]) -> Timer:
        self._made += 1
        timer = Timer(self, when, self._made, function)
        heappush(self._heap, timer)
        self.first = self._heap[0].when
        return timer

    def due(self, now: float) -> list[Timer]:
        """Take out those that are due. Each may be cancelled by one before it: the caller looks at
        its ``function`` only then, and sets it to None."""
        found: list[Timer] = []
        while self.first <= now:
            timer = heappop(self._heap)
            timer.queued = False
            found.append(timer)
            self._look()
        return found

    def run(self, now: float) -> None:
        """Call the functions that are due. Raises what one raises: the others are called by the
        next call."""
        due = self.due(now)
        for number, timer in enumerate(due):
            function, timer.function = timer.function, None
            if function is not None:
                try:
                    function()
                except BaseException:
                    for each in due[number + 1 :]:
                        if each.function is not None:
                            each.queued = True
                            heappush(self._heap, each)
                    self._look()
                    raise

    def cancelled(self) -> None:
        """See ``Timer.cancel``."""
        self._dead += 1
        # Deadlines are set for each request, and nearly all are cancelled.
        if self._dead > FEW and self._dead > len(self._heap) // 2:
            self._heap = [each for each in self._heap if each.function is not None]
            heapify(self._heap)
            self._dead = 0
        self._look()

    def _look(self) -> None:
        """Which is the first."""
        heap = self._heap
        while heap and heap[0].function is None:
            heappop(heap)
            self._dead -= 1
        self.first = heap[0].when if heap else math.inf
