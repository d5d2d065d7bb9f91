"""What a worker does next, and whether what it was answered is right. No clock, no descriptor."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

from soaklib.area import BLOCK, Area

_MOST = 16  # blocks of one request
READ, WRITE, DURABLE, FLUSH = "read", "write", "fua", "flush"
_KINDS = (READ, WRITE, DURABLE, FLUSH)
_WEIGHTS = (48, 48, 1, 3)  # what is flushed is in no journal: few flushes, and long journals


class Step(NamedTuple):
    """``kind``: one of _KINDS. ``length``: in bytes, of a read. ``data``: of a write."""

    kind: str
    offset: int = 0
    length: int = 0
    data: bytes = b""


class Worker:
    """Requests, one after the other, to an area of its own. ``wrong`` is told what is wrong.
    ``note`` is told of each step, before it and behind it (see ``area.Ledger``)."""

    def __init__(
        self,
        area: Area,
        seed: str,
        wrong: Callable[[str], None],
        note: Callable[[str], None] = lambda _line: None,
    ) -> None:
        self.area = area
        self._chance = random.Random(seed)
        self._wrong = wrong
        self._note = note
        self._first = self._count = 0
        self._covered: list[int] = []

    def next(self) -> Step:
        (kind,) = self._chance.choices(_KINDS, _WEIGHTS)
        count = min(self._chance.choice((1, 1, 1, 2, 4, _MOST)), self.area.blocks)
        return self._step(kind, self._chance.randrange(self.area.blocks - count + 1), count)

    def pause(self) -> float:
        """Seconds before the next step."""
        return self._chance.uniform(0, 0.1)

    def last(self) -> Iterator[Step]:
        """A flush, and all that is there; each step is to be ended before the next."""
        yield self._step(FLUSH, 0, 0)
        yield from self.all()

    def all(self) -> Iterator[Step]:
        for first in range(0, self.area.blocks, _MOST):
            yield self._step(READ, first, min(_MOST, self.area.blocks - first))

    def _step(self, kind: str, first: int, count: int) -> Step:
        area = self.area
        self._first, self._count = first, count
        if kind == FLUSH:
            self._covered = area.acknowledged()
            return Step(FLUSH)
        if kind == READ:
            return Step(READ, area.at(first), count * BLOCK)
        self._note(f"begin {first} {count}")
        return Step(kind, area.at(first), data=area.begin(first, count))

    def ended(self, step: Step, data: bytes = b"") -> None:
        """The step has succeeded; ``data``: what was read."""
        if step.kind == READ:
            if len(data) != step.length:
                self._wrong(f"{len(data)} bytes were read at {step.offset}, not {step.length}")
            for text in self.area.wrong(self._first, data):
                self._wrong(text)
        elif step.kind == FLUSH:
            self.area.was_flushed(self._covered)
            self._note("flushed")
        else:
            durable = step.kind == DURABLE
            self.area.written(self._first, self._count, durable=durable)
            self._note(f"{'durable' if durable else 'written'} {self._first} {self._count}")

    def failed(self, step: Step) -> None:
        if step.kind == FLUSH:
            self.area.may_have_lost()
