"""The table of ``iserblk stats`` on a terminal: rates between two readings."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from iserblk.cli.output import size_words
from iserblk.cli.stats_rows import Row, path_words, plain, time_words
from iserblk.metrics.reading import together

_COLUMNS = ("IOPS", "MiB/s", "mean", "p99", "in flight", "retries", "reconnects", "unflushed")
_MIB = 1 << 20


def watch(look: Callable[[], Sequence[Row]], interval: float, nothing: str) -> None:
    """Show the table every ``interval`` seconds, until ^C; ``nothing``: the text when there is no
    LUN. Raises what ``look`` raises."""
    before: dict[tuple[object, ...], Row] = {}
    try:
        with Live(console=Console(highlight=False), auto_refresh=False) as live:
            while True:
                rows = look()
                live.update(table(rows, before) if rows else Text(nothing), refresh=True)
                before = {row.key: row for row in rows}
                time.sleep(interval)
    except KeyboardInterrupt:
        pass  # the regular end


def table(rows: Sequence[Row], before: Mapping[tuple[object, ...], Row]) -> RenderableType:
    """The table. ``before``: the rows of the previous reading. A LUN that is not among them has no
    rates yet."""
    found = Table(box=None, pad_edge=False)
    found.add_column("where", overflow="fold")
    found.add_column("LUN", overflow="fold")
    for name in _COLUMNS:
        found.add_column(name, justify="right", no_wrap=True)
    found.add_column("path", overflow="fold")
    for row in rows:
        lun = row.lun
        cells = [
            plain(row.where),
            plain(lun.name),
            *_rates(row, before.get(row.key)),
            str(lun.in_flight),
            str(lun.retries),
            str(lun.reconnects),
            size_words(lun.unflushed),
            path_words(lun),
        ]
        found.add_row(*map(Text, cells))
    return found


def _rates(row: Row, old: Row | None) -> tuple[str, str, str, str]:
    """IOPS, MiB/s, mean and p99 between ``old`` and ``row``."""
    if old is None or row.at <= old.at:
        return "", "", "", ""
    now, then = row.lun.operations, old.lun.operations
    added = {name: now[name].since(then[name]) for name in now}
    every = together(list(added.values()))
    moved = added["read"].bytes + added["write"].bytes
    seconds = row.at - old.at
    return (
        f"{every.requests / seconds:.0f}",
        f"{moved / _MIB / seconds:.1f}",
        time_words(every.mean_us),
        time_words(every.percentile_us(99)),
    )
