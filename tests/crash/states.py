"""What a disk may have on it after a power failure, made of what a store has recorded.

SCSI (SBC-4, 4.15 and SYNCHRONIZE CACHE): what a write has acknowledged before a flush began that
has succeeded is on the medium, and so is a durable write (FUA) that has been acknowledged. Of all
else that has begun each block may be there or not. (Some file systems need more than SCSI promises:
ext4 does not mount when half of its superblock of 1 KiB is an older one. So pieces may be larger.)
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tests.crash.recording import data_of


@dataclass
class Operation:
    """``begin``, ``end``: the numbers of its lines; ``end`` is -1 where it has none."""

    kind: str
    offset: int
    length: int
    data_at: int
    begin: int
    end: int = -1


class Note(NamedTuple):
    line: int
    fields: dict[str, Any]


@dataclass
class Record:
    """``lines``: how many there are. ``flushes``: lines at which one begins or has ended."""

    operations: list[Operation] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    flushes: list[int] = field(default_factory=list)
    lines: int = 0

    def begin(self) -> int:
        """The line at which the workload begins."""
        return next(note.line for note in self.notes if note.fields["what"] == "made")


def read_record(journal: Path) -> Record:
    record = Record()
    under_way: dict[int, Operation] = {}
    with journal.open() as lines:
        for number, line in enumerate(lines):
            kind, _, rest = line.partition(" ")
            if kind == "N":
                record.notes.append(Note(number, json.loads(rest)))
                continue
            words = rest.split()
            if kind == "B":
                offset, length, at = map(int, words[2:5])
                operation = Operation(words[1], offset, length, at, number)
                under_way[int(words[0])] = operation
                record.operations.append(operation)
            else:
                assert kind == "E"
                operation = under_way.pop(int(words[0]))
                operation.end = number
            if operation.kind == "F":
                record.flushes.append(number)
            record.lines = number + 1
    return record


class Medium:
    """What is certainly on the medium, and what may be there, at a line that only moves on.
    ``base``: a sparse file."""

    def __init__(self, record: Record, journal: Path, base: Path, size: int) -> None:
        self.base = base
        self._record = record
        self._data = os.open(data_of(journal), os.O_RDONLY | os.O_CLOEXEC)
        self._base = os.open(base, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._base, size)
        self._next = 0  # of the operations
        self.pending: list[Operation] = []

    def close(self) -> None:
        os.close(self._data)
        os.close(self._base)

    def move(self, line: int) -> None:
        """To the moment before this line."""
        operations = self._record.operations
        flushed = max(
            (each.begin for each in operations if each.kind == "F" and 0 <= each.end < line),
            default=-1,
        )
        while self._next < len(operations) and operations[self._next].begin < line:
            if operations[self._next].kind != "F":
                self.pending.append(operations[self._next])
            self._next += 1
        left = []
        for each in self.pending:
            if 0 <= each.end < flushed:
                self.apply(self._base, each, 0, each.length)
            else:
                left.append(each)
        self.pending = left

    def is_certain(self, operation: Operation, line: int) -> bool:
        """Of a pending one: those before it that it covers are superseded, all the same."""
        return operation.kind == "D" and 0 <= operation.end < line

    def apply(self, fd: int, operation: Operation, start: int, stop: int) -> None:
        """Bytes ``start`` to ``stop`` of an operation."""
        if operation.kind == "Z":
            data = bytes(stop - start)
        else:
            data = os.pread(self._data, stop - start, operation.data_at + start)
        assert len(data) == stop - start
        os.pwrite(fd, data, operation.offset + start)

    def states(self, line: int, chance: random.Random, samples: int, piece: int) -> Iterator[State]:
        """At the moment before ``line``: with nothing of what is pending, with all of it, and
        ``samples`` times with some of it: some of the operations, or some of their pieces of
        ``piece`` bytes, which are aligned."""
        self.move(line)
        maybe = [each for each in self.pending if not self.is_certain(each, line)]
        yield State(self, line, "all", None, piece)
        if not maybe:
            return
        yield State(self, line, "none", set(), piece)
        for number in range(samples):
            share = chance.random()
            if number % 2:
                chosen = {
                    (id(each), at)
                    for each in maybe
                    for at, _ in pieces(each, piece)
                    if chance.random() < share
                }
            else:
                chosen = {
                    (id(each), at)
                    for each in maybe
                    if chance.random() < share
                    for at, _ in pieces(each, piece)
                }
            yield State(self, line, f"some {number}", chosen, piece)


def pieces(operation: Operation, piece: int) -> Iterator[tuple[int, int]]:
    """Where in an operation its aligned pieces of ``piece`` bytes, and the parts of such at both
    ends, begin and end."""
    at = 0
    while at < operation.length:
        stop = min(operation.length, at + piece - (operation.offset + at) % piece)
        yield at, stop
        at = stop


@dataclass
class State:
    """``chosen``: which pieces of which pending operations are there; None: all of them."""

    medium: Medium
    line: int
    name: str
    chosen: set[tuple[int, int]] | None
    piece: int

    def write(self, image: Path) -> None:
        """Make the disk. ``image`` is replaced."""
        copy_sparse(self.medium.base, image)
        fd = os.open(image, os.O_RDWR | os.O_CLOEXEC)
        try:
            for each in self.medium.pending:
                if self.chosen is None or self.medium.is_certain(each, self.line):
                    self.medium.apply(fd, each, 0, each.length)
                    continue
                for at, stop in pieces(each, self.piece):
                    if (id(each), at) in self.chosen:
                        self.medium.apply(fd, each, at, stop)
        finally:
            os.close(fd)

    def __str__(self) -> str:
        return f"line {self.line}, {self.name} of {len(self.medium.pending)} pending operations"


def copy_sparse(source: Path, target: Path) -> None:
    with source.open("rb") as old, target.open("wb") as new:
        size = os.fstat(old.fileno()).st_size
        new.truncate(size)
        at = 0
        while at < size:
            try:
                at = os.lseek(old.fileno(), at, os.SEEK_DATA)
            except OSError:
                return
            stop = os.lseek(old.fileno(), at, os.SEEK_HOLE)
            while at < stop:
                count = os.copy_file_range(old.fileno(), new.fileno(), stop - at, at, at)
                assert count
                at += count
