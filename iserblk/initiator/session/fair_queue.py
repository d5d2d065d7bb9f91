"""A queue in which the owners of what waits take turns.

Front-ends serve several clients through one session. One that has a thousand requests open must not
make another, with a single one, wait for all of them. So what waits in a session has an owner, and
is numbered by **rounds**: each owner has one place in each round, and a newcomer the next round.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Final, Generic, TypeVar

T = TypeVar("T")

_THING: Final = 2  # index in an entry
_FRONT: Final = 0  # the round of what goes before all others


class FairQueue(Generic[T]):
    """Things of one owner come in the order in which they were added. The first of them waits for
    no more than two of each other owner. ``None`` is an owner like others.

    ``entries`` is empty where nothing waits.
    """

    def __init__(self) -> None:
        # A heap of (round, number, thing, owner). The numbers are unique.
        self.entries: Final[list[tuple[int, int, T, object]]] = []
        self._round = _FRONT  # of what was taken last
        self._rounds: Final[dict[object, int]] = {}  # of the last thing of each owner that waits
        self._next = 0  # number
        self._front = 0  # number of what was put in front last

    def add(self, thing: T, owner: object) -> None:
        place = max(self._round, self._rounds.get(owner, _FRONT)) + 1
        self._rounds[owner] = place
        self._next += 1
        heappush(self.entries, (place, self._next, thing, owner))

    def add_first(self, thing: T) -> None:
        """Have ``thing``, which does not wait already, come before all others."""
        self._front -= 1
        heappush(self.entries, (_FRONT, self._front, thing, None))

    def put_first(self, things: list[T]) -> None:
        """Have ``things``, some of which may wait already, come before all others, in their
        order."""
        moved = set(things)
        self._front -= len(things)
        entries: list[tuple[int, int, T, object]] = [
            (_FRONT, self._front + number, thing, None) for number, thing in enumerate(things)
        ]
        entries += [entry for entry in self.entries if entry[_THING] not in moved]
        self._replace(entries)

    def head(self) -> T:
        """What ``pop`` takes next. There must be something."""
        return self.entries[0][_THING]

    def pop(self) -> T:
        place, _, thing, owner = heappop(self.entries)
        self._round = max(self._round, place)
        if self._rounds.get(owner) == place:
            del self._rounds[owner]
        return thing

    def remove(self, thing: T) -> bool:
        """False: it does not wait."""
        entries = [entry for entry in self.entries if entry[_THING] is not thing]
        if len(entries) == len(self.entries):
            return False
        self._replace(entries)
        return True

    def take_out(self, which: Callable[[T], bool]) -> list[T]:
        """Remove all things of which ``which`` is true; returns them, as ``in_turn``."""
        out = [thing for thing in self.in_turn() if which(thing)]
        if out:
            gone = set(out)
            self._replace([entry for entry in self.entries if entry[_THING] not in gone])
        return out

    def _replace(self, entries: list[tuple[int, int, T, object]]) -> None:
        heapify(entries)
        self.entries[:] = entries
        self._rounds.clear()
        for place, _, _, owner in entries:
            if place != _FRONT:
                self._rounds[owner] = max(place, self._rounds.get(owner, place))

    @property
    def owners(self) -> set[object]:
        """Those of what waits, but for what was put in front."""
        return set(self._rounds)

    def in_turn(self) -> list[T]:
        """What waits, in the order in which ``pop`` would take it."""
        return [entry[_THING] for entry in sorted(self.entries, key=_place)]

    def clear(self) -> list[T]:
        """Returns what has waited, as ``in_turn``."""
        things = self.in_turn()
        self.entries.clear()
        self._rounds.clear()
        return things


def _place(entry: tuple[int, int, object, object]) -> tuple[int, int]:
    return entry[0], entry[1]
