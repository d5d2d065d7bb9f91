"""What happens when: made of the seed and the time that there is, and of nothing else."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

# In each cycle, processes of the project are restarted in its first part, and live on in the rest,
# which is long enough for them to be judged.
CYCLE_S = 2700.0
RESTARTS_S = 480.0
_GAP_S = 12.0  # between two events, on the average
_AT_LEAST = 32  # events of a run, however short it is: a round and more
_GROWTH = 4 << 20  # bytes

PORTAL, RESTART, GROW, VISIT = "portal", "restart", "grow", "visit"
LOSS = ("kill", "target")  # what was acknowledged and not flushed is gone


class Event(NamedTuple):
    """``at_s``: seconds of the run; when the event before takes longer, it is later. ``kind``: one
    of the above. ``what``: portal: cut, away or stall; restart: kill or term. ``whom``: portals,
    by number, joined by "+"; a process; the number of a LUN; a kind of client. ``for_s``: how long
    it lasts; of a process, how long it is away. ``number``: of bytes, or of steps."""

    at_s: float
    kind: str
    what: str
    whom: str
    for_s: float = 0.0
    number: int = 0

    def words(self) -> str:
        what = f"{self.what} {self.whom}"
        if self.kind == PORTAL:
            what = f"portal {self.whom}: {self.what}"
        elif self.kind == GROW:
            what = f"LUN {self.whom} grows by {self.number >> 20} MiB"
        elif self.kind == VISIT:
            what = f"a client comes: {self.whom}" + (
                ", to be killed" if self.what == "kill" else ""
            )
        return what + (f", for {self.for_s:.1f} s" if self.for_s else "")


def kinds_of_a_round(
    restarts: Sequence[tuple[str, str]], visitors: Sequence[str]
) -> list[tuple[str, str, str]]:
    kinds = [(PORTAL, what, whom) for what in ("cut", "away", "stall") for whom in ("1", "1+2")]
    kinds += [(PORTAL, what, "2") for what in ("cut", "away")]
    kinds += [(RESTART, what, whom) for what, whom in restarts]
    # The target loses its cache again, with what it was sent again after the first loss.
    kinds += [(RESTART, what, whom) for what, whom in restarts if (what, whom) == LOSS]
    kinds += [(GROW, "", str(lun)) for lun in range(3)]
    kinds += [(VISIT, "", whom) for whom in visitors]
    return [*kinds, (VISIT, "kill", "api"), (VISIT, "kill", "api")]


def events(
    seed: int, seconds: float, restarts: Sequence[tuple[str, str]], visitors: Sequence[str]
) -> Iterator[Event]:
    """``restarts``: what may be done to which process. ``visitors``: kinds of clients that come
    and go; "api" is among them. In rounds: in each all of it happens, a LOSS twice."""
    chance = random.Random(seed)
    gap_s = min(_GAP_S, seconds / _AT_LEAST)
    at_s = gap_s
    deck: list[tuple[str, str, str]] = []
    while at_s < seconds:
        if not deck:
            deck = kinds_of_a_round(restarts, visitors)
            chance.shuffle(deck)
        kind, what, whom = deck.pop()
        for_s, number = 0.0, 0
        if kind == PORTAL and what != "cut":
            for_s = chance.uniform(0.1, 0.8) * gap_s
        elif kind == RESTART:
            for_s = chance.choice((0.0, 0.0, 0.5)) * gap_s
        elif kind == GROW:
            number = _GROWTH
        elif kind == VISIT:
            number = chance.randrange(10, 120)
        if kind != RESTART or at_s % CYCLE_S < RESTARTS_S:
            yield Event(at_s, kind, what, whom, for_s, number)
            at_s += chance.uniform(0.5, 1.5) * gap_s
