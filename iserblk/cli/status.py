"""``iserblk status``: everything of iserblk's that runs on this machine."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterable, Sequence

import click

from iserblk.cli.command import Command
from iserblk.cli.here import (
    Here,
    NamedLun,
    Unseen,
    Use,
    all_named,
    look_around,
    lun_name,
)
from iserblk.cli.options import json_option
from iserblk.cli.output import print_json, size_words
from iserblk.cli.states import AWAY, KILLED, SILENT
from iserblk.cli.stats_rows import plain
from iserblk.errors import PermissionDenied
from iserblk.loop.clock import since_epoch
from iserblk.printable import shell_word

_HEAD = ("STATE", "WHAT", "WHERE", "LUN", "SIZE", "UNFLUSHED", "SINCE")
_FOLDED = (2, 3)  # columns of which a narrow terminal shows less
_LEAST = 8  # characters of these
_LONG_AGO_S = 300 * 86400
_RED, _PLAIN = "\x1b[31m", "\x1b[0m"
_NOTHING = "nothing of iserblk runs here"


@click.command("status", cls=Command)
@json_option
def command(as_json: bool) -> None:
    """Show everything of iserblk's that runs on this machine, a line for each LUN in use, each
    target, and each session of these.

    Root sees what all users run, another user what that user runs; what cannot be looked at is
    named on stderr. A process that was killed stays in the list until what it has left is cleaned
    up: the lines below the table say how.
    """
    here = look_around(sessions=True)
    named = all_named()
    if as_json:
        print_json(here_json(here, named))
    else:
        for line in lines(here.uses, named):
            click.echo(line)
    end_unseen(here.unseen, found=bool(here.uses))


def end_unseen(unseen: Sequence[Unseen], *, found: bool) -> None:
    """Name what could not be looked at on stderr. Raises PermissionDenied where nothing was
    ``found`` elsewhere: there may be something all the same."""
    words = [plain(each.words) for each in unseen]
    if words and not found:
        raise PermissionDenied(f"not looked at: {'; '.join(words)}")
    for each in words:
        click.echo(f"iserblk: not looked at: {each}", err=True)


# --- for people ----------------------------------------------------------------------------------


def lines(uses: Sequence[Use], named: Sequence[NamedLun]) -> list[str]:
    """What is shown of ``uses``: the table, and what to do about those that are bad."""
    if not uses:
        return [_NOTHING]
    now = since_epoch()
    bad: list[bool] = [False]
    rows: list[Sequence[str]] = [_HEAD]
    for use in uses:
        bad.append(use.bad)
        rows.append(_row(use, named, now))
        for session in _sessions(use):
            bad.append(False)
            rows.append(session)
    widths = _widths(rows)
    red, plain_again = (_RED, _PLAIN) if _colours() else ("", "")
    shown = []
    for cells, is_bad in zip(rows, bad, strict=True):
        state, *rest = [_folded(cell, width) for cell, width in zip(cells, widths, strict=True)]
        before, after = (red, plain_again) if is_bad else ("", "")
        shown.append(f"{before}{state}{after}  {'  '.join(rest)}".rstrip())
    return [*shown, *remedies(uses)]


def _row(use: Use, named: Sequence[NamedLun], now: float) -> tuple[str, ...]:
    cells = (
        use.state,
        use.what,
        use.where,
        lun_name(use, named),
        "" if use.size is None else size_words(use.size),
        "" if use.unflushed is None else size_words(use.unflushed),
        since_words(use.since, now),
    )
    return tuple(plain(each) or "-" for each in cells)


def _sessions(use: Use) -> Iterable[tuple[str, ...]]:
    for each in use.sessions:
        cells = ("logged in", "session", each.address, each.initiator, "", "", "")
        yield tuple(plain(cell) or "-" for cell in cells)
    more = use.session_count - len(use.sessions)
    if more > 0:
        yield "logged in", "sessions", "-", f"{more}{' more' if use.sessions else ''}", *"---"


def since_words(since: int | None, now: float) -> str:
    """Local time: today's; that of another day with month and day; the date alone, if it was long
    ago."""
    if since is None:
        return "-"
    then, today = time.localtime(since), time.localtime(now)
    if then[:3] == today[:3]:
        return time.strftime("%H:%M", then)
    return time.strftime("%Y-%m-%d" if now - since > _LONG_AGO_S else "%m-%d %H:%M", then)


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    """Of the columns: as wide as their longest cell, or less where the terminal is narrower."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if not sys.stdout.isatty():
        return widths
    left = shutil.get_terminal_size().columns
    while sum(widths) + 2 * (len(widths) - 1) > left:
        widest = max(_FOLDED, key=lambda column: widths[column])
        if widths[widest] <= _LEAST:
            break
        widths[widest] -= 1
    return widths


def _folded(cell: str, width: int) -> str:
    """``cell`` in ``width`` characters; of a longer one both ends."""
    if len(cell) <= width:
        return cell.ljust(width)
    head = (width - 1) // 3
    return f"{cell[:head]}…{cell[head + 1 - width :]}"


def _colours() -> bool:
    """Whether the terminal shows any, and may (https://no-color.org)."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return sys.stdout.isatty()


def remedies(uses: Iterable[Use]) -> list[str]:
    """What to do about those that are bad: a line for each device and mount, and for each kind of
    all else, with the first of it."""
    found: dict[tuple[str, ...], str] = {}
    for use in uses:
        kind = use.state, use.what, use.where if use.what in ("attach", "mount") else ""
        if kind in found or not (words := remedy_of(use)):
            continue
        found[kind] = plain(f"{use.what} {use.where}: {_state_words(use)}: {words}")
    return list(found.values())


def _state_words(use: Use) -> str:
    if use.away_since is None:
        return use.state
    return f"{use.state} since {since_words(use.away_since, since_epoch())}, and requests wait"


def remedy_of(use: Use) -> str:
    """What to do about the state of ``use``; "": nothing, or it is not known."""
    where = shell_word(use.where)
    if use.state == KILLED and use.what == "attach":
        return f"`iserblk attach --replace URL {where}` goes on, `iserblk detach {where}` ends it"
    if use.state == KILLED and use.what == "mount":
        return f"`iserblk umount {where}` cleans up"
    if use.state == KILLED:
        return f"start it there again; or forget it: `rm {shell_word(use.metrics)}`"
    if use.state == AWAY:
        return f"`iserblk doctor {use.url}` looks for the reason" if use.url else ""
    if use.state == SILENT:
        return "its process hangs, or has too much to do; its log may say more"
    return ""


# --- for programs --------------------------------------------------------------------------------


def here_json(here: Here, named: Sequence[NamedLun]) -> dict[str, object]:
    return {
        "uses": [use_json(each, named) for each in here.uses],
        "unseen": [
            {"user": each.user or None, "places": list(each.places), "why": each.why}
            for each in here.unseen
        ],
    }


def use_json(use: Use, named: Sequence[NamedLun]) -> dict[str, object]:
    return {
        "state": use.state,
        "bad": use.bad,
        "what": use.what,
        "where": use.where,
        "name": next((each.name for each in named if each.is_in(use)), None),
        "url": use.url or None,
        "target": use.target or None,
        "lun": use.lun,
        "size": use.size,
        "unflushed_bytes": use.unflushed,
        "since": use.since,
        "away_since": use.away_since,
        "pid": use.pid or None,
        "uid": int(use.uid) if use.uid else None,
        "metrics": use.metrics or None,
        "session_count": use.session_count,
        "sessions": [
            {"initiator": each.initiator, "address": each.address or None} for each in use.sessions
        ],
    }
