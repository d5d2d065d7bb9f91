"""Whether a trio loop sleeps."""

from __future__ import annotations

import trio


class Sleeps(trio.abc.Instrument):
    """Counts the polls of the loop."""

    def __init__(self) -> None:
        self.looked = self.slept = 0

    def before_io_wait(self, timeout: float) -> None:
        if timeout > 0:
            self.slept += 1
        else:
            self.looked += 1
