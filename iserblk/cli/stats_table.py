"""The tables of ``iserblk stats`` on a terminal: rates between two readings."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from iserblk.cli.output import size_words
from iserblk.cli.stats_rows import Row, Rows, TargetRow, path_words, plain, time_words
from iserblk.cli.stats_targets import address_words
from iserblk.metrics.reading import together

_COLUMNS = ("IOPS", "MiB/s", "mean", "p99", "in flight", "retries", "reconnects", "unflushed")
_MIB = 1 << 20


_OF_TARGETS = ("commands/s", "in flight", "sessions", "connections", "logging in", "memory",
               "waiting", "largest address")  # fmt: skip


def watch(look: Callable[[], Rows], interval: float, nothing: str) -> None:
    """Show the tables every ``interval`` seconds, until ^C; ``nothing``: the text when there is no
    LUN and no target. Raises what ``look`` raises."""
    before = Rows()
    try:
        with Live(console=Console(highlight=False), auto_refresh=False) as live:
            while True:
                rows = look()
                live.update(tables(rows, before) if rows else Text(nothing), refresh=True)
                before = rows
                time.sleep(interval)
    except KeyboardInterrupt:
        pass  # the regular end


def tables(rows: Rows, before: Rows) -> RenderableType:
    found: list[RenderableType] = []
    if rows.targets:
        found.append(table_of_targets(rows.targets, {row.key: row for row in before.targets}))
    if rows.luns:
        found.append(table(rows.luns, {row.key: row for row in before.luns}))
    return Group(*found)


def table_of_targets(
    rows: Sequence[TargetRow], before: Mapping[tuple[object, ...], TargetRow]
) -> RenderableType:
    """As ``table``."""
    found = Table(box=None, pad_edge=False)
    found.add_column("target", overflow="fold")
    for name in _OF_TARGETS:
        found.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        target = row.target
        cells = [
            plain(row.where),
            _commands(row, before.get(row.key)),
            str(target.in_flight),
            str(target.sessions),
            str(target.connections),
            str(target.logins_unfinished),
            size_words(target.memory),
            str(target.memory_waiting),
            address_words(target.addresses[0]) if target.addresses else "-",
        ]
        found.add_row(*map(Text, cells))
    return found


def _commands(row: TargetRow, old: TargetRow | None) -> str:
    if old is None or row.at <= old.at or row.target.commands < old.target.commands:
        return ""
    return f"{(row.target.commands - old.target.commands) / (row.at - old.at):.0f}"


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
