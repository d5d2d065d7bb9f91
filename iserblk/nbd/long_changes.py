"""Ranges of an export that are being zeroed or trimmed in many steps, each with its own time.

A client may ask again before it has its answer, over another connection or a new one. What is left
of the first request must not come behind a write that the client sends after the answer to the
second. So nothing else changes such a range before the request has ended.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from iserblk.loop import strands

LONG = 32 << 20  # bytes: what is larger is carried out in many steps


class LongChanges:
    """Those of one export. ``under_way``: there are some."""

    def __init__(self) -> None:
        self.under_way = False
        self._ranges: list[tuple[int, int]] = []  # first byte, and that behind the last
        self._waiting: list[strands.Strand] = []

    def concern(self, offset: int, length: int) -> bool:
        """One of them changes a part of this range."""
        return _concerned(self._ranges, offset, length)

    async def let_end(self, offset: int, length: int) -> None:
        """In a strand: wait while one of them changes a part of this range."""
        while self.concern(offset, length):
            strand = strands.here().running
            assert strand is not None
            self._waiting.append(strand)
            try:
                await strands.park()
            finally:
                if strand in self._waiting:  # it is being closed
                    self._waiting.remove(strand)

    @contextmanager
    def one(self, offset: int, length: int) -> Iterator[None]:
        """While the context is open, the range is being changed."""
        mine = (offset, offset + length)
        self._ranges.append(mine)
        self.under_way = True
        try:
            yield
        finally:
            self._ranges.remove(mine)
            self.under_way = bool(self._ranges)
            waiting, self._waiting = self._waiting, []
            for strand in waiting:
                strand.wake()


class LongChangesOfThreads:
    """The same for a server with threads. ``under_way``: there are some."""

    def __init__(self) -> None:
        self.under_way = False
        self._ranges: list[tuple[int, int]] = []
        self._changed = threading.Condition()

    def let_end(self, offset: int, length: int) -> None:
        """Wait while one of them changes a part of this range."""
        with self._changed:
            self._changed.wait_for(lambda: not _concerned(self._ranges, offset, length))

    @contextmanager
    def one(self, offset: int, length: int) -> Iterator[None]:
        """Wait as ``let_end`` does; while the context is open, the range is being changed."""
        mine = (offset, offset + length)
        with self._changed:
            self._changed.wait_for(lambda: not _concerned(self._ranges, offset, length))
            self._ranges.append(mine)
            self.under_way = True
        try:
            yield
        finally:
            with self._changed:
                self._ranges.remove(mine)
                self.under_way = bool(self._ranges)
                self._changed.notify_all()


def _concerned(ranges: list[tuple[int, int]], offset: int, length: int) -> bool:
    return any(offset < end and first < offset + length for first, end in ranges)
