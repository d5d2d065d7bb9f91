"""Throughput over time through one outage: a panel for each initiator, on one axis of time."""

from __future__ import annotations

from iserblk.cli.drawing import Drawing, Scale, ticks, width_of
from outagelib.ledger import Missing
from outagelib.report import Outage, Subject

_WIDTH = 900.0
_EDGE, _LEFT, _RIGHT = 20.0, 54.0, 880.0
_HEAD, _FOOT = 68.0, 34.0
_CAPTION, _PLOT, _GAP = 26.0, 60.0, 20.0  # of a panel, from above
_PANEL = _CAPTION + _PLOT + _GAP
_KIBI = 1 << 10
_KINDS = {"iserblk": "ours", "open-iscsi": "peer", "qemu-nbd": "other"}
_STEP_S = 30


def draw(outage: Outage) -> Drawing:
    height = _HEAD + _PANEL * len(outage.subjects) + _FOOT
    title = outage.title[0].upper() + outage.title[1:]
    words = "; ".join(f"{each.name}: {outcome(each)}" for each in outage.subjects)
    drawing = Drawing(_WIDTH, height, title, f"Throughput over time. {words}.")
    drawing.text(_EDGE, 30, title, "text title")
    drawing.text(_EDGE, 50, "KiB/s that a program writes to its file system, in each second; every "
                 "initiator as it is by default", "faint")  # fmt: skip
    end_s = outage.away_s + outage.after_s
    across = Scale(-outage.before_s, end_s, _LEFT, _RIGHT)
    most = max((rate for each in outage.subjects for rate in each.rates), default=0.0) / _KIBI
    for index, each in enumerate(outage.subjects):
        _panel(drawing, outage, each, across, _HEAD + _PANEL * index, ticks(most, 2)[-1])
    bottom = _HEAD + _PANEL * len(outage.subjects) - _GAP
    second = -int(outage.before_s // _STEP_S) * _STEP_S
    while second <= end_s:
        drawing.line(across(second), bottom, across(second), bottom + 4, "text")
        drawing.text(across(second), bottom + 17, f"{second} s", "faint", "middle")
        second += _STEP_S
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
        return f"{missing.silent} records are lost without an error"
    return f"{missing.told} records are lost, and told" if missing.told else "nothing is lost"


def _panel(
    drawing: Drawing, outage: Outage, subject: Subject, across: Scale, top: float, most: float
) -> None:
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
    for second, rate in enumerate(subject.rates):
        at, height = second - outage.before_s, up(rate / _KIBI)
        points += [(across(at), height), (across(min(at + 1, across.high)), height)]
    drawing.path(points, kind, 2)
