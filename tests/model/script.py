"""What a run does: steps as plain data, which hypothesis can shrink and a seed can make."""

from __future__ import annotations

import random
from typing import NamedTuple

GRANULES = 2048  # 1 MiB
MOST = 96  # granules of one operation

READ, WRITE, ZERO, TRIM, EXTENTS, FLUSH = (
    "read", "write", "zero", "trim", "extents", "flush"
)  # fmt: skip


class Op(NamedTuple):
    kind: str
    granule: int
    count: int  # type: ignore[assignment]
    fua: bool = False


class Fault(NamedTuple):
    """``kind``: "rst", "fin", "hole", "delay", "sips" (the connection as a whole); with "up" or
    "down" behind it "after", "truncate" (``amount`` bytes from now), "corrupt", and what breaks
    TCP's promises: "drop", "twice", "swap" (a PDU, soon). "refuse", "outage": nobody listens for
    ``amount`` ms. "crash": the target comes back with its cache; "power": without, but for what
    has happened to be written back.

    Of the target in this process alone: "turn": its write cache is switched on or off; "blink": it
    loses what is in there, and no connection. The next
    ``amount`` commands end with what passes ("passing"), or with RECOVERED ERROR, carried out
    ("recovered"); so many flushes fail ("flush"); the connection breaks, and so many of the
    questions that follow end with what passes ("identify")."""

    kind: str
    amount: int = 0


class Group(NamedTuple):
    """Operations that run at once, or begin within ``spread`` ms. The fault strikes when ``after``
    of them are done."""

    ops: tuple[Op, ...]
    fault: Fault | None = None
    after: int = 0
    spread: int = 0


class Flush(NamedTuple):
    fault: Fault | None = None


class Reopen(NamedTuple):
    """The client goes away, the target loses its cache, another client comes."""


Step = Group | Flush | Reopen


def random_op(chance: random.Random) -> Op:
    kind = chance.choices((READ, WRITE, ZERO, TRIM, EXTENTS, FLUSH), (20, 20, 2, 2, 2, 1))[0]
    count = chance.choice((1, 1, 2, 8, 8, 17, chance.randint(1, MOST)))
    granule = chance.randrange(GRANULES - count)
    if chance.random() < 0.5:  # whole blocks of 4 KiB
        granule, count = granule & ~7, max(8, count & ~7)
    return Op(kind, granule, count, chance.random() < 0.05)


Weights = dict[str, int]
SHORT: Weights = {"rst": 4, "fin": 4, "after up": 5, "after down": 5, "truncate up": 2,
                  "truncate down": 2, "refuse": 2, "delay": 1, "sips": 1, "crash": 3,
                  "power": 4}  # fmt: skip
# Where checksums tell.
CHECKED: Weights = {**SHORT, "corrupt up": 4, "corrupt down": 4}
# Of a target in this process.
TROUBLED: Weights = {**SHORT, "passing": 6, "identify": 6, "recovered": 6, "flush": 6, "turn": 8,
                     "blink": 6}  # fmt: skip
# Also what takes longer than an io-timeout of a second.
TOO_LONG: Weights = {**SHORT, "outage": 4, "hole": 3}
BROKEN: Weights = {
    f"{kind} {way}": 1 for kind in ("drop", "twice", "swap") for way in ("up", "down")
}


def random_fault(chance: random.Random, weights: Weights) -> Fault:
    kind = chance.choices(list(weights), list(weights.values()))[0]
    most = {"refuse": 30, "after": 60_000, "truncate": 60_000, "outage": 2500,
            "passing": 6, "identify": 6, "recovered": 6, "flush": 2}  # fmt: skip
    amount = most.get(kind.partition(" ")[0], 20)
    return Fault(kind, chance.randint(0, amount))


def random_step(chance: random.Random, faults: float, weights: Weights, reopens: float) -> Step:
    kind = chance.random()
    fault = random_fault(chance, weights) if chance.random() < faults else None
    if kind < 0.08:
        return Flush(fault)
    if kind < 0.08 + reopens:
        return Reopen()
    ops = tuple(random_op(chance) for _ in range(chance.randint(1, 12)))
    return Group(ops, fault, chance.randint(0, len(ops)))


def random_script(
    seed: object,
    operations: int,
    faults: float,
    weights: Weights | None = None,
    reopens: float = 0.005,
) -> list[Step]:
    """At least so many operations; ``faults``, ``reopens``: the chance of one in each step."""
    chance = random.Random(str(seed))
    steps: list[Step] = []
    count = 0
    while count < operations:
        step = random_step(chance, faults, weights or SHORT, reopens)
        steps.append(step)
        count += len(step.ops) if isinstance(step, Group) else 1
    return steps


# What turns the order of a few events into a loss: many small groups in a small place.
_DENSE: Weights = {"turn": 4, "blink": 4, "recovered": 1, "flush": 1, "rst": 1}
_PLACE = 256  # granules


def dense_script(seed: object, groups: int) -> list[Step]:
    """Writes, flushes and questions for extents that overlap, while the write cache is switched on
    and off, and loses its contents."""
    chance = random.Random(f"dense {seed}")

    def op() -> Op:
        kind = chance.choices((WRITE, READ, TRIM, FLUSH, EXTENTS), (8, 2, 1, 4, 4))[0]
        if kind == EXTENTS:
            return Op(kind, 0, _PLACE)
        return Op(kind, 8 * chance.randrange(_PLACE // 8 - 4), 8 * chance.randint(1, 4))

    steps: list[Step] = []
    for _ in range(groups):
        ops = tuple(op() for _ in range(chance.randint(3, 10)))
        fault = random_fault(chance, _DENSE) if chance.random() < 0.6 else None
        steps.append(Group(ops, fault, chance.randint(0, len(ops)), chance.choice((0, 4, 8))))
        if chance.random() < 0.05:
            steps.append(Reopen())
    return steps
