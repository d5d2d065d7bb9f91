"""Failed attempts to prove who one is (CHAP), and how long the next ones have to wait."""

from __future__ import annotations

from collections import Counter
from typing import Final, NamedTuple

FREE: Final = 3  # failed attempts behind which the next one does not wait: mistakes
LONGEST_S: Final = 8.0  # between two attempts
# No attempt is given a turn later than that: its login would have ended.
HORIZON_S: Final = 12.0
FORGET_S: Final = 600.0  # after the last failure
MOST: Final = 4096  # pairs of origin and user


class _Pair(NamedTuple):
    origin: str
    user: int  # hash


class _Failures:
    __slots__ = ("count", "last", "turn")

    def __init__(self) -> None:
        self.count = 0
        self.last = 0.0
        self.turn = 0.0  # when the next attempt may be looked at

    @property
    def delay(self) -> float:
        """Seconds between two attempts."""
        if self.count < FREE:
            return 0.0
        return min(LONGEST_S, 2.0 ** min(self.count - FREE, 10))


class Attempts:
    """From the third failure on, attempts of the same origin as the same user wait for each other:
    1 s, then 2, 4 and 8 s. Connections side by side win nothing. Attempts of another origin, or as
    another user, do not wait. Users that do not exist are treated as those that do.

    ``failures``: attempts that have failed, in all. ``delays``: those that had to wait.

    Times are those of a clock that the caller chooses, in seconds."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self.failures = 0
        self.delays = 0
        self._failures: dict[_Pair, _Failures] = {}  # of the oldest failure first
        self._of_origin: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._failures)

    def wait(self, origin: str, user: str, now: float) -> float:
        """Seconds until an attempt that has come now may be looked at. It has that turn, and the
        next one has a later one."""
        pair = _Pair(origin, hash(user))
        failures = self._failures.get(pair)
        if failures is None:
            return 0.0
        if now - failures.last > FORGET_S:
            self._remove(pair)
            return 0.0
        turn = max(now, failures.turn)
        self.delays += turn > now
        if turn - now <= HORIZON_S:
            failures.turn = turn + failures.delay
        return turn - now

    def failed(self, origin: str, user: str, now: float) -> None:
        """An attempt has failed."""
        self.failures += 1
        pair = _Pair(origin, hash(user))
        failures = self._failures.pop(pair, None)
        if failures is None:
            failures = _Failures()
            self._of_origin[origin] += 1
        self._failures[pair] = failures
        failures.count += 1
        failures.last = now
        failures.turn = max(failures.turn, now + failures.delay)
        while len(self._failures) > self._most:
            most = max(self._of_origin.values())
            self._remove(
                next(each for each in self._failures if self._of_origin[each.origin] == most)
            )

    def succeeded(self, origin: str, user: str) -> None:
        """Who has the secret has only mistyped it before."""
        self._remove(_Pair(origin, hash(user)))

    def _remove(self, pair: _Pair) -> None:
        if self._failures.pop(pair, None) is None:
            return
        self._of_origin[pair.origin] -= 1
        if not self._of_origin[pair.origin]:
            del self._of_origin[pair.origin]
