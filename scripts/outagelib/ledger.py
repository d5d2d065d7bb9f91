"""What a writer was told, and what of that is on the LUN afterwards."""

from __future__ import annotations

import errno
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from outagelib.writer import RECORD, record


@dataclass
class Ledger:
    """Made of the lines of a writer's log. Times are seconds of the guest's monotonic clock.

    ``acknowledged``: when each record was, by number. ``flushed``: records that a flush has
    covered, and no call has failed in between. ``told``: records behind which a call has failed
    before a flush: the program knows that they may be lost. ``failed``: calls that failed:
    (seconds, errno). ``ended``: the writer has come to its end.
    """

    acknowledged: list[float] = field(default_factory=list)
    flushed: set[int] = field(default_factory=set)
    told: set[int] = field(default_factory=set)
    flushes: list[float] = field(default_factory=list)
    failed: list[tuple[float, int]] = field(default_factory=list)
    ended: bool = False
    _pending: set[int] = field(default_factory=set)

    def note(self, line: str) -> None:
        what, number_text, seconds_text, *more = line.split()
        number, seconds = int(number_text), float(seconds_text)
        if what == "write":
            self.acknowledged.append(seconds)
            self._pending.add(number)
        elif what == "flush":
            self.flushes.append(seconds)
            self.flushed |= self._pending
            self._pending.clear()
        elif what.startswith("failed-"):
            self.failed.append((seconds, int(more[0])))
            self.told |= self._pending
            self._pending.clear()
        else:
            self.ended = True

    @property
    def read_only(self) -> bool:
        """Whether it has come to that. A file system may say so to those who write alone: since
        Linux 6.12, and in kernels that have taken that over, ext4 is still mounted read-write."""
        last = max(self.acknowledged, default=0.0)
        return any(number == errno.EROFS and at > last for at, number in self.failed)

    def pause(self, until: float) -> tuple[float, bool]:
        """The longest time without an acknowledged record, in seconds; whether any came behind it.
        ``until``: the end of what is looked at."""
        times = self.acknowledged
        gaps = [(later - earlier, True) for earlier, later in itertools.pairwise(times)]
        gaps.append((until - times[-1] if times else until, False))
        return max(gaps)

    def rates(self, start: float, end: float, unit: int = RECORD) -> list[int]:
        """What was acknowledged in each whole second from ``start`` to ``end``: bytes, or what else
        a record counts for."""
        counts = Counter(int(each - start) for each in self.acknowledged if each >= start)
        return [counts[second] * unit for second in range(int(end - start))]


class Follower:
    """A ledger of a log that is still being written."""

    def __init__(self, log: Path) -> None:
        self.ledger = Ledger()
        self._log = log
        self._at = 0

    def look(self) -> Ledger:
        """Take what has come since the last look."""
        if self._log.exists():
            with self._log.open("rb") as file:
                file.seek(self._at)
                whole = file.read().rpartition(b"\n")[0]
            if whole:
                self._at += len(whole) + 1
                for line in whole.decode().splitlines():
                    self.ledger.note(line)
        return self.ledger


@dataclass(frozen=True)
class Missing:
    """Records that were acknowledged, and are not there.

    ``flushed``: a flush had covered them. ``silent``: no call has failed before a flush had covered
    them, if any has; those that were flushed are among them. ``told``: one has.
    """

    flushed: int
    silent: int
    told: int


def missing(ledger: Ledger, present: Callable[[int], bool]) -> Missing:
    """``present``: whether the record of that number is on the LUN."""
    absent = {number for number in range(len(ledger.acknowledged)) if not present(number)}
    return Missing(
        len(absent & ledger.flushed),
        len(absent - ledger.told),
        len(absent & ledger.told),
    )


def in_file(path: Path) -> Callable[[int], bool]:
    """Of a file that a writer has written."""

    def present(number: int) -> bool:
        with path.open("rb") as file:
            file.seek(number * RECORD)
            return file.read(RECORD) == record(number)

    return present
