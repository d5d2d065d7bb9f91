"""The log of a server, limited in rate: no peer fills the disk of a log, whatever it does.

Of each kind of line some may come at once; after that one in a while. What is left out is counted,
and the count is logged. A kind is a level and a text without its arguments, of one logger: so a
peer that causes lines of one kind hides none of another.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock

from iserblk.loop.clock import monotonic

BURST = 20  # lines of a kind at once
EVERY_S = 10.0  # for each line more
MOST_KINDS = 1000  # that are told apart; there are fewer as long as texts are constants

_LEFT_OUT = "%d more lines like this one are left out: %s"
_Kind = tuple[str, int, str]
_OTHER: _Kind = ("", logging.WARNING, "")


class Allowance:
    """How many lines may come. ``clock``: seconds."""

    def __init__(
        self,
        burst: int = BURST,
        every_s: float = EVERY_S,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._burst = burst
        self._every_s = every_s
        self._clock = clock
        self._room = float(burst)
        self._since = clock()  # when ``_room`` was what it is

    def take(self) -> bool:
        """Whether a line may come now; then it counts."""
        now = self._clock()
        self._room = min(self._burst, self._room + (now - self._since) / self._every_s)
        self._since = now
        if self._room < 1:
            return False
        self._room -= 1
        return True


class _Lines:
    """Of one kind. ``left_out``: how many, since the last time that it was told, and ``first``: the
    first of them."""

    __slots__ = ("allowance", "first", "left_out")

    def __init__(self, clock: Callable[[], float]) -> None:
        self.allowance = Allowance(clock=clock)
        self.left_out = 0
        self.first = ""


class LineLimit(logging.Filter):
    """Limits what a handler of the log writes; it is to be added to it. What is for debugging is
    not limited: who asks for that wants all. Any thread may log. ``left_out``: how many lines, in
    all."""

    def __init__(self, handler: logging.Handler, clock: Callable[[], float] = monotonic) -> None:
        super().__init__()
        self._handler = handler
        self._clock = clock
        self._lock = Lock()
        self._kinds: dict[_Kind, _Lines] = {}
        self.left_out = 0

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.INFO or record.msg is _LEFT_OUT:
            return True
        kind = (record.name, record.levelno, str(record.msg))
        with self._lock:
            lines = self._kinds.get(kind)
            if lines is None:
                if len(self._kinds) >= MOST_KINDS:
                    kind = _OTHER
                lines = self._kinds.setdefault(kind, _Lines(self._clock))
            if not lines.allowance.take():
                if not lines.left_out:
                    lines.first = record.getMessage()  # its arguments may hold a lot of memory
                lines.left_out += 1
                self.left_out += 1
                return False
            count, lines.left_out = lines.left_out, 0
            first = lines.first
        if count:
            self._tell(kind, count, first)
        return True

    def tell(self) -> None:
        """Log how many lines of each kind were left out since the last time. To be called now and
        then, as no other line may follow."""
        with self._lock:
            told = [(kind, each.left_out, each.first) for kind, each in self._kinds.items()]
            for each in self._kinds.values():
                each.left_out = 0
        for kind, count, first in told:
            if count:
                self._tell(kind, count, first)

    def _tell(self, kind: _Kind, count: int, first: str) -> None:
        name, level, _ = kind
        self._handler.handle(logging.LogRecord(name, level, "", 0, _LEFT_OUT, (count, first), None))


_limits: list[LineLimit] = []


@contextmanager
def limited_lines() -> Iterator[None]:
    """Limit what this process logs, as long as the context lasts: it serves peers."""
    limits = [(handler, LineLimit(handler)) for handler in logging.getLogger().handlers]
    for handler, limit in limits:
        handler.addFilter(limit)
        _limits.append(limit)
    try:
        yield
    finally:
        tell_left_out()
        for handler, limit in limits:
            handler.removeFilter(limit)
            _limits.remove(limit)


def lines_left_out() -> int:
    """How many lines this process has left out since ``limited_lines`` began."""
    return max((limit.left_out for limit in _limits), default=0)  # handlers have the same lines


def tell_left_out() -> None:
    """See LineLimit.tell. For those who serve, every minute or so; does nothing where nothing is
    limited."""
    for limit in _limits:
        limit.tell()
