"""A store that records what is done to it, in order. The order is the kernel's: the target and the
workload append their lines to one file (O_APPEND), so no clock is compared with another.

    B <number> <kind> <offset> <length> <data at>    an operation begins
    E <number> <kind>                                it has succeeded; X: it has done nothing
    N <JSON>                                         a note of the workload

Kinds: W write, D durable write (FUA), Z zeroes (unmapped, punched or zeroed), F flush. The bytes of
writes are in a second file. A line is there before the operation begins, and another when it has
ended, before its initiator hears of that.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from iserblk.target.store.store import Extent, OnLoss, Store, no_loss

MARK = b"content!"  # what the workload writes into files begins with it
FAULTS = ("flush", "write")


class Journal:
    """The lines, for one writer."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def say(self, *words: object) -> None:
        os.write(self._fd, (" ".join(map(str, words)) + "\n").encode())

    def note(self, **fields: Any) -> None:
        self.say("N", json.dumps(fields))

    def close(self) -> None:
        os.close(self._fd)


def data_of(journal: Path) -> Path:
    return journal.with_suffix(".data")


class RecordingStore:
    """Implements Store over another store, which it owns."""

    def __init__(self, store: Store, journal: Path) -> None:
        self.size = store.size
        self.on_loss: OnLoss = no_loss
        store.on_loss = self._lost
        self._store = store
        self._journal = Journal(journal)
        self._data = os.open(data_of(journal), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._lock = threading.Lock()
        self._number = 0
        self._at = 0

    def _lost(self, error: OSError) -> None:
        self.on_loss(error)

    @contextmanager
    def _recorded(
        self, kind: str, offset: int = 0, length: int = 0, data: memoryview | None = None
    ) -> Iterator[None]:
        with self._lock:
            self._number += 1
            number, at = self._number, self._at
            self._at += 0 if data is None else len(data)
        if data is not None:
            os.pwrite(self._data, data, at)
        self._journal.say("B", number, kind, offset, length, at)
        yield  # an operation that raises has no end: what it did is not known
        self._journal.say("E", number, kind)

    def read_into(self, buffer: memoryview, offset: int, nowait: bool) -> bool:
        return self._store.read_into(buffer, offset, nowait)

    def write(self, data: memoryview, offset: int, durable: bool, nowait: bool) -> bool:
        if nowait:
            return False  # so each write is begun once
        with self._recorded("D" if durable else "W", offset, len(data), data):
            self._store.write(data, offset, durable, False)
        return True

    def flush(self) -> None:
        with self._recorded("F"):
            self._store.flush()

    def unmap(self, offset: int, length: int) -> None:
        with self._recorded("Z", offset, length):
            self._store.unmap(offset, length)

    def punch(self, offset: int, length: int) -> None:
        with self._recorded("Z", offset, length):
            self._store.punch(offset, length)

    def zero(self, offset: int, length: int) -> None:
        with self._recorded("Z", offset, length):
            self._store.zero(offset, length)

    def extents(self, offset: int, length: int, limit: int) -> list[Extent]:
        return self._store.extents(offset, length, limit)

    def prefetch(self, offset: int, length: int) -> None:
        self._store.prefetch(offset, length)

    def usage(self) -> tuple[int, int] | None:
        return self._store.usage()

    def measure(self) -> int:
        self.size = self._store.measure()
        return self.size

    def close(self) -> None:
        self._store.close()
        self._journal.close()
        os.close(self._data)


class FaultyStore(RecordingStore):
    """Has a planted fault. ``flush``: each third flush is acknowledged and not carried out, once
    there was content. ``write``: so is each fourth write of content."""

    def __init__(self, store: Store, journal: Path, fault: str) -> None:
        assert fault in FAULTS
        super().__init__(store, journal)
        self._fault = fault
        self._flushes = self._writes = 0

    def write(self, data: memoryview, offset: int, durable: bool, nowait: bool) -> bool:
        if nowait:
            return False
        if MARK in bytes(data):
            self._writes += 1
            if self._fault == "write" and self._writes % 4 == 0:
                return True
        return super().write(data, offset, durable, nowait)

    def flush(self) -> None:
        if self._writes and self._fault == "flush":
            self._flushes += 1
            if self._flushes % 3 == 0:
                return
        super().flush()


def recorded(store: Store, words: str) -> RecordingStore:
    """``words``: the path of the journal, and a fault, with a colon between them."""
    path, _, fault = words.partition(":")
    return FaultyStore(store, Path(path), fault) if fault else RecordingStore(store, Path(path))
