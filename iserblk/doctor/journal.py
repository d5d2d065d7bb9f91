"""The last lines that iserblk has logged, and those of the kernel about what iserblk uses."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from iserblk.doctor.machine import Machine

LINES = 200  # of iserblk
KERNEL_LINES = 50
_KERNEL_SEEN = 5000  # lines of the kernel of which these are chosen
_LONGEST = 1000  # characters of a line, behind which it is cut
_PATIENCE_S = 30.0
_MOST_BYTES = 32 << 20

_NAMES = ("iserblk", "iserblk-target", "iserblk-nbd", "iserblk-mount", "iserblk-csi",
          "iserblk-exporter")  # fmt: skip
_UNITS = "iserblk-*"
_OF_KERNEL = re.compile(
    r"\b(?:nbd\d*|ib_|rdma|rxe|siw|infiniband|iser|iscsi|mlx|blocked for more than"
    r"|out of memory|oom)",
    re.IGNORECASE,
)
# Files of a syslog daemon, where there is no journal.
_FILES = ("/var/log/syslog", "/var/log/messages")


@dataclass(slots=True, frozen=True)
class Line:
    """``time``: seconds since 1970; 0: not known. ``source``: of whom, ``kernel`` for the
    kernel."""

    time: float
    source: str
    text: str


@dataclass(slots=True, frozen=True)
class Log:
    """``lines``: the last ones, in the order of their times. ``unread``: what was not read → why:
    if there is such a thing, lines may be missing."""

    lines: list[Line]
    unread: dict[str, str]


def last_lines(machine: Machine) -> Log:
    unread: dict[str, str] = {}
    path = machine.program("journalctl")
    if path is None:
        return Log(_of_files(machine, unread), unread)
    call = [str(machine.path(path)), "--no-pager", "--quiet", "--output=json"]
    devices = [name for name in machine.names("/sys/block", "nbd*") if name[3:].isdigit()]
    names = [f"--identifier={each}" for each in (*_NAMES, *(f"iserblk-{each}" for each in devices))]
    found = _lines([*call, f"--lines={LINES}", *names], unread)
    # A unit's lines of systemd, and those that Python writes where no log is open.
    found += _lines([*call, f"--lines={LINES}", f"--unit={_UNITS}"], unread)
    found = sorted({(each.time, each.source, each.text): each for each in found}.values(),
                   key=lambda line: line.time)[-LINES:]  # fmt: skip
    kernel = _lines([*call, f"--lines={_KERNEL_SEEN}", "--dmesg"], unread)
    found += [each for each in kernel if _OF_KERNEL.search(each.text)][-KERNEL_LINES:]
    if os.geteuid() and not unread and not _may_read(machine):
        unread["the system's journal"] = "root, and members of the group systemd-journal, may"
    return Log(sorted(found, key=lambda line: line.time), unread)


def _may_read(machine: Machine) -> bool:
    """Whether this user sees more of the journal than the user's own lines."""
    journals = machine.entries("/var/log/journal", "*/system.journal")
    journals += machine.entries("/run/log/journal", "*/system.journal")
    return not journals or any(os.access(each, os.R_OK) for each in journals)


def _lines(words: Sequence[str], unread: dict[str, str]) -> list[Line]:
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env={**os.environ, "LC_ALL": "C"},
            timeout=_PATIENCE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        unread["the journal"] = f"journalctl did not end within {_PATIENCE_S:g} s"
        return []
    except OSError as error:
        unread["the journal"] = error.strerror or str(error)
        return []
    said = done.stderr.decode(errors="replace").strip()
    # Some versions end with 1 where they find no lines, and where no unit of such a name has any.
    if done.returncode and said and not said.endswith("No data available"):
        unread["the journal"] = said.splitlines()[0]
    found = [parse_line_untrusted(each) for each in done.stdout[-_MOST_BYTES:].splitlines()]
    return [each for each in found if each is not None]


def parse_line_untrusted(text: bytes) -> Line | None:
    """A line of ``journalctl --output=json``, whose message any program may have written; None: it
    is no such line."""
    try:
        values = json.loads(text.decode(errors="replace"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(values, dict):
        return None
    time = _text(values.get("__REALTIME_TIMESTAMP"))
    source = _text(values.get("SYSLOG_IDENTIFIER")) or _text(values.get("_COMM"))
    unit = _text(values.get("UNIT"))  # of systemd's own lines about a unit
    return Line(
        int(time) / 1e6 if time.isascii() and time.isdigit() and len(time) < 20 else 0.0,
        f"{source} ({unit})" if unit else source,
        _text(values.get("MESSAGE")),
    )


def _text(value: object) -> str:
    """A field: text, or a list of bytes where it is no text, or of such where there are several."""
    if isinstance(value, list):
        if all(isinstance(each, int) and 0 <= each < 256 for each in value):
            return bytes(value).decode(errors="replace")
        return " ".join(_text(each) for each in value if not isinstance(each, list))
    return value if isinstance(value, str) else ""


def cut(text: str) -> str:
    """A line of a log, as long as a report has it. To be called when secrets are hidden: the part
    of one would not be found."""
    return f"{text[:_LONGEST]}…" if len(text) > _LONGEST else text


def _of_files(machine: Machine, unread: dict[str, str]) -> list[Line]:
    """What syslog has in a file. Times stay in the text, as every daemon writes them in its way."""
    for name in _FILES:
        path = machine.path(name)
        if not path.exists():
            continue
        try:
            with path.open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - _MOST_BYTES))
                text = file.read(_MOST_BYTES).decode(errors="replace")
        except OSError as error:
            unread[str(path)] = error.strerror or str(error)
            continue
        lines = [line for line in text.splitlines() if "iserblk" in line]
        return [Line(0.0, name, line) for line in lines[-LINES:]]
    if not unread:
        unread["a log"] = "there is neither a journal of systemd nor a file of syslog here"
    return []
