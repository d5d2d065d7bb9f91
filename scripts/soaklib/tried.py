"""What the initiators of a soak went through, as they count it themselves: metrics and logs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from iserblk.errors import IserblkError
from iserblk.metrics.reading import ProcessReading
from iserblk.metrics.scraping import scrape

_SCRAPE_S = 2.0
_REPLAY = re.compile(rb": sending (\d+) unflushed changes again$", re.MULTILINE)


class Counts(NamedTuple):
    """``reconnections``: of sessions. ``recoveries``: connections that were lost while others went
    on. ``resent``: commands that were in flight, and were sent again. ``flushes``: requests."""

    reconnections: int = 0
    recoveries: int = 0
    resent: int = 0
    flushes: int = 0

    def plus(self, other: Counts) -> Counts:
        return Counts(*map(sum, zip(self, other, strict=True)))


class Replays(NamedTuple):
    """``times``: that a journal was sent again. ``changes``: that were in it."""

    times: int = 0
    changes: int = 0


def counts_of(reading: ProcessReading) -> Counts:
    """LUNs of one session have the same numbers; a process of a soak has one LUN."""
    total = Counts()
    for lun in reading.luns:
        flushes = lun.operations["flush"].requests
        total = total.plus(Counts(lun.reconnects, lun.recovered, lun.replayed, flushes))
    return total


def ask(place: Path) -> Counts | None:
    """None: no process answers there, as it begins, has ended or is busy."""
    try:
        return counts_of(scrape(place, timeout_s=_SCRAPE_S))
    except IserblkError:
        return None


def replays(log: bytes) -> Replays:
    """What the log of an initiator (with ``-v``) tells."""
    found = [int(count) for count in _REPLAY.findall(log)]
    return Replays(len(found), sum(found))


class Tried:
    """Of each process the last numbers that were read; those of a name, one after the other, are
    added up."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, int], Counts] = {}

    def note(self, name: str, pid: int, counts: Counts | None) -> None:
        if counts is not None:
            self._last[name, pid] = counts

    def total(self) -> dict[str, Counts]:
        total: dict[str, Counts] = {}
        for (name, _), counts in [*self._last.items()]:
            total[name] = total.get(name, Counts()).plus(counts)
        return total


def rows(total: Mapping[str, Counts], replayed: Mapping[str, Replays]) -> Iterator[list[str]]:
    """Cells for each initiator, and for all."""
    sums = [0] * (len(Counts._fields) + len(Replays._fields))
    for name in _ordered(total, replayed):
        numbers = [*total.get(name, Counts()), *replayed.get(name, Replays())]
        sums = [sum(each) for each in zip(sums, numbers, strict=True)]
        yield [name, *map(str, numbers)]
    yield ["all", *map(str, sums)]


def _ordered(*several: Iterable[str]) -> list[str]:
    return [*dict.fromkeys(name for names in several for name in names)]
