"""Throughput over time through one outage: a panel for each initiator, on one axis of time."""

from __future__ import annotations

import itertools

from iserblk.cli.drawing import Drawing, Scale, ticks, width_of
from outagelib import transactions, writer
from outagelib.ledger import Missing
from outagelib.report import Outage, Subject

_WIDTH = 900.0
_EDGE, _LEFT, _RIGHT = 20.0, 54.0, 880.0
_HEAD, _FOOT = 68.0, 34.0
_CAPTION, _PLOT, _GAP = 26.0, 60.0, 20.0  # of a panel, from above
_PANEL = _CAPTION + _PLOT + _GAP
_KIBI = 1 << 10
# Of each program: the most that it does in a second, in units of so much in ``rates``; in words.
_UNITS = {
    "records": (
        writer.RECORD * writer.PER_SECOND / _KIBI,
        _KIBI,
        "KiB/s that a program writes to its file system",
    ),
    "pgbench": (float(transactions.PER_SECOND), 1, "transactions of pgbench in a second"),
}
_KINDS = {"iserblk": "ours", "open-iscsi": "peer", "qemu-nbd": "other"}
_STEP_S, _MOST_STEPS = 30, 12  # of the axis
_MEAN_S = 3


def draw(outage: Outage) -> Drawing:
    height = _HEAD + _PANEL * len(outage.subjects) + _FOOT
    title = outage.title[0].upper() + outage.title[1:]
    words = "; ".join(f"{each.name}: {outcome(each)}" for each in outage.subjects)
    drawing = Drawing(_WIDTH, height, title, f"Throughput over time. {words}.")
    drawing.text(_EDGE, 30, title, "text title")
    most, unit, what = _UNITS[outage.program]
    about = f"{what}: {most:g} where nothing is in its way (means of {_MEAN_S} s)"
    drawing.text(_EDGE, 50, f"{about}; every initiator by default", "faint")
    end_s = outage.away_s + outage.after_s
    across = Scale(-outage.before_s, end_s, _LEFT, _RIGHT)
    for index, each in enumerate(outage.subjects):
        top = _HEAD + _PANEL * index
        _panel(drawing, outage, each, across, top, ticks(most, 2)[-1], unit)
    bottom = _HEAD + _PANEL * len(outage.subjects) - _GAP
    step = _STEP_S if outage.before_s + end_s < _MOST_STEPS * _STEP_S else 2 * _STEP_S
    second = -int(outage.before_s // step) * step
    while second <= end_s:
        drawing.line(across(second), bottom, across(second), bottom + 4, "text")
        drawing.text(across(second), bottom + 17, f"{second} s", "faint", "middle")
        second += step
    return drawing


def outcome(subject: Subject) -> str:
    """What became of a file system, in a few words."""
    pause = f"a pause of {subject.pause}" if subject.went_on else "it never goes on"
    failed = ", no error"
    if subject.failed:
        failed = f", {subject.failed} {'call fails' if subject.failed == 1 else 'calls fail'}"
    state = "" if subject.file_system == "read-write" else f", {subject.file_system}"
    return f"{pause}{failed}{state}; {_lost(subject.missing)}"


def _lost(missing: Missing) -> str:
    if missing.silent:
        return f"{_records(missing.silent)} lost without an error"
    return f"{_records(missing.told)} lost, and told" if missing.told else "nothing is lost"


def _records(number: int) -> str:
    return "1 record is" if number == 1 else f"{number} records are"


def _panel(
    drawing: Drawing, outage: Outage, subject: Subject, across: Scale, top: float, most: float,
    unit: int,
) -> None:  # fmt: skip
    kind = _KINDS.get(subject.name, "other")
    drawing.rect(_EDGE, top + 5, 12, 12, kind)
    drawing.text(_EDGE + 18, top + 15, f"{subject.name}: {outcome(subject)}")
    plot = top + _CAPTION
    up = Scale(0, most, plot + _PLOT, plot)
    shade = across(0), across(outage.away_s)
    drawing.rect(shade[0], plot, shade[1] - shade[0], _PLOT, "grid",
                 f"the target is away for {outage.away_s:.0f} s")  # fmt: skip
    words = "the target is away"
    if width_of(words) < shade[1] - shade[0]:
        drawing.text(sum(shade) / 2, plot + _PLOT / 2 + 4, words, "faint", "middle")
    for value in (0.0, most):
        drawing.line(_LEFT, up(value), _RIGHT, up(value), "grid")
        drawing.text(_LEFT - 8, up(value) + 4, f"{value:g}", "faint", "end")
    points = []
    for start, end in _spans(outage, len(subject.rates)):
        height = up(sum(subject.rates[start:end]) / (end - start) / unit)
        points += [(across(start - outage.before_s), height),
                   (across(end - outage.before_s), height)]  # fmt: skip
    drawing.path(points, kind, 2)


def _spans(outage: Outage, count: int) -> list[tuple[int, int]]:
    """The seconds of which means are drawn: one span begins with the outage."""
    marks = {0, count, *range(round(outage.before_s) % _MEAN_S, count, _MEAN_S)}
    return list(itertools.pairwise(sorted(marks)))
