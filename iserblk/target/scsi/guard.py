"""What keeps COMPARE AND WRITE atomic: writers of other tasks stay out of its blocks.

Writers do not exclude each other. Readers are not kept out: a READ that runs beside a COMPARE AND
WRITE sees each block before or after it, as it would on any other cached device.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

Span = tuple[int, int]  # first byte, byte behind the last


def _overlaps(spans: list[Span], span: Span) -> bool:
    start, stop = span
    return any(start < high and low < stop for low, high in spans)


class RangeGuard:
    """The spans of one LUN that are being written. Thread-safe."""

    __slots__ = ("_changed", "_exclusive", "_lock", "_waiting", "_writers")

    def __init__(self) -> None:
        self._lock = threading.Lock()  # taken directly: the condition's own entry costs 0.4 µs
        self._changed = threading.Condition(self._lock)
        self._writers: list[Span] = []
        self._exclusive: list[Span] = []
        self._waiting = 0

    def enter(self, span: Span, nowait: bool) -> bool:
        """A writer begins; ``leave`` ends it. False, only with ``nowait``: it would have to wait
        for an exclusive one."""
        with self._lock:
            while self._exclusive and _overlaps(self._exclusive, span):
                if nowait:
                    return False
                self._wait()
            self._writers.append(span)
        return True

    def leave(self, span: Span) -> None:
        with self._lock:
            self._writers.remove(span)
            if self._waiting:
                self._changed.notify_all()

    @contextmanager
    def exclusive(self, span: Span) -> Iterator[None]:
        """Nobody else writes to the span inside the block. Waits for those who do."""
        with self._lock:
            while _overlaps(self._exclusive, span):
                self._wait()
            # Announced before the writers are waited for: no new one overtakes us for ever.
            self._exclusive.append(span)
            while _overlaps(self._writers, span):
                self._wait()
        try:
            yield
        finally:
            with self._lock:
                self._exclusive.remove(span)
                self._changed.notify_all()

    def _wait(self) -> None:
        self._waiting += 1
        try:
            self._changed.wait()
        finally:
            self._waiting -= 1
