"""``iserblk stats``: shows requests and latencies of the LUNs that are in use here, and what the
peers of targets make these hold."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from textwrap import wrap

import click

from iserblk.cli.command import Command
from iserblk.cli.here import Unseen, look_around, luns_of, uses_of
from iserblk.cli.options import Seconds, json_option
from iserblk.cli.output import print_json, size_words
from iserblk.cli.stats_rows import Row, Rows, TargetRow, path_words, plain, time_words
from iserblk.cli.stats_targets import target_json, target_lines
from iserblk.cli.status import end_unseen
from iserblk.errors import BadArgument
from iserblk.loop.clock import monotonic
from iserblk.metrics.address import (
    Address,
    directory,
    parse_address,
    socket_of,
    unit_directories,
    words,
)
from iserblk.metrics.places import Source, in_directory
from iserblk.metrics.reading import ConnectionReading, OperationReading, ProcessReading, together
from iserblk.metrics.scraping import scrape
from iserblk.named.files import load
from iserblk.named.resolving import names_lun
from iserblk.printable import printable
from iserblk.url import is_url

WIDTH = 80  # characters of a line of the report
_NAMES = ("iqn.", "eui.", "naa.")  # of targets
_INTERVAL_S = 1.0
_NOTHING = "no LUN is in use here by attach, mount or nbd, and no target serves"


@click.command("stats", cls=Command)
@click.argument("what", metavar="[WHAT]", required=False)
@json_option
@click.option(
    "--interval",
    type=Seconds(0.1, 3600),
    default=None,
    metavar="S",
    help=f"On a terminal, seconds between two updates of the table. Default {_INTERVAL_S:g}.",
)
def command(what: str | None, as_json: bool, interval: float | None) -> None:
    """Show the LUNs that your attach, mount and nbd commands have in use, and your targets; or what
    WHAT names.

    WHAT is a named LUN, a device (/dev/nbd0), a mount point, an NBD socket or address, the IQN of a
    target, or the value of metrics=. Root sees what all users have; what cannot be looked at is
    named on stderr. On a terminal, a table shows the current rates until ^C. Otherwise one
    report is printed, with numbers since the LUNs were opened, or the targets began.
    """
    if as_json:
        if interval is not None:
            raise click.UsageError("--interval is for the table; --json prints one report.")
        found, unseen = _look(what)
        luns = [_json(row) for row in found.luns]
        print_json({"luns": luns, "targets": [target_json(row) for row in found.targets]})
        end_unseen(unseen, found=bool(found))
    elif sys.stdout.isatty():
        from iserblk.cli.stats_table import watch  # noqa: PLC0415 - rich takes a while

        watch(lambda: _look(what)[0], interval or _INTERVAL_S, _nothing(_look(what)[1]))
    else:
        found, unseen = _look(what)
        if found or not unseen:
            _report(found)
        end_unseen(unseen, found=bool(found))


def _nothing(unseen: Sequence[Unseen]) -> str:
    return "; ".join([_NOTHING, *(f"not looked at: {plain(each.words)}" for each in unseen)])


# --- asking --------------------------------------------------------------------------------------


def _look(what: str | None) -> tuple[Rows, list[Unseen]]:
    """What WHAT names, and what could not be looked at; raises what ``scrape`` raises. Without
    WHAT, all processes: those that do not answer are left out, because they may just be ending."""
    if what is not None and not names_lun(what):
        name, address = _find(what)
        return _rows(name, scrape(address), address, monotonic()), []
    here = look_around()
    rows = Rows()
    for answer in here.answers:
        if answer.reading is not None:
            place = answer.place
            rows.add(_rows(place.where, answer.reading, place.address, answer.at))
    if what is None:
        return rows, here.unseen
    luns = luns_of(load(what))
    named = Rows(
        [
            row
            for row in rows.luns
            for lun in [row.lun]
            if any(each.has(lun.target, lun.lun, lun.url, lun.portal) for each in luns)
        ]
    )
    if not named:
        where = [f"{use.what} {use.where}".rstrip() for use in uses_of(luns, here)]
        others = "".join(f"; not looked at: {plain(each.words)}" for each in here.unseen)
        used = f"in use by {', '.join(where)}, which serves no metrics" if where else "not in use"
        raise BadArgument(f"{what}: {used} here: there is nothing to show{others}")
    return named, []


def _of_units() -> list[Source]:
    """Their users may be others, which could put links to whatever there: these do not count."""
    return [source for each in unit_directories() if (source := in_directory(each)) is not None]


def _rows(where: str, process: ProcessReading, address: Address, at: float) -> Rows:
    of = where, words(address), process.pid, process.version, at
    return Rows(
        [Row(*of, lun) for lun in process.luns],
        [TargetRow(*of, target) for target in process.targets],
    )


def _find(what: str) -> tuple[str, Address]:
    """The place that WHAT names, and the address of its metrics. A place with default metrics comes
    before a metrics socket of that path: an NBD socket's path could be either."""
    path = os.path.abspath(what)
    names = (what, path, f"/dev/{what}")
    own = directory()
    if own is not None:
        for place in names:
            if (there := socket_of(place, own)).exists():
                return place, there
    for source in _of_units():
        for each in source.places:
            for place in names:
                if isinstance(each.address, Path) and each.address == socket_of(
                    place, each.address.parent
                ):
                    return place, each.address
    if is_url(what):  # it may have a secret
        raise BadArgument(
            "a URL stands in place of the device, mount point or socket: `iserblk status` shows"
            " where a LUN is in use; name that place"
        )
    if "/" in what:
        if Path(path).is_socket():
            return path, Path(path)
    elif ":" in what and not what.startswith(_NAMES):
        return what, parse_address(what, "stats")
    raise BadArgument(
        f"{what}: no LUN of that name, and no device, mount point, socket or target that serves"
        " metrics; `iserblk status` lists what is in use here"
    )


