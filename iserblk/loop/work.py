"""Work for the threads of a loop, and how much of it may be done at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

Function = Callable[[], object]
Ended = Callable[["BaseException | None"], object]
"""Called with what the work has raised, or None."""


def nothing() -> None:
    """A function that has nothing to do any more."""


class Limit:
    """How many threads may do one kind of work at a time, such as the commands of one LUN: what a
    disk that hangs keeps waiting. ``busy``: how many do now. ``queue``: what waits for one. Belongs
    to one loop."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.busy = 0
        self.queue: deque[Job] = deque()

    @property
    def waiting(self) -> int:
        return len(self.queue)


Job = tuple[Function, Ended, Limit]
