"""Charts as SVG, without a library for them: shapes, and colours for light and for dark pages.

A shape has a class, and the style of the file gives the class its colours: those of a dark page
where the viewer prefers one. The background is part of the picture, so that it can be read on a
page of any colour.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

# Class → its colour on a light and on a dark page.
COLOURS = {
    "page": ("#ffffff", "#0d1117"),
    "text": ("#1f2328", "#f0f6fc"),
    "faint": ("#59636e", "#9198a1"),
    "grid": ("#d1d9e0", "#3d444d"),
    "ours": ("#0969da", "#4493f8"),
    "peer": ("#bc4c00", "#f0883e"),
    "other": ("#818b98", "#7d8590"),
    "mark": ("#cf222e", "#ff7b72"),
}
WORDS = ("text", "faint")  # the others are areas and lines
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"
_LETTER = 0.58  # the mean width of a letter, in units of the size of the font
_NAMESPACE = "http://www.w3.org/2000/svg"


def _style() -> str:
    lines = [
        f"text{{font-family:{_FONT};font-size:12px}}",
        ".title{font-size:15px;font-weight:600}",
    ]
    for index, head in enumerate(("", "@media (prefers-color-scheme:dark){")):
        rules = [
            f".{name}{{fill:{both[index]}}}.line-{name}{{fill:none;stroke:{both[index]}}}"
            for name, both in COLOURS.items()
        ]
        lines.append(f"{head}{''.join(rules)}{'}' if head else ''}")
    return "".join(lines)


class Drawing:
    """A picture of ``width`` × ``height`` pixels. ``title`` and ``words`` are for those who do not
    see it."""

    def __init__(self, width: float, height: float, title: str, words: str) -> None:
        self.width = width
        self.height = height
        self._root = ElementTree.Element(
            "svg",
            {
                "xmlns": _NAMESPACE,
                "viewBox": f"0 0 {_number(width)} {_number(height)}",
                "width": _number(width),
                "height": _number(height),
                "role": "img",
                "aria-labelledby": "title words",
            },
        )
        for name, text in (("title", title), ("desc", words)):
            identity = "title" if name == "title" else "words"
            ElementTree.SubElement(self._root, name, {"id": identity}).text = _plain(text)
        ElementTree.SubElement(self._root, "style").text = _style()
        self.rect(0, 0, width, height, "page")

    def text(
        self, x: float, y: float, words: str, kind: str = "text", anchor: str = "start"
    ) -> None:
        """``y``: of the base line. ``anchor``: start, middle or end. ``kind``: a class, or
        several."""
        self._add("text", {"x": x, "y": y}, kind, {"text-anchor": anchor}).text = _plain(words)

    def rect(
        self, x: float, y: float, width: float, height: float, kind: str, tip: str = ""
    ) -> None:
        """``tip``: what a browser shows where the pointer is over it."""
        shape = {"x": x, "y": y, "width": max(width, 0.0), "height": max(height, 0.0)}
        self._tip(self._add("rect", shape, kind), tip)

    def circle(self, x: float, y: float, radius: float, kind: str, tip: str = "") -> None:
        self._tip(self._add("circle", {"cx": x, "cy": y, "r": radius}, kind), tip)

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str, width: float = 1) -> None:
        ends = {"x1": x1, "y1": y1, "x2": x2, "y2": y2, "stroke-width": width}
        self._add("line", ends, f"line-{kind}")

    def path(self, points: Sequence[tuple[float, float]], kind: str, width: float = 1.5) -> None:
        """A line through all points."""
        words = " ".join(f"{_number(x)},{_number(y)}" for x, y in points)
        self._add("polyline", {"stroke-width": width}, f"line-{kind}", {"points": words})

    def _add(
        self, name: str, numbers: dict[str, float], kind: str, more: dict[str, str] | None = None
    ) -> ElementTree.Element:
        attributes = {"class": kind, **{key: _number(each) for key, each in numbers.items()}}
        return ElementTree.SubElement(self._root, name, {**attributes, **(more or {})})

    @staticmethod
    def _tip(shape: ElementTree.Element, tip: str) -> None:
        if tip:
            ElementTree.SubElement(shape, "title").text = _plain(tip)

    def svg(self) -> str:
        ElementTree.indent(self._root, " ")
        return ElementTree.tostring(self._root, encoding="unicode") + "\n"

    def write(self, path: Path) -> None:
        path.write_text(self.svg(), encoding="utf-8")


def width_of(words: str, size: float = 12) -> float:
    """About how wide a text is."""
    return len(words) * size * _LETTER


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _plain(text: str) -> str:
    """``text`` without control characters, which XML does not allow."""
    return "".join(each if each.isprintable() else "?" for each in text)


# --- scales --------------------------------------------------------------------------------------


@dataclass(slots=True, frozen=True)
class Scale:
    """From values to pixels: ``low`` is at ``start``, ``high`` at ``end``. ``log``: equal ratios
    are equally wide; ``low`` is more than 0."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        if self.log:
            value = min(max(value, self.low), self.high)
            part = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            part = (value - self.low) / (self.high - self.low)
        return self.start + part * (self.end - self.start)


def ticks(most: float, count: int = 5) -> list[float]:
    """Round values from 0 on, in equal steps; the last is ``most`` or more. About ``count``."""
    if not most > 0:
        return [0.0, 1.0]
    step = 10.0 ** math.floor(math.log10(most / count))
    for factor in (1, 2, 5, 10):
        if step * factor * count >= most:
            step *= factor
            break
    return [step * index for index in range(math.ceil(most / step - 1e-9) + 1)]


def decades(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten; the first is ``low`` or less, the last ``high`` or more. If
    they are many, powers of ten alone."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    factors = (1, 2, 5) if last - first <= 3 else (1,)
    # A logarithm is rounded, perhaps to the power that the number is just below, or above.
    powers = range(first - 1, last + 2)
    found = [factor * 10.0**power for power in powers for factor in factors]
    start = max(index for index, each in enumerate(found) if each <= low)
    end = min(index for index, each in enumerate(found) if each >= high)
    return found[start : max(end, start + 1) + 1]


def short(value: float) -> str:
    """A number for an axis: 1500 is "1.5 k"."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g} {unit}"
    return f"{value:.3g}"


def time_text(microseconds: float) -> str:
    """A time for an axis: 1500 µs are "1.5 ms"."""
    for limit, unit in ((1e6, "s"), (1e3, "ms")):
        if microseconds >= limit:
            return f"{microseconds / limit:.3g} {unit}"
    return f"{microseconds:.3g} µs"
