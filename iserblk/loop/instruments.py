"""What trio calls before it waits, for a class that is compiled.

trio takes an instrument for one if it is of its own class, which a compiled class cannot derive
from.
"""

from __future__ import annotations

from collections.abc import Callable

import trio


class BeforeWait(trio.abc.Instrument):
    """Calls ``function`` before each wait of the loop, with the time of that wait in seconds. 0: a
    task can run. ``scheduled``: one was made able to run since the owner has set this to False."""

    def __init__(self, function: Callable[[float], None]) -> None:
        self.scheduled = False
        self._function = function

    def task_scheduled(self, task: trio.lowlevel.Task) -> None:
        self.scheduled = True

    @trio.lowlevel.enable_ki_protection  # an interrupt would lose what ``function`` has taken
    def before_io_wait(self, timeout: float) -> None:
        self._function(timeout)
