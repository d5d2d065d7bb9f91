"""Which of several ways to a LUN to take: a policy, without I/O and without a clock.

One way is in use at a time. The order in which they were given is the order of preference. A way
that failed a moment ago comes after those that did not, and one whose port would not carry out
commands (ALUA standby and the like) after all that might; none is ever left out, because when all
of them failed the next try may succeed on any. While a worse way is in use, better ones are due for
a try from time to time: that is failing back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from iserblk.scsi.alua import ACTIVE_NON_OPTIMIZED, ACTIVE_OPTIMIZED, USABLE, state_words

T = TypeVar("T")

FAILED_LATELY_S = 10.0  # a way that failed within this time is tried after the others
# Between tries to fail back; doubled with each that does not succeed.
FIRST_FAIL_BACK_S = 30.0
LAST_FAIL_BACK_S = 600.0
LASTED_S = 300.0  # a way that carried the session for this long has made up for its setbacks


@dataclass(slots=True)
class Way(Generic[T]):
    """One address of the LUN. ``index``: its place in the order of preference. ``state``: the ALUA
    state of its port when it was last seen, None: not known. ``failures``: since it last carried
    the session. ``again_at``: not before then is it worth failing back to; ``setbacks`` make that
    later each time, and are not forgotten by carrying the session for a moment."""

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
        """As far as is known its port carries out commands."""
        return self.state is None or self.state in USABLE

    def _rank(self, now: float) -> tuple[bool, float, bool, bool, int]:
        if not self.usable:  # in turn, as any of them may have become usable
            return (True, self.failed_at or 0.0, False, False, self.index)
        lately = self.failed_at is not None and now - self.failed_at < FAILED_LATELY_S
        return (False, 0.0, lately, self.state == ACTIVE_NON_OPTIMIZED, self.index)


class Ways(Generic[T]):
    """All ways to one LUN. ``current``: the one in use, None while there is none.

    Times are seconds of one monotonic clock, the caller's. Not thread-safe: it belongs to what
    reconnects.
    """

    def __init__(self, ways: Sequence[tuple[T, str]]) -> None:
        """``ways``: address and name (for logs), the preferred one first; at least one."""
        if not ways:
            raise ValueError("no ways")
        self.all = [Way(index, address, name) for index, (address, name) in enumerate(ways)]
        self.current: Way[T] | None = None

    def order(self, now: float) -> list[Way[T]]:
        """All of them, in the order in which to try to connect now."""
        return sorted(self.all, key=lambda way: way._rank(now))

    # -- what happened -----------------------------------------------------------------------------

    def connected(self, way: Way[T], now: float, state: int | None = None) -> None:
        """``way`` carries the session from now on; ``state`` of its port, as it was read."""
        self.current = way
        way.state = state
        way.failures = 0
        way.failed_at = None
        way.since = now
        way.error = ""
        for each in self.all:
            # What is better than this one has just failed, or was not tried: not at once again.
            each.again_at = max(each.again_at, now + FIRST_FAIL_BACK_S)

    def failed(self, way: Way[T], error: str, now: float) -> None:
        """No connection by ``way``, or the one that there was is lost."""
        self._put_off(way, error, now)
        way.state = None  # whatever it was: the next answer may be another

    def refused(self, way: Way[T], state: int, error: str, now: float) -> None:
        """There is a connection, and its port is in a ``state`` in which it carries out nothing."""
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
        """The way in use was given up for a better one; nothing is wrong with it."""
        self.current = None

    def state_seen(self, way: Way[T], state: int) -> None:
        """The ALUA state of its port, however that was learned. Does not change what is in use:
        ``must_leave`` says whether that is needed."""
        way.state = state

    # -- what to do --------------------------------------------------------------------------------

    @property
    def must_leave(self) -> bool:
        """The way in use will not carry out commands, and there is another one to try."""
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
        """A way that is better than the one in use and due for a try; the best of them. Tell of
        what comes of it by ``connected``, ``failed`` or ``refused``."""
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
