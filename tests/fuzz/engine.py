"""Random and mutated byte sequences, by the million: a plain seeded mutator, far quicker than
hypothesis, which drives the smaller and cleverer tests beside each decoder.

Every case is made from (seed, number) alone, so a single case can be run again:

    ISERBLK_FUZZ=SEED:NUMBER scripts/test tests/fuzz -k ROW
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

from iserblk.errors import RemoteProtocolError

REPLAY = "ISERBLK_FUZZ"
MOST_BYTES = 4096
_STEP = 0x9E3779B97F4A7C15
EDGES = (0, 1, 2, 3, 4, 7, 8, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000,
          0xFFFFFFFE, 0xFFFFFFFF, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)  # fmt: skip

Mutate = Callable[[bytes], bytes]


class Case:
    """What one case has to decide by. ``chance``: seeded for it. ``data``: its bytes."""

    __slots__ = ("_samples", "chance")

    def __init__(self, chance: random.Random, samples: Sequence[bytes]) -> None:
        self.chance = chance
        self._samples = samples

    @property
    def data(self) -> bytes:
        """Fresh bytes at each look: random ones, or a sample with up to four changes."""
        chance = self.chance
        if not self._samples or chance.random() < 0.1:
            return chance.randbytes(int(chance.random() ** 2 * 300))
        return self.mutated(chance.choice(self._samples))

    def mutated(self, sample: bytes) -> bytes:
        chance = self.chance
        data = bytearray(sample)
        for _ in range(int(chance.random() * 5)):
            self._change(data)
        return bytes(data[:MOST_BYTES])

    def _change(self, data: bytearray) -> None:
        chance = self.chance
        size = len(data)
        if not size:
            data += chance.randbytes(4)
            return
        kind = int(chance.random() * 8)
        at = int(chance.random() * size)
        if kind < 2:
            data[at] ^= 1 << int(chance.random() * 8)
        elif kind == 2:
            data[at] = int(chance.random() * 256)
        elif kind == 3:  # a number at the edge of what a field holds
            width = chance.choice((1, 2, 3, 4, 8))
            value = chance.choice(EDGES) & ((1 << 8 * width) - 1)
            data[at : at + width] = value.to_bytes(width, "big")
        elif kind == 4:
            del data[at:]
        elif kind == 5:
            data[at:at] = chance.randbytes(int(chance.random() * 16))
        elif kind == 6:
            end = at + 1 + int(chance.random() * 16)
            del data[at:end]
        else:  # the head of this one, the tail of another
            other = chance.choice(self._samples) if self._samples else bytes(size)
            data[at:] = other[int(chance.random() * (len(other) + 1)) :]


class EdgeCase(Case):
    """Bytes that have one number each: ``width`` bytes at ``at`` are ``value``. What a row chooses
    by chance is the same in each run."""

    __slots__ = ("at", "value", "width")

    def __init__(self, samples: Sequence[bytes]) -> None:
        super().__init__(random.Random(0), samples)
        self.at = self.width = self.value = 0

    @property
    def data(self) -> bytes:
        return self.mutated(self.chance.choice(self._samples))

    def mutated(self, sample: bytes) -> bytes:
        data = bytearray(sample)
        end = self.at + self.width
        if end <= len(data):
            data[self.at : end] = self.value.to_bytes(self.width, "big")
        return bytes(data)


class Row(NamedTuple):
    """``run`` takes a case and may raise ``allowed``, nothing else. ``each``: byte sequences that
    one case feeds."""

    name: str
    run: Callable[[Case], None]
    samples: Sequence[bytes] = ()
    allowed: tuple[type[Exception], ...] = (RemoteProtocolError,)
    each: int = 1


def decoder(
    name: str,
    decode: Callable[[bytes], object],
    *samples: bytes,
    allowed: tuple[type[Exception], ...] = (RemoteProtocolError,),
) -> Row:
    """A row of a plain function of bytes."""
    return Row(name, lambda case: (decode(case.data), None)[1], samples, allowed)


def fresh_seed() -> int:
    return int.from_bytes(os.urandom(4), "big")


def run(row: Row, sequences: int, seed: int | None = None, first: int = 0) -> None:
    """``sequences`` byte sequences, from the case ``first`` on. Fails with what it takes to run the
    failing case again."""
    replay = os.environ.get(REPLAY)
    count = max(1, sequences // row.each)
    if replay:
        words = replay.partition(":")
        seed, first, count = int(words[0], 0), int(words[2] or "0", 0), 1 if words[2] else count
    elif seed is None:
        seed = fresh_seed()
    chance = random.Random()
    case = Case(chance, row.samples)
    allowed = row.allowed
    for number in range(first, first + count):
        chance.seed((seed << 64) ^ (number * _STEP))
        try:
            row.run(case)
        except allowed:
            pass
        except Exception as error:
            raise AssertionError(
                f"{row.name}: {type(error).__name__}: {error}; again with {REPLAY}={seed}:{number}"
            ) from error
