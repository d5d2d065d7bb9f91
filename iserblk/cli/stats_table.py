"""The tables of ``iserblk stats`` on a terminal: rates between two readings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from iserblk.cli.output import size_words
from iserblk.cli.states import lun_state
from iserblk.cli.stats_rows import Row, Rows, TargetRow, path_words, plain, time_words
from iserblk.cli.stats_targets import address_words
from iserblk.loop.blocking import sleep
from iserblk.metrics.reading import together

_COLUMNS = ("IOPS", "MiB/s", "mean", "p99", "in flight", "retries", "reconnects", "unflushed")
_OF_TARGETS = ("commands/s", "in flight", "sessions", "connections", "logging in", "memory",
               "waiting", "largest address")  # fmt: skip
# What a terminal shows that has fewer characters in a line than all columns need.
ALL_COLUMNS = 120
_FEW = ("where", "LUN", "IOPS", "MiB/s", "p99", "in flight", "unflushed", "state")
_FEW_OF_TARGETS = ("target", "commands/s", "in flight", "sessions", "memory", "waiting")
_MIB = 1 << 20


def watch(look: Callable[[], Rows], interval: float, nothing: str) -> None:
    """Show the tables every ``interval`` seconds, until ^C; ``nothing``: the text when there is no
    LUN and no target. Raises what ``look`` raises."""
    before = Rows()
    try:
        console = Console(highlight=False)
        with Live(console=console, auto_refresh=False) as live:
            while True:
                rows = look()
                shown = tables(rows, before, console.width) if rows else Text(nothing)
                live.update(shown, refresh=True)
                before = rows
                sleep(interval)
    except KeyboardInterrupt:
        pass  # the regular end


def tables(rows: Rows, before: Rows, width: int = ALL_COLUMNS) -> RenderableType:
    """``width``: of the terminal, characters."""
    found: list[RenderableType] = []
    if rows.targets:
        old_targets = {row.key: row for row in before.targets}
        found.append(table_of_targets(rows.targets, old_targets, width))
    if rows.luns:
        found.append(table(rows.luns, {row.key: row for row in before.luns}, width))
    return Group(*found)


def table_of_targets(
    rows: Sequence[TargetRow],
    before: Mapping[tuple[object, ...], TargetRow],
    width: int = ALL_COLUMNS,
) -> RenderableType:
    """As ``table``."""
    columns = ("target", *_OF_TARGETS) if width >= ALL_COLUMNS else _FEW_OF_TARGETS
    found = _empty(columns, folded=("target",))
    for row in rows:
        target = row.target
        cells = {
            "target": plain(row.where),
            "commands/s": _commands(row, before.get(row.key)),
            "in flight": str(target.in_flight),
            "sessions": str(target.sessions),
            "connections": str(target.connections),
            "logging in": str(target.logins_unfinished),
            "memory": size_words(target.memory),
            "waiting": str(target.memory_waiting),
            "largest address": address_words(target.addresses[0]) if target.addresses else "-",
        }
        found.add_row(*(Text(cells[name]) for name in columns))
    return found


def _empty(columns: Sequence[str], folded: Sequence[str]) -> Table:
    """``folded``: columns that take the room that the others leave."""
    found = Table(box=None, pad_edge=False)
    for name in columns:
        if name in folded:
            found.add_column(name, overflow="fold")
        else:
            found.add_column(name, justify="right", no_wrap=True)
    return found


def _commands(row: TargetRow, old: TargetRow | None) -> str:
    if old is None or row.at <= old.at or row.target.commands < old.target.commands:
        return ""
    return f"{(row.target.commands - old.target.commands) / (row.at - old.at):.0f}"


def table(
    rows: Sequence[Row], before: Mapping[tuple[object, ...], Row], width: int = ALL_COLUMNS
) -> RenderableType:
    """The table. ``before``: the rows of the previous reading. A LUN that is not among them has no
    rates yet. ``width``: of the terminal, characters."""
    columns = ("where", "LUN", *_COLUMNS, "path") if width >= ALL_COLUMNS else _FEW
    found = _empty(columns, folded=("where", "LUN", "path", "state"))
    for row in rows:
        lun = row.lun
        rates = _rates(row, before.get(row.key))
        cells = {
            "where": plain(row.where),
            "LUN": plain(lun.name),
            **dict(zip(("IOPS", "MiB/s", "mean", "p99"), rates, strict=True)),
            "in flight": str(lun.in_flight),
            "retries": str(lun.retries),
            "reconnects": str(lun.reconnects),
            "unflushed": size_words(lun.unflushed),
            "path": path_words(lun),
            "state": lun_state(lun),
        }
        found.add_row(*(Text(cells[name]) for name in columns))
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