# --- showing -------------------------------------------------------------------------------------


def _report(rows: Rows) -> None:
    if not rows:
        click.echo(_NOTHING)
    for target in rows.targets:
        title = f"{plain(target.where)}: target {plain(target.target.url)}"
        _print(title, [("process", str(target.pid)), *target_lines(target.target)])
    for row in rows.luns:
        lun = row.lun
        lines = [
            ("process", str(row.pid)),
            ("path", path_words(lun)),
            ("commands in flight", str(lun.in_flight)),
            ("commands sent again", str(lun.retries)),
            ("connections", f"{lun.connections} of {lun.wanted}"),
            *[(f"connection {each.cid}", _connection_words(each)) for each in lun.per_connection],
            ("reconnects", f"{lun.reconnects}, commands replayed {lun.replayed}"),
            ("recoveries", f"{lun.recovered}, tasks reassigned {lun.reassigned}"),
            ("PDUs lost to digests", f"{lun.damaged}, SNACKs {lun.snacks}"),
            ("commands aborted", f"{lun.aborted}, LUN resets {lun.resets}"),
            ("unflushed", size_words(lun.unflushed)),
        ]
        every = together(list(lun.operations.values()))
        for name, operation in [*lun.operations.items(), ("all", every)]:
            lines.append((name, _operation_words(operation)))
        _print(f"{plain(row.where)}: {plain(lun.name)}, {plain(lun.url)}", lines)


def _print(title: str, rows: Iterable[tuple[str, str]]) -> None:
    """As ``print_table``, in lines of WIDTH characters. A word that is longer, as a URL may be, has
    a line of its own."""
    rows = [(printable(name), printable(value)) for name, value in rows]
    width = max(len(name) for name, _ in rows)
    _fold("", printable(title), " " * 4)
    for name, value in rows:
        _fold(f"  {name:<{width}}  ", value, " " * (width + 4))


def _fold(head: str, text: str, indent: str) -> None:
    folded = wrap(
        text,
        WIDTH,
        initial_indent=head,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    click.echo("\n".join(folded))


def _connection_words(connection: ConnectionReading) -> str:
    where = plain(f"{connection.portal} ({connection.provider})")
    return (
        f"{where}, {connection.in_flight} in flight, {connection.commands} commands, "
        f"{size_words(connection.bytes)}"
    )


def _operation_words(operation: OperationReading) -> str:
    if not operation.requests:
        return "none"
    errors = f", {operation.errors} failed" if operation.errors else ""
    return (
        f"{operation.requests} requests, {size_words(operation.bytes)}, "
        f"mean {time_words(operation.mean_us)}, p99 {time_words(operation.percentile_us(99))}"
        f"{errors}"
    )


def _json(row: Row) -> dict[str, object]:
    lun = row.lun
    return {
        "where": row.where,
        "address": row.address,
        "pid": row.pid,
        "version": row.version,
        "name": lun.name,
        "url": lun.url,
        "target": lun.target,
        "lun": lun.lun,
        "size": lun.size,
        "connected": lun.connected,
        "away_since": lun.away_since or None,
        "portal": lun.portal,
        "provider": lun.provider,
        "in_flight": lun.in_flight,
        "retries": lun.retries,
        "reconnects": lun.reconnects,
        "replayed": lun.replayed,
        "aborted": lun.aborted,
        "resets": lun.resets,
        "connections": lun.connections,
        "connections_wanted": lun.wanted,
        "recoveries": lun.recovered,
        "reassigned": lun.reassigned,
        "snacks": lun.snacks,
        "damaged_pdus": lun.damaged,
        "per_connection": [asdict(each) for each in lun.per_connection],
        "unflushed_bytes": lun.unflushed,
        "operations": {
            name: {
                "requests": operation.requests,
                "bytes": operation.bytes,
                "errors": operation.errors,
                "seconds": operation.seconds,
                "latency_us": {
                    "mean": operation.mean_us,
                    "p50": operation.percentile_us(50),
                    "p99": operation.percentile_us(99),
                },
                "histogram_us": operation.histogram(),
            }
            for name, operation in lun.operations.items()
        },
    }
