"""A queue pair that always has more, as that of a peer which keeps its socket full."""

from __future__ import annotations

from typing import Any

ENDLESS = 1 << 40


class Restless:
    """Another queue pair, whose ``next_deadline`` says for ``lasts`` calls of ``progress`` that
    there is more. ``turns``: those calls."""

    def __init__(self, pair: Any, lasts: int = ENDLESS) -> None:
        self._pair = pair
        self.lasts = lasts
        self.turns = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pair, name)

    def progress(self, now: float) -> Any:
        self.turns += 1
        return self._pair.progress(now)

    def next_deadline(self) -> float | None:
        return 0.0 if self.turns < self.lasts else None
