"""The tables of scripts/bench as pictures: for each section its rates, beside those of peers and
ceilings, and its latencies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchlib.goals import PEERS, peer_of
from benchlib.report import rate_text
from benchlib.results import Row, ratio
from iserblk.cli.drawing import Drawing, Scale, decades, short, ticks, time_text, width_of

_WIDTH = 900.0
_EDGE = 20.0
_BAR = 18.0  # from one row to the next
_PANEL = 46.0  # of a panel, without its rows
_HEAD = 86.0
_MEBI = 1 << 20
_LEGEND = {"ours": "iserblk", "peer": "what it is compared with", "other": "others, and ceilings"}


def write_plots(directory: Path, rows: Sequence[Row]) -> list[Path]:
    """Draw every section of which something was measured. Returns the files that were written, in
    ``directory``, which exists."""
    written = []
    for section in dict.fromkeys(row.section for row in rows):
        measured = [
            row for row in rows if row.section == section and row.samples and not row.missing
        ]
        timed = [row for row in measured if row.latency_us(50) is not None]
        for name, found, draw in (("rate", measured, rates), ("latency", timed, latencies)):
            if found:
                written.append(directory / f"{section}-{name}.svg")
                draw(section, found).write(written[-1])
    return written


def kind_of(row: Row) -> str:
    """The class of its colour."""
    if row.subject in PEERS.values() and row.subject == peer_of(row.section, row.subject):
        return "peer"
    return "ours" if "iserblk" in row.subject or row.subject.startswith("gateway") else "other"


def rates(section: str, rows: Sequence[Row]) -> Drawing:
    """For each job the rate of each subject, from the lowest to the highest of its rounds."""
    drawing = _begin(section, rows, "throughput, and its ratio to what a row is compared with")
    left = _left(rows)
    by_name = {(row.job, row.subject): row for row in rows}
    y = _HEAD
    for job, found in _jobs(rows).items():
        large = found[0].job.large
        drawing.text(_EDGE, y + 14, f"{job}: {'MiB/s' if large else 'requests/s'}")
        divisor = _MEBI if large else 1
        marks = ticks(max(row.rate().high for row in found) / divisor)
        across = Scale(0, marks[-1], left, _WIDTH - 210)
        bottom = y + 24 + _BAR * len(found)
        for mark in marks:
            drawing.line(across(mark), y + 22, across(mark), bottom, "grid")
            drawing.text(across(mark), bottom + 13, short(mark), "faint", "middle")
        for index, row in enumerate(found):
            top = y + 24 + _BAR * index
            spread = row.rate()
            text = rate_text(spread, large)
            drawing.text(left - 8, top + 12, row.subject, "text", "end")
            drawing.rect(left, top + 2, across(spread.median / divisor) - left, _BAR - 5,
                         kind_of(row), f"{row.name}: {text}")  # fmt: skip
            middle = top + 2 + (_BAR - 5) / 2
            ends = across(spread.low / divisor), across(spread.high / divisor)
            drawing.line(ends[0], middle, ends[1], middle, "text")
            for end in ends:
                drawing.line(end, middle - 3, end, middle + 3, "text")
            peer = by_name.get((row.job, peer_of(section, row.subject)))
            compared = ratio(row, peer) if peer is not None and peer is not row else None
            drawing.text(_WIDTH - 200, top + 12, text.partition(" (")[0])
            if compared is not None:
                drawing.text(_WIDTH - 100, top + 12, f"× {compared.median:.2f}")
        y = bottom + 22
    return drawing


def latencies(section: str, rows: Sequence[Row]) -> Drawing:
    """For each job the 50th and the 99th percentile of each subject, on one scale."""
    drawing = _begin(section, rows, "latency: a dot at the median, a ring at the 99th percentile")
    left = _left(rows)
    values = [_percentiles(row) for row in rows]
    axis = decades(min(low for low, _ in values), max(high for _, high in values))
    across = Scale(axis[0], axis[-1], left + 10, _WIDTH - 190, log=True)
    y = _HEAD
    for job, found in _jobs(rows).items():
        drawing.text(_EDGE, y + 14, job)
        bottom = y + 24 + _BAR * len(found)
        for mark in axis:
            drawing.line(across(mark), y + 22, across(mark), bottom, "grid")
            drawing.text(across(mark), bottom + 13, time_text(mark), "faint", "middle")
        for index, row in enumerate(found):
            middle = y + 24 + _BAR * index + _BAR / 2
            low, high = _percentiles(row)
            words = f"{time_text(low)}, p99 {time_text(high)}"
            kind = kind_of(row)
            drawing.text(left - 8, middle + 4, row.subject, "text", "end")
            drawing.line(across(low), middle, across(high), middle, kind, 2)
            drawing.circle(across(low), middle, 5, kind, f"{row.name}: p50 {words}")
            drawing.circle(across(high), middle, 5, kind)
            drawing.circle(across(high), middle, 2.5, "page")
            drawing.text(_WIDTH - 170, middle + 4, words)
        y = bottom + 22
    return drawing


def _percentiles(row: Row) -> tuple[float, float]:
    """The 50th and the 99th, in µs, of a row that has them."""
    low, high = row.latency_us(50) or 0.0, row.latency_us(99) or 0.0
    return max(low, 1e-3), max(high, low, 1e-3)


def _jobs(rows: Sequence[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.job.name, []).append(row)
    return found


def _left(rows: Sequence[Row]) -> float:
    """Where the bars begin, right of the longest name."""
    return _EDGE + 12 + max(width_of(row.subject) for row in rows)


def _begin(section: str, rows: Sequence[Row], words: str) -> Drawing:
    height = _HEAD + sum(_PANEL + _BAR * len(found) for found in _jobs(rows).values()) + 4
    title = f"scripts/bench, section {section}"
    subjects = ", ".join(dict.fromkeys(row.subject for row in rows))
    drawing = Drawing(_WIDTH, height, title, f"{words}. Subjects: {subjects}.")
    drawing.text(_EDGE, 30, title, "text title")
    drawing.text(_EDGE, 50, words[0].upper() + words[1:], "faint")
    x = _EDGE
    kinds = {kind_of(row) for row in rows}
    for kind, text in _LEGEND.items():
        if kind in kinds:
            drawing.rect(x, 62, 12, 12, kind)
            drawing.text(x + 18, 72, text)
            x += 18 + width_of(text) + 20
    return drawing
