"""What an initiator owes on a connection, and for how long: nothing that it holds up lasts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

# Seconds for which an initiator may keep the target waiting, without anything coming: as long as
# one that has gone is waited for, with the ping. (LIO gives 3 s to each Data-Out, five times.)
PATIENCE_S: Final = 60.0
SLOWEST: Final = 65536  # bytes a second; what is large may take longer
LONGEST_S: Final = 600.0  # for all that is awaited at one time, whatever comes of it


class Owed:
    """What is awaited, look by look."""

    __slots__ = ("_first", "_first_since", "_in_order", "_last", "_last_since")

    def __init__(self, in_order: bool = False) -> None:
        """``in_order``: of what is awaited together the first counts, then the next: hosts may send
        the data of one command after the other. Else any of it shows that more may come."""
        self._in_order = in_order
        self._last: Sequence[object] = ()  # at the last look
        self._last_since = 0.0  # none of it has come since
        self._first: Sequence[object] = ()  # what has not come of what was awaited at one time
        self._first_since = 0.0

    def overdue(self, things: Sequence[object], length: int, now: float) -> bool:
        """``things``: all that is awaited now, objects of their own, oldest first. Whether the peer
        has had its time: nothing has come for PATIENCE_S, and what it takes to move ``length``
        bytes; or not all has come in LONGEST_S that was awaited then. ``now``: seconds of any
        clock."""
        present = {id(each) for each in things}
        if not self._last or any(id(each) not in present for each in self._last):
            self._last_since = now
        self._last = things[:1] if self._in_order else things
        self._first = [each for each in self._first if id(each) in present]
        if not self._first:
            self._first = things
            self._first_since = now
        return bool(things) and (
            now - self._last_since > PATIENCE_S + length / SLOWEST
            or now - self._first_since > LONGEST_S
        )
