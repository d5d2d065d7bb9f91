"""One finding: what was looked at, how it is, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass

OK = "ok"
WARNING = "warning"  # something will not work; iSER itself does
ERROR = "error"  # iSER will not work
SKIPPED = "skipped"  # not looked at, or not needed


@dataclass(slots=True, frozen=True)
class Finding:
    """``text`` and ``remedy`` are words for people; no remedy where nothing needs to be done."""

    name: str
    status: str
    text: str
    remedy: str = ""
