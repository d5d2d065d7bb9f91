"""What was measured, and the table of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from outagelib.cases import CASES, TARGETS
from outagelib.ledger import Missing

_USUAL = ("ext4", "LIO", "records")
PROGRAMS = ("records", "pgbench")


@dataclass(frozen=True)
class Subject:
    """One initiator's part. ``pause_s``: the longest time without an acknowledged record;
    ``went_on``: some came behind it. ``failed``: calls that failed (write, fsync), the first
    of them ``first_failed_s`` after the beginning of the outage; ``errors``: in words. ``state``:
    how the file system is mounted at the end; ``whole``: on the target's disk it has nothing to
    mend, nor has what is in it. ``acknowledged``: records. ``rates``: acknowledged bytes of each
    second; of pgbench transactions."""

    name: str
    pause_s: float
    went_on: bool
    failed: int
    first_failed_s: float | None
    errors: tuple[str, ...]
    state: str
    whole: bool
    acknowledged: int
    missing: Missing
    rates: tuple[int, ...]

    @property
    def pause(self) -> str:
        return f"{self.pause_s:.0f} s" if self.went_on else "never goes on"

    @property
    def file_system(self) -> str:
        return f"{self.state}{'' if self.whole else ', damaged'}"


@dataclass(frozen=True)
class Outage:
    """One case, as it has run. ``before_s``: what the rates begin with, until the outage;
    ``away_s``: until the target could be reached again; ``after_s``: what was looked at then.
    ``target``: what it is. ``program``: what works in the file systems."""

    case: str
    file_system: str
    kernel: str
    before_s: float
    away_s: float
    after_s: float
    subjects: tuple[Subject, ...]
    target: str = "LIO"
    program: str = "records"

    @property
    def title(self) -> str:
        return f"{CASES[self.case].about} ({self.place}, {self.target})"

    @property
    def place(self) -> str:
        """The file system, and what works in it, if that is not as usual."""
        return ", ".join([self.file_system, *({self.program} - {*_USUAL})])

    @property
    def name(self) -> str:
        """Of a file: with what is not as usual."""
        more = [
            each for each in (self.file_system, self.target, self.program) if each not in _USUAL
        ]
        return "-".join([self.case, *more])


def from_json(measured: dict[str, Any]) -> Outage:
    """Raises ValueError: not what guest.py has written."""
    try:
        subjects = tuple(
            Subject(**{
                **each,
                "errors": tuple(each["errors"]),
                "missing": Missing(**each["missing"]),
                "rates": tuple(each["rates"]),
            })
            for each in measured["subjects"]
        )  # fmt: skip
        made = Outage(**{**measured, "subjects": subjects})
    except (KeyError, TypeError):
        raise ValueError("not written by scripts/outage") from None
    if made.case not in CASES:
        raise ValueError(f"no case is called {made.case}")
    if made.target not in TARGETS:
        raise ValueError(f"no target is called {made.target}")
    if made.program not in PROGRAMS:
        raise ValueError(f"no program is called {made.program}")
    return made


def read(file: Path) -> list[Outage]:
    """Raises ValueError."""
    measured = json.loads(file.read_text())
    if not isinstance(measured, list):
        raise ValueError("not written by scripts/outage")
    return [from_json(each) for each in measured]


def write(file: Path, outages: Sequence[Outage]) -> None:
    """An outage a line."""
    lines = [json.dumps(asdict(each)) for each in outages]
    file.write_text("[" + ",\n".join(lines) + "]\n")


def cells(subject: Subject) -> list[str]:
    """A row of the table."""
    lost = (subject.missing.flushed, subject.missing.silent, subject.missing.told)
    told = [subject.name, subject.pause, str(subject.failed), subject.file_system]
    return [*told, *map(str, lost)]


def table(outage: Outage) -> Table:
    made = Table(title=outage.title, title_justify="left")
    for name in ("initiator", "pause", "failed calls", "file system", "flushed, missing",
                 "lost silently", "lost, told"):  # fmt: skip
        words = name in ("initiator", "file system")
        made.add_column(name, justify="left" if words else "right", no_wrap=True)
    for each in outage.subjects:
        made.add_row(*cells(each))
    return made
