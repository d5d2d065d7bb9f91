"""Lost connections that the target keeps for their tasks: how many, and how much data."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, NamedTuple

log = logging.getLogger(__name__)

MOST: Final = 64
MOST_DATA: Final = 128 << 20  # bytes


class _Kept(NamedTuple):
    address: str
    data: int
    give_up: Callable[[], None]


class KeptConnections:
    """The lost connections of all sessions. Where there are too many, or their tasks hold too much
    data, the oldest of the address that has most is given up. So an initiator that comes and goes
    ends what is kept for itself, before what is kept for others. ``given_up``: how many were, in
    all."""

    def __init__(self, most: int = MOST, most_data: int = MOST_DATA) -> None:
        self.most = most
        self.most_data = most_data
        self.given_up = 0
        self._kept: dict[object, _Kept] = {}  # oldest first
        self.data = 0  # bytes

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, connection: object, address: str, data: int, give_up: Callable[[], None]) -> None:
        """``data``: bytes of its tasks. ``give_up``: called when it may be kept no longer, perhaps
        at once; then it is not kept any more."""
        self._kept[connection] = _Kept(address, data, give_up)
        self.data += data
        while len(self._kept) > self.most:
            self._give_up_one(lambda _: 1)
        while self.data > self.most_data:
            self._give_up_one(lambda kept: kept.data)

    def remove(self, connection: object) -> None:
        """Does nothing if it is not kept."""
        kept = self._kept.pop(connection, None)
        if kept is not None:
            self.data -= kept.data

    def _give_up_one(self, weight: Callable[[_Kept], int]) -> None:
        sums: dict[str, int] = {}
        for each in self._kept.values():
            sums[each.address] = sums.get(each.address, 0) + weight(each)
        heaviest = max(sums, key=sums.__getitem__)
        for connection, kept in self._kept.items():
            if kept.address == heaviest and weight(kept):
                log.info("%s: the tasks of a lost connection are given up: too many", heaviest)
                self.given_up += 1
                self.remove(connection)
                kept.give_up()
                return
