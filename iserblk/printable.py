"""What is printed or logged is what a terminal shows: no peer's text moves its cursor, or begins a
line of a log.

Texts of peers are checked where they are decoded. This is the last place, for those that a decoder
has forgotten.
"""

from __future__ import annotations

import logging
import os
import shlex


def printable(text: str) -> str:
    """``text`` with escapes, as Python writes them, in place of characters that do not print."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def shell_word(text: str) -> str:
    """``text`` as a word of a command that a person pastes into a shell. What does not print is
    escaped as bash, zsh and busybox read it."""
    if text.isprintable():
        return shlex.quote(text)
    return f"$'{''.join(map(_in_shell, text))}'"


def _in_shell(character: str) -> str:
    if character in "'\\":
        return f"\\{character}"
    if character.isprintable():
        return character
    return "".join(f"\\x{byte:02x}" for byte in os.fsencode(character))


class PrintableFormatter(logging.Formatter):
    """Writes a message as one line. A traceback behind it has its lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return printable(super().formatMessage(record))


def log_to_stderr(level: int, name: str) -> None:
    """From now on, log to stderr as ``name`` instead of anywhere else."""
    handler = logging.StreamHandler()
    handler.setFormatter(PrintableFormatter(f"{name}: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler], force=True)
