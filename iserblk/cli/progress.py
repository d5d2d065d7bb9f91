"""The progress of a command that goes through all bytes of a disk."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from iserblk.cli.transfer import Advance

log = logging.getLogger(__name__)


@contextmanager
def progress(size: int, what: str) -> Iterator[Advance]:
    """Shows a progress bar if stderr is a terminal and ``-q`` was not given."""
    if not sys.stderr.isatty() or not log.isEnabledFor(logging.WARNING):
        yield lambda _count: None
        return
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
