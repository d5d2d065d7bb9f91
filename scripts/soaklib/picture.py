"""Memory, descriptors, threads and latencies over time: a panel for each, on one axis of time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from iserblk.cli.drawing import Drawing, Scale, decades, ticks, time_text
from soaklib.latencies import Latencies
from soaklib.sampling import Sample

_WIDTH = 900.0
_EDGE, _LEFT, _RIGHT = 20.0, 64.0, 730.0
_HEAD = 44.0
_CAPTION, _PLOT, _GAP = 22.0, 150.0, 26.0
_PANEL = _CAPTION + _PLOT + _GAP
_LINE = 15.0  # of the legend
_KINDS = ("ours", "peer", "mark", "other", "text", "faint")
_MOST_POINTS = 400  # of a line

Line = Sequence[tuple[float, float]]  # seconds, value


def draw(
    samples: Mapping[str, Sequence[Sample]], minutes: Mapping[str, Mapping[int, Latencies]],
    title: str,
) -> Drawing:  # fmt: skip
    panels: list[tuple[str, Mapping[str, Line], bool]] = [
        ("resident memory in MiB", _of(samples, lambda each: each.memory / 2**20), False),
        ("descriptors", _of(samples, lambda each: float(each.descriptors)), False),
        ("threads", _of(samples, lambda each: float(each.threads)), False),
    ]
    for percent in (50, 99):
        by_minute: dict[str, Line] = {
            name: [
                ((minute + 0.5) * 60, found.percentile(percent) * 1000)
                for minute, found in sorted(each.items())
                if found.count
            ]
            for name, each in sorted(minutes.items())
            if not name.startswith("visitor")
        }
        panels.append((f"latency, percentile {percent}, by minute", by_minute, True))
    panels = [panel for panel in panels if any(panel[1].values())]
    ends = [at for _, lines, _ in panels for line in lines.values() for at, _ in line]
    height = _HEAD + _PANEL * len(panels) + 10
    drawing = Drawing(_WIDTH, height, title, "; ".join(what for what, _, _ in panels))
    drawing.text(_EDGE, 28, title, "text title")
    marks = ticks(max(ends, default=1.0) / 60, 8)
    across = Scale(0, marks[-1] * 60, _LEFT, _RIGHT)
    for index, (what, lines, log) in enumerate(panels):
        _panel(drawing, _HEAD + _PANEL * index, what, lines, log, across, marks)
    return drawing


def _of(
    samples: Mapping[str, Sequence[Sample]], value: Callable[[Sample], float]
) -> dict[str, Line]:
    return {name: [(each.at_s, value(each)) for each in of_one] for name, of_one in samples.items()}


def _panel(
    drawing: Drawing, top: float, what: str, lines: Mapping[str, Line], log: bool, across: Scale,
    marks: Sequence[float],
) -> None:  # fmt: skip
    drawing.text(_EDGE, top + 14, what)
    plot = top + _CAPTION
    values = [value for line in lines.values() for _, value in line]
    rungs = decades(min(values), max(values)) if log else ticks(max(values), 4)
    if len(rungs) == 1:
        rungs = [*rungs, rungs[0] * 10]
    up = Scale(rungs[0], rungs[-1], plot + _PLOT, plot, log)
    for value in rungs:
        drawing.line(_LEFT, up(value), _RIGHT, up(value), "grid")
        words = time_text(value) if log else f"{value:g}"
        drawing.text(_LEFT - 8, up(value) + 4, words, "faint", "end")
    for minute in marks:
        drawing.text(across(minute * 60), plot + _PLOT + 16, f"{minute:g} min", "faint", "middle")
    for index, (name, line) in enumerate(lines.items()):
        kind = _KINDS[index % len(_KINDS)]
        width = 1.5 if index < len(_KINDS) else 3.0
        step = -(-len(line) // _MOST_POINTS) or 1
        drawing.path([(across(at), up(value)) for at, value in line[::step]], kind, width)
        drawing.line(_RIGHT + 14, plot + 6 + index * _LINE, _RIGHT + 34, plot + 6 + index * _LINE,
                     kind, width)  # fmt: skip
        drawing.text(_RIGHT + 40, plot + 10 + index * _LINE, name)
