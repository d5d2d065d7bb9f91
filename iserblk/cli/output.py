"""What commands print: aligned text for people, JSON for scripts (docs/json.md)."""

from __future__ import annotations

import errno
import json
import logging
import sys
from collections.abc import Iterable, Sequence

import click

from iserblk.errors import IserblkError
from iserblk.printable import printable

log = logging.getLogger(__name__)


def size_words(size: float) -> str:
    """Bytes with a binary unit: 1536 is "1.5 KiB"."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.{0 if unit == 'bytes' else 1}f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def print_json(value: object, *, err: bool = False) -> None:
    """``err``: on stderr. Characters that do not print can be in strings only, and are escaped
    there."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    click.echo("".join(map(_in_json, text)), err=err)


def _in_json(character: str) -> str:
    if character.isprintable() or character == "\n":
        return character
    if ord(character) < 0x10000:
        return f"\\u{ord(character):04x}"
    return json.dumps(character)[1:-1]  # two surrogates


def end_partly(wrong: Sequence[str], what: str = "left out") -> None:
    """Behind what is printed of a list: name on stderr what could not be read, and end with status
    1. Does nothing where there is no such thing. ``what``: became of it."""
    for words in wrong:
        log.error("%s: %s", what, words)
    if wrong:
        sys.exit(IserblkError.exit_status)


def system_words(error: OSError) -> str:
    """What an error of the system is about that no part of iserblk has put into words."""
    words = error.strerror or str(error)
    if error.filename:
        return f"{error.filename}: {words}"
    if error.errno in (errno.EBADF, errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"cannot write to stdout: {words}"  # the files of a LUN have errors of ours
    return f"the system refused: {words}"


def print_table(title: str, rows: Iterable[tuple[str, str]]) -> None:
    """A title, and aligned name-value lines below it."""
    rows = [(printable(name), printable(value)) for name, value in rows]
    width = max(len(name) for name, _ in rows)
    click.echo(printable(title))
    for name, value in rows:
        click.echo(f"  {name:<{width}}  {value}")


def yes_no(value: bool) -> str:
    return "yes" if value else "no"
