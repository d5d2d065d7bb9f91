"""Locks of block ranges that make COMPARE AND WRITE atomic: no other task writes its blocks.

Other writers do not exclude each other. Readers take no lock: a READ at the same time as a COMPARE
AND WRITE sees each block as it was before or after, as on any other device with a cache.
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
        """Begin a write to ``span``; end it with ``leave``. Waits for an exclusive writer. False,
        only with ``nowait``: the caller would have to wait, and has not entered."""
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
        """Write to ``span`` alone inside the block. Waits until other writers of it have ended."""
        with self._lock:
            while _overlaps(self._exclusive, span):
                self._wait()
            # First announce, then wait for the writers: so no new writer can enter before us.
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
