"""Pictures: well-formed, with colours that can be read on light and on dark pages."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from iserblk.cli.drawing import (
    COLOURS,
    WORDS,
    Drawing,
    Scale,
    decades,
    short,
    ticks,
    time_text,
)

SVG = "{http://www.w3.org/2000/svg}"


def parsed(drawing: Drawing) -> ElementTree.Element:
    root = ElementTree.fromstring(drawing.svg())
    assert root.tag == f"{SVG}svg"
    return root


def test_a_picture() -> None:
    drawing = Drawing(100, 50.5, "title", "what it shows")
    drawing.text(1, 2, "a & <b>", "faint", "end")
    drawing.rect(1, 2, 3, -4, "ours", "a tip")
    drawing.circle(5, 5, 2.456, "peer")
    drawing.line(0, 0, 1, 1, "grid")
    drawing.path([(0, 0), (1, 2.5)], "ours")
    root = parsed(drawing)
    assert root.get("viewBox") == "0 0 100 50.5"
    titles = {root.find(f"{SVG}{name}").text for name in ("title", "desc")}  # type: ignore[union-attr]
    assert titles == {"title", "what it shows"}
    assert (root.get("role"), root.get("aria-labelledby")) == ("img", "title words")
    (text,) = root.iter(f"{SVG}text")
    assert (text.text, text.get("text-anchor")) == ("a & <b>", "end")
    page, bar = root.iter(f"{SVG}rect")
    assert (page.get("class"), page.get("width"), page.get("height")) == ("page", "100", "50.5")
    assert bar.get("height") == "0"  # no SVG has negative sizes
    assert bar.findtext(f"{SVG}title") == "a tip"
    (line,) = root.iter(f"{SVG}polyline")
    assert line.get("points") == "0,0 1,2.5"


@given(st.text())
def test_any_text_is_well_formed(text: str) -> None:
    drawing = Drawing(10, 10, text, text)
    drawing.text(0, 0, text)
    drawing.rect(0, 0, 1, 1, "ours", text)
    parsed(drawing)


def test_every_class_has_both_colours() -> None:
    """A shape whose class has no rule would be black on black."""
    style = parsed(Drawing(1, 1, "", "")).findtext(f"{SVG}style") or ""
    light, _, dark = style.partition("@media (prefers-color-scheme:dark)")
    for part, index in ((light, 0), (dark, 1)):
        rules = dict(re.findall(r"\.([a-z-]+)\{(?:fill:none;)?(?:fill|stroke):(#\w+)\}", part))
        for name, both in COLOURS.items():
            assert rules[name] == rules[f"line-{name}"] == both[index]


def luminance(colour: str) -> float:
    """WCAG 2.1, relative luminance."""
    parts = [int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    linear = [
        each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in parts
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("mode", [0, 1], ids=["light", "dark"])
def test_all_can_be_read(mode: int) -> None:
    """WCAG 2.1: 4.5 to 1 for words, 3 to 1 for shapes; a grid may be fainter."""
    for name, both in COLOURS.items():
        if name not in ("page", "grid"):
            wanted = 4.5 if name in WORDS else 3.0
            assert contrast(both[mode], COLOURS["page"][mode]) >= wanted, name


# --- scales --------------------------------------------------------------------------------------


def test_scales() -> None:
    plain = Scale(0, 10, 100, 200)
    assert [plain(value) for value in (0, 5, 10)] == [100, 150, 200]
    log = Scale(1, 100, 0, 10, log=True)
    assert [log(value) for value in (1, 10, 100)] == pytest.approx([0, 5, 10])
    assert (log(0), log(1e9)) == (0, 10)  # at the edge


@given(st.floats(1e-6, 1e12))
def test_ticks_reach_what_they_are_for(most: float) -> None:
    found = ticks(most)
    assert found[0] == 0 and found[-1] >= most * (1 - 1e-6)
    assert 2 <= len(found) <= 11
    assert ticks(0.0) == [0.0, 1.0]


@given(st.floats(1e-3, 1e9), st.floats(1, 1e6))
@example(999999999.9999999, 1.0)  # its logarithm is 9
def test_decades_reach_what_they_are_for(low: float, factor: float) -> None:
    found = decades(low, low * factor)
    assert found == sorted(set(found))
    assert found[0] <= low <= low * factor <= found[-1]
    assert 2 <= len(found) <= 13


def test_words_of_axes() -> None:
    assert [short(each) for each in (0, 12, 1500, 2e6, 3e9)] == ["0", "12", "1.5 k", "2 M", "3 G"]
    assert [time_text(each) for each in (5, 1500, 2e6)] == ["5 µs", "1.5 ms", "2 s"]
