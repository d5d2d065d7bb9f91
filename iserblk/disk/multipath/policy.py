"""Decides which of several ways to a LUN to use: a policy that does no I/O and reads no clock.

One way is in use at a time. The ways are given in order of preference. A way that failed a moment
ago is tried after those that did not. A way whose port would not carry out commands (ALUA standby
and the like) is tried after all ways whose port might. No way is ever left out, because when all of
them failed the next attempt may succeed on any. While a worse way is in use, better ways are due
for a trial from time to time: that is failing back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from iserblk.scsi.alua import ACTIVE_NON_OPTIMIZED, ACTIVE_OPTIMIZED, USABLE, state_words

T = TypeVar("T")

FAILED_LATELY_S = 10.0  # a way that failed within this time is tried after the others
# Between attempts to fail back; doubled after each that fails.
FIRST_FAIL_BACK_S = 30.0
LAST_FAIL_BACK_S = 600.0
FIRST_ASK_S = 300.0  # between requests to make a port usable; doubled after each
LAST_ASK_S = 3600.0
GIVEN_UP = 2  # failures in a row after which a way counts as gone
LASTED_S = 300.0  # after a way has carried the session for this long, its setbacks are forgotten


@dataclass(slots=True)
class Way(Generic[T]):
    """One way to the LUN, with its address. ``index``: its place in the order of preference.
    ``state``: the ALUA state of its port when it was last seen; None: not known. ``failures``:
    since it last carried the session. ``again_at``: before this time the session does not fail back
    to it. Each of the ``setbacks`` makes that later; carrying the session for a moment does not
    reset them."""

    index: int
    address: T
    name: str
    state: int | None = None
    failures: int = 0
    failed_at: float | None = None
    error: str = ""
    again_at: float = 0.0
    setbacks: int = 0
    since: float = 0.0  # when it began to carry the session

    @property
    def usable(self) -> bool:
        """Whether its port carries out commands, as far as is known."""
        return self.state is None or self.state in USABLE

    def _rank(self, now: float) -> tuple[bool, float, bool, bool, int]:
        if not self.usable:  # in turn, because any of them may have become usable
            return (True, self.failed_at or 0.0, False, False, self.index)
        lately = self.failed_at is not None and now - self.failed_at < FAILED_LATELY_S
        return (False, 0.0, lately, self.state == ACTIVE_NON_OPTIMIZED, self.index)


class Asking:
    """Limits how often the target is asked to make a port usable, because another host may want
    its ports otherwise. One object for one LUN."""

    def __init__(self) -> None:
        self._again_at: float | None = None
        self._pause = FIRST_ASK_S

    def may_ask(self, now: float) -> bool:
        return self._again_at is None or now >= self._again_at

    def asked(self, now: float) -> None:
        """Note that the target is asked now. The next time is later than this one was, unless a
        long time has passed since."""
        if self._again_at is not None:
            if now - self._again_at >= self._pause:
                self._pause = FIRST_ASK_S
            else:
                self._pause = min(LAST_ASK_S, self._pause * 2)
        self._again_at = now + self._pause


class Ways(Generic[T]):
    """All ways to one LUN. ``current``: the way in use; None while there is none.

    Times are seconds of one monotonic clock, the caller's. Not thread-safe: it belongs to the
    thread of the reconnector.
    """

    def __init__(self, ways: Sequence[tuple[T, str]]) -> None:
        """``ways``: address and name (for logs), the preferred one first; at least one."""
        if not ways:
            raise ValueError("no ways")
        self.all = [Way(index, address, name) for index, (address, name) in enumerate(ways)]
        self.current: Way[T] | None = None

    def add(self, ways: Sequence[tuple[T, str]]) -> list[Way[T]]:
        """Add ways, address and name, behind those that there are. Returns them."""
        fresh = [Way(len(self.all) + at, *each) for at, each in enumerate(ways)]
        self.all += fresh
        return fresh

    def order(self, now: float) -> list[Way[T]]:
        """All ways, in the order in which to try to connect now."""
        return sorted(self.all, key=lambda way: way._rank(now))

    # -- what happened -----------------------------------------------------------------------------

    def connected(self, way: Way[T], now: float, state: int | None = None) -> None:
        """Note that ``way`` carries the session from now on. ``state``: of its port, as it was
        read."""
        self.current = way
        way.state = state
        way.failures = 0
        way.failed_at = None
        way.since = now
        way.error = ""
        for each in self.all:
            # Better ways have just failed, or were not tried: do not try them at once.
            each.again_at = max(each.again_at, now + FIRST_FAIL_BACK_S)

    def failed(self, way: Way[T], error: str, now: float) -> None:
        """Note that ``way`` gave no connection, or that its connection is lost."""
        self._put_off(way, error, now)
        way.state = None  # whatever it was: it may be another next time

    def refused(self, way: Way[T], state: int, error: str, now: float) -> None:
        """Note that ``way`` connects, but its port carries out no commands in its ``state``."""
        self._put_off(way, error, now)
        way.state = state

    def _put_off(self, way: Way[T], error: str, now: float) -> None:
        if self.current is way:
            self.current = None
            if now - way.since >= LASTED_S:
                way.setbacks = 0
        way.failures += 1
        way.setbacks += 1
        way.error = error
        way.failed_at = now
        pause = min(LAST_FAIL_BACK_S, FIRST_FAIL_BACK_S * 2.0 ** min(way.setbacks - 1, 16))
        way.again_at = now + pause

    def left(self) -> None:
        """Note that the way in use was given up for another way; nothing is wrong with it."""
        self.current = None

    def state_seen(self, way: Way[T], state: int) -> None:
        """Note the ALUA state of the way's port. This does not change what is in use:
        ``must_leave`` says whether that is needed."""
        way.state = state

    # -- what to do --------------------------------------------------------------------------------

    def is_last_resort(self, way: Way[T]) -> bool:
        """Whether no other way carries out commands: each is in a state in which it does not, or
        has failed more than once, so that a short interruption does not count."""
        return all(
            not each.usable or each.failures >= GIVEN_UP for each in self.all if each is not way
        )

    @property
    def must_leave(self) -> bool:
        """Whether the way in use carries out no commands, and there is another way to try."""
        return self.current is not None and not self.current.usable and len(self.all) > 1

    def _better(self) -> list[Way[T]]:
        """The ways that are better than the one in use, best first."""
        current = self.current
        if current is None:
            return []
        return [
            way
            for way in self.all
            if (way.index < current.index and way.state != ACTIVE_NON_OPTIMIZED)
            or (way.state == ACTIVE_OPTIMIZED and current.state == ACTIVE_NON_OPTIMIZED)
        ]

    def fail_back(self, now: float) -> Way[T] | None:
        """The best way that is better than the one in use and due for a trial; None: there is none.
        The caller reports the result by ``connected``, ``failed`` or ``refused``."""
        return next((way for way in self._better() if now >= way.again_at), None)

    def describe(self) -> list[dict[str, object]]:
        """For logs and JSON."""
        return [
            {
                "portal": way.name,
                "in_use": way is self.current,
                "state": None if way.state is None else state_words(way.state),
                "failures": way.failures,
                "error": way.error,
            }
            for way in self.all
        ]
