"""``iserblk bench --plot``: the latencies of one run, and its throughput over time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from iserblk.cli.drawing import Drawing, Scale, decades, short, ticks, time_text, width_of
from iserblk.cli.histogram import Histogram

_WIDTH = 860
_LEFT, _RIGHT = 70.0, 790.0
_HEIGHT = 580
_TOP_PANEL = (135.0, 290.0)
_LOW_PANEL = (380.0, 530.0)
_LINE = 13.0  # of the words above a panel
_PER_OCTAVE = 4  # bars between a latency and twice that
MARKS = (50.0, 99.0, 99.9)


def bars(latencies: Histogram) -> list[tuple[float, float, float]]:
    """The histogram: from and to in µs, and the share of all requests in percent."""
    found: dict[int, int] = {}
    for low, high, count in latencies.buckets():
        place = math.floor(math.log2(max((low + high) / 2, 1.0)) * _PER_OCTAVE)
        found[place] = found.get(place, 0) + count
    return [
        (
            2 ** (place / _PER_OCTAVE) / 1e3,
            2 ** ((place + 1) / _PER_OCTAVE) / 1e3,
            100 * count / latencies.count,
        )
        for place, count in sorted(found.items())
    ]


def rates(samples: Sequence[tuple[float, int]]) -> list[tuple[float, float, float]]:
    """From and to in seconds, and requests per second. ``samples``: times, and how many requests
    had ended by then."""
    return [
        (before, now, (more - less) / (now - before))
        for (before, less), (now, more) in pairwise(samples)
        if now > before
    ]


def draw(
    title: str, url: str, latencies: Histogram, samples: Sequence[tuple[float, int]], block: int
) -> Drawing:
    """The picture. ``block``: bytes of a request."""
    mean = latencies.count / samples[-1][0]
    words = ", ".join(f"p{each:g} {time_text(latencies.percentile(each) / 1e3)}" for each in MARKS)
    drawing = Drawing(_WIDTH, _HEIGHT, title, f"{url}: {short(mean)} requests/s; {words}.")
    drawing.text(20, 30, title, "text title")
    drawing.text(20, 50, url, "faint")
    _latencies(drawing, latencies)
    _throughput(drawing, samples, block, mean)
    return drawing


def _latencies(drawing: Drawing, latencies: Histogram) -> None:
    top, bottom = _TOP_PANEL
    drawing.text(20, top - 52, "Latency: share of the requests, %")
    found = bars(latencies)
    axis = decades(found[0][0], found[-1][1]) if found else [1.0, 10.0]
    across = Scale(axis[0], axis[-1], _LEFT, _RIGHT, log=True)
    marks = ticks(max((each[2] for each in found), default=0.0), 4)
    up = Scale(0, marks[-1], bottom, top)
    for value in marks:
        drawing.line(_LEFT, up(value), _RIGHT, up(value), "grid")
        drawing.text(_LEFT - 8, up(value) + 4, short(value), "faint", "end")
    for value in axis:
        drawing.line(across(value), bottom, across(value), bottom + 5, "grid")
        drawing.text(across(value), bottom + 20, time_text(value), "faint", "middle")
    for low, high, share in found:
        left, right = across(low), across(high)
        drawing.rect(
            left + 0.5, up(share), right - left - 1, bottom - up(share), "ours",
            f"{time_text(low)} to {time_text(high)}: {share:.3g} %",
        )  # fmt: skip
    # The line of the lowest percentile is the longest, so none goes through the words of another.
    for index, percent in enumerate(reversed(MARKS) if latencies.count else ()):
        value = latencies.percentile(percent) / 1e3
        x, y = across(value), top - 4 - _LINE * index
        label = f"p{percent:g} {time_text(value)}"
        drawing.line(x, y - 8, x, bottom, "mark")
        drawing.text(min(x + 4, _WIDTH - 8 - width_of(label)), y, label)


def _throughput(
    drawing: Drawing, samples: Sequence[tuple[float, int]], block: int, mean: float
) -> None:
    top, bottom = _LOW_PANEL
    drawing.text(20, top - 22, "Throughput over time: requests/s")
    drawing.text(_WIDTH - 20, top - 22, "MB/s", "text", "end")
    found = rates(samples)
    across = Scale(0, samples[-1][0], _LEFT, _RIGHT)
    marks = ticks(max((each[2] for each in found), default=0.0), 4)
    up = Scale(0, marks[-1], bottom, top)
    for value in marks:
        drawing.line(_LEFT, up(value), _RIGHT, up(value), "grid")
        drawing.text(_LEFT - 8, up(value) + 4, short(value), "faint", "end")
        drawing.text(_RIGHT + 8, up(value) + 4, short(value * block / 1e6), "faint")
    for value in ticks(samples[-1][0], 8):
        if value <= samples[-1][0] * 1.001:
            drawing.line(across(value), bottom, across(value), bottom + 5, "grid")
            drawing.text(across(value), bottom + 20, f"{value:g} s", "faint", "middle")
    drawing.line(_LEFT, up(mean), _RIGHT, up(mean), "peer")
    drawing.path(
        [(across(t), up(rate)) for start, end, rate in found for t in (start, end)], "ours", 2
    )
    drawing.text(_LEFT, bottom + 40, f"The straight line is the mean, {short(mean)} requests/s.",
                 "faint")  # fmt: skip
