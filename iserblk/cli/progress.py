"""The progress of a command that takes long: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from iserblk.cli.output import size_words
from iserblk.loop.clock import monotonic

if TYPE_CHECKING:
    from iserblk.cli.transfer import Advance

log = logging.getLogger(__name__)

# Between two lines there are as many seconds, and then as many percent, or as many seconds at most.
PAUSE_S = 5.0
PERCENT = 5
LONGEST_S = 60.0
_BAR_S = 0.5  # between two states of a bar that shows a time


class Lines:
    """Progress as lines on stderr, for logs. ``size``: bytes in all; None: not known. ``now``: the
    clock."""

    def __init__(self, size: int | None, what: str, now: Callable[[], float]) -> None:
        self._size = size
        self._what = what
        self._now = now
        self._began = self._last = now()
        self._done = self._told = 0

    def advance(self, count: int) -> None:
        self._done += count
        pause = self._now() - self._last
        if pause < PAUSE_S or self._done == self._size:
            return
        more = self._done - self._told
        if pause >= LONGEST_S or self._size is None or more * 100 >= PERCENT * self._size:
            self._last += pause
            self._told = self._done
            click.echo(f"iserblk: {self._what}: {self._words()}", err=True)

    def _words(self) -> str:
        rate = self._done / (self._last - self._began)
        words = f"{size_words(rate)}/s"
        if not self._size:
            return f"{size_words(self._done)}, {words}"
        percent = self._done * 100 // self._size
        left = (self._size - self._done) / rate if rate else 0.0
        done = f"{size_words(self._done)} of {size_words(self._size)} ({percent} %)"
        return f"{done}, {words}, {duration_words(left)} left"


def duration_words(seconds: float) -> str:
    """Hours, minutes and seconds: 65 is "1:05"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def is_wanted() -> bool:
    """Whether ``-q`` was not given."""
    return log.isEnabledFor(logging.WARNING)


@contextmanager
def progress(size: int | None, what: str) -> Iterator[Advance]:
    """Shows on stderr how far ``what`` is: a bar on a terminal, else lines; nothing with ``-q``.
    ``size``: bytes in all; None: not known."""
    if not is_wanted():
        yield lambda _count: None
        return
    if not sys.stderr.isatty():
        yield Lines(size, what, monotonic).advance
        return
    from rich.console import Console  # noqa: PLC0415 - rich takes a while
    from rich.progress import (  # noqa: PLC0415
        BarColumn,
        DownloadColumn,
        Progress,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        "{task.description}",
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=size)
        yield lambda count: bar.advance(task, count)


@contextmanager
def timed_progress(
    seconds: float, what: str
) -> Iterator[tuple[float, Callable[[float, str], None]]]:
    """Shows how far ``what`` is, which takes a time that is known. Yields a pause in seconds, and
    what is to be called after each, with the seconds since the begin, and words that belong to it;
    a pause of 0: nothing is to be shown. A line comes each tenth of the time, or less often."""
    if not is_wanted():
        yield 0.0, lambda _at, _told: None
    elif not sys.stderr.isatty():

        def line(at: float, told: str) -> None:
            click.echo(f"iserblk: {what}: {at:.0f} of {seconds:g} s, {told}", err=True)

        yield max(PAUSE_S, seconds / 10), line
    else:
        from rich.console import Console  # noqa: PLC0415 - rich takes a while
        from rich.progress import BarColumn, Progress, TextColumn  # noqa: PLC0415

        columns = ("{task.description}", BarColumn(), TextColumn("{task.fields[told]}"))
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(what, total=seconds, told="")
            yield _BAR_S, lambda at, told: bar.update(task, completed=at, told=told)
