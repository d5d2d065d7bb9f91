"""One byte string decides all that a case decides: for a fuzzer that is guided by coverage.

An input is bytes, SEPARATOR, bytes, SEPARATOR, …, decisions: ``Case.data`` has one part after the
other, and ``Case.chance`` takes its numbers from the last one. Without a SEPARATOR the input is
both. What an input has too little of is empty, and zero: so there is no other place where a fuzzer
would have to look for what reaches new code.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from iserblk.datamover.iser import HEADER_LENGTH
from tests.fuzz import rows_iscsi, rows_stack
from tests.fuzz.engine import EDGES, MOST_BYTES, Case, Row
from tests.interop.wire import messages
from tests.rcap import streams

SEPARATOR = b"\xf5\xf6|"  # in no text
MOST_INPUT = 4 * MOST_BYTES
_ZEROES = 1 << 14
_DECISION_BYTES = 100
_DECISIONS = 12  # seeds with decisions, of a row that has any
_WORD = re.compile(rb"[A-Za-z][A-Za-z0-9_.-]{2,30}")


class Decisions(random.Random):
    """Numbers from ``data``; behind its end zeroes, and in the end, so that no loop waits for
    another number for ever, those of a generator with a fixed seed."""

    def __init__(self, data: bytes) -> None:
        super().__init__(0)
        self._data = data + bytes(_ZEROES)
        self._at = 0

    def _take(self, size: int) -> bytes | None:
        at = self._at
        if at + size > len(self._data):
            return None
        self._at = at + size
        return self._data[at : at + size]

    def random(self) -> float:
        taken = self._take(2)
        return super().random() if taken is None else int.from_bytes(taken, "big") / 65536

    def getrandbits(self, k: int, /) -> int:
        taken = self._take(-(-k // 8))
        if taken is None:
            return super().getrandbits(k)
        return int.from_bytes(taken, "big") >> -k % 8

    def seed(self, *arguments: Any, **names: Any) -> None:
        super().seed(0)


class GuidedCase(Case):
    __slots__ = ("_parts",)

    def __init__(self, data: bytes, row: Row) -> None:
        *parts, decisions = data.split(SEPARATOR)
        super().__init__(Decisions(decisions), row.samples)
        self._parts = parts[::-1] or [decisions]

    @property
    def data(self) -> bytes:
        return self._parts.pop()[:MOST_BYTES] if self._parts else b""


def run_input(row: Row, data: bytes) -> None:
    """Raises what the row must not raise."""
    with suppress(*row.allowed):
        row.run(GuidedCase(data, row))


def seeds(row: Row) -> Iterator[bytes]:
    """Inputs to begin with: the samples of the row, what other implementations have sent, in its
    order, and decisions."""
    yield b""
    samples = [sample[:MOST_BYTES] for sample in row.samples]
    captures = captured() if row in rows_iscsi.ROWS or row in rows_stack.ROWS else []
    chance = random.Random(43)
    if row.each == 1:
        yield from (*samples, *captures)
    else:
        for at in range(0, len(captures), row.each):
            parts = captures[at : at + row.each]
            yield SEPARATOR.join((*parts, chance.randbytes(_DECISION_BYTES)))[:MOST_INPUT]
    for _ in range(_DECISIONS):
        parts = chance.choices(samples, k=min(row.each, 3)) if samples else []
        yield SEPARATOR.join((*parts, chance.randbytes(chance.randrange(16, 4 * _DECISION_BYTES))))


def captured() -> list[bytes]:
    """What the captured conversations consist of (tests/vectors/streams): MPA frames, DDP messages
    and the PDUs in them, each of them once."""
    found: dict[bytes, None] = {}
    for name in streams.names():
        if streams.is_mpa(name) or name == streams.BAD_CRC:
            found[streams.read(name)[:MOST_BYTES]] = None
            continue
        for message in messages(name):
            payload = message.payload[:MOST_BYTES]
            found[payload] = found[payload[HEADER_LENGTH:]] = None
    return list(found)


def dictionary(row: Row) -> list[bytes]:
    """What an input may have in it: words of the samples, and numbers at the edge of fields."""
    words = {SEPARATOR}
    for sample in row.samples:
        words |= set(_WORD.findall(sample))
    for width in (2, 4, 8):
        words |= {number.to_bytes(width, "big") for number in EDGES if not number >> 8 * width}
    return sorted(words)
