"""A finding of the doctor: what was checked, the result, and the remedy."""

from __future__ import annotations

from dataclasses import dataclass

OK = "ok"
WARNING = "warning"  # something will not work, but iSER will
ERROR = "error"  # iSER will not work
SKIPPED = "skipped"  # not checked, or not needed


@dataclass(slots=True, frozen=True)
class Finding:
    """The result of one check. ``name``: what was checked. ``status``: OK, WARNING, ERROR or
    SKIPPED. ``text``, ``remedy``: for users; ``remedy`` is "" if there is nothing to do.
    ``seconds``: that a step towards a portal took; None: it was not measured."""

    name: str
    status: str
    text: str
    remedy: str = ""
    seconds: float | None = None
