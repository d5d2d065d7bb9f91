"""The steps of a run as plain data, which hypothesis can shrink and a seed can make."""

from __future__ import annotations

import random
from typing import NamedTuple

GRANULES = 2048  # 1 MiB
MOST = 96  # granules of one operation, if no other number is given

READ, WRITE, ZERO, TRIM, EXTENTS, FLUSH = (
    "read", "write", "zero", "trim", "extents", "flush"
)  # fmt: skip


class Op(NamedTuple):
    kind: str
    granule: int
    count: int  # type: ignore[assignment]
    fua: bool = False


class Fault(NamedTuple):
    """A fault by its ``kind``.

    The whole connection: "rst", "fin", "hole", "delay", "sips". One direction, with "up" or "down"
    behind it: "after", "truncate" (``amount`` bytes from now), "corrupt", and what TCP never does:
    "drop", "twice", "swap" (a PDU, soon). "refuse", "outage": no target listens for ``amount`` ms.
    "crash": the target comes back with its cache; "power": without it, except for what was already
    written back.

    Only with a target in this process: "turn": its write cache is switched on or off; "blink": it
    loses the content of the write cache, and no connection. "passing", "recovered": the next
    ``amount`` commands end with a temporary error, or with RECOVERED ERROR, carried out. "flush":
    as many flushes fail. "identify": the connection breaks, and as many commands that identify the
    LUN end with a temporary error."""

    kind: str
    amount: int = 0


class Group(NamedTuple):
    """Operations that run at once, or begin within ``spread`` ms. The fault happens when ``after``
    of them are done."""

    ops: tuple[Op, ...]
    fault: Fault | None = None
    after: int = 0
    spread: int = 0


class Flush(NamedTuple):
    fault: Fault | None = None


class Reopen(NamedTuple):
    """The client closes the disk, the target loses its cache, another client opens it."""


Step = Group | Flush | Reopen


def random_op(chance: random.Random, most: int) -> Op:
    kind = chance.choices((READ, WRITE, ZERO, TRIM, EXTENTS, FLUSH), (20, 20, 2, 2, 2, 1))[0]
    count = chance.choice((1, 1, 2, 8, 8, 17, chance.randint(1, most)))
    granule = chance.randrange(GRANULES - count)
    if chance.random() < 0.5:  # whole blocks of 4 KiB
        granule, count = granule & ~7, max(8, count & ~7)
    return Op(kind, granule, count, chance.random() < 0.05)


Weights = dict[str, int]
SHORT: Weights = {"rst": 4, "fin": 4, "after up": 5, "after down": 5, "truncate up": 2,
                  "truncate down": 2, "refuse": 2, "delay": 1, "sips": 1, "crash": 3,
                  "power": 4}  # fmt: skip
# Faults that only checksums show.
CHECKED: Weights = {**SHORT, "corrupt up": 4, "corrupt down": 4}
# Faults of a target in this process.
TROUBLED: Weights = {**SHORT, "passing": 6, "identify": 6, "recovered": 6, "flush": 6, "turn": 8,
                     "blink": 6, "less": 4}  # fmt: skip
# Faults that may take longer than an io-timeout of a second, too.
TOO_LONG: Weights = {**SHORT, "outage": 4, "hole": 3}
BROKEN: Weights = {
    f"{kind} {way}": 1 for kind in ("drop", "twice", "swap") for way in ("up", "down")
}


def random_fault(chance: random.Random, weights: Weights) -> Fault:
    kind = chance.choices(list(weights), list(weights.values()))[0]
    most = {"refuse": 30, "after": 60_000, "truncate": 60_000, "outage": 2500,
            "passing": 6, "identify": 6, "recovered": 6, "flush": 2, "less": 31}  # fmt: skip
    amount = most.get(kind.partition(" ")[0], 20)
    return Fault(kind, chance.randint(0, amount))


def random_step(
    chance: random.Random, faults: float, weights: Weights, reopens: float, most: int
) -> Step:
    kind = chance.random()
    fault = random_fault(chance, weights) if chance.random() < faults else None
    if kind < 0.08:
        return Flush(fault)
    if kind < 0.08 + reopens:
        return Reopen()
    ops = tuple(random_op(chance, most) for _ in range(chance.randint(1, 12)))
    return Group(ops, fault, chance.randint(0, len(ops)))


def random_script(
    seed: object,
    operations: int,
    faults: float,
    weights: Weights | None = None,
    reopens: float = 0.005,
    most: int = MOST,
) -> list[Step]:
    """A script of at least ``operations``. ``faults``, ``reopens``: their chance in each step.
    ``most``: granules of one operation."""
    chance = random.Random(str(seed))
    steps: list[Step] = []
    count = 0
    while count < operations:
        step = random_step(chance, faults, weights or SHORT, reopens, most)
        steps.append(step)
        count += len(step.ops) if isinstance(step, Group) else 1
    return steps


# For losses that depend on the order of a few events: many small groups in a small place.
_DENSE: Weights = {"turn": 4, "blink": 4, "recovered": 1, "flush": 1, "rst": 1}
_PLACE = 256  # granules


def dense_script(seed: object, groups: int) -> list[Step]:
    """A script of overlapping writes, flushes and ``extents``, while the write cache is switched on
    and off and loses its content."""
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
