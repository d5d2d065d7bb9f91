"""The picture of `iserblk top`, at several sizes."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from xml.etree import ElementTree

import pytest
from rich.text import Text

from iserblk.cli.watch.frame import (
    LEAST_HEIGHT,
    LEAST_WIDTH,
    View,
    frame,
    svg_of,
    text_of,
)
from iserblk.cli.watch.history import SORTS, History, Look, Seen, in_order
from tests.support.watched import IQN, Load, example, lun, then

SIZES = [(80, 24), (120, 40), (200, 60)]
ODD = [(60, 16), (79, 25), (149, 30), (150, 20), (300, 100), (81, 17)]


@cache
def history() -> History:
    return example()


def drawn(view: View, width: int, height: int | None, of: History | None = None) -> str:
    return text_of(frame(of or history(), view, width, height, host="host"))


@pytest.mark.parametrize("view", [View(), View(page=True), View(help=True)], ids=str)
@pytest.mark.parametrize(("width", "height"), [*SIZES, *ODD])
def test_it_fits(width: int, height: int, view: View) -> None:
    lines = frame(history(), replace(view), width, height, host="a host")
    assert len(lines) == height
    assert max(line.cell_len for line in lines) <= width
    assert all(line.plain.isprintable() for line in lines)


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_all_is_there(width: int, height: int) -> None:
    text = drawn(View(), width, height)
    for words in ("/dev/nbd0", "not connected", "degraded", "killed", "p50", "p99", "IOPS", "FLY",
                  "UNFLUSH", "latency of", "paths", "└ ", "events", "connection lost",
                  "failed over to", "1 target, 3 sessions", "6 LUNs, 3 bad", "q quit"):  # fmt: skip
        assert words in text, words
    assert re.search("[░▒▓█]", text)


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_the_page_of_one_lun(width: int, height: int) -> None:
    first = in_order(history(), "where")[0]
    assert first.seen.where == "/dev/nbd0"
    text = drawn(View(chosen=first.seen.key, page=True), width, height)
    for words in ("/dev/nbd0  connected", f"{IQN}/0", "1.0 TiB", "attach 700", "1 reconnects",
                  "32 replayed", "read", "write", "flush", "p99.9", "most", "iser://10.0.0.1:3260",
                  "failed 2 times", "iser://10.0.1.1:3260 (iwarp)", "in use",
                  "failed over to"):  # fmt: skip
        assert words in text, words
    assert "/dev/nbd1" not in text
    assert "×" in text  # it had no connection for a while


def test_a_lun_that_is_chosen_is_in_the_picture() -> None:
    """However many there are; and those that are bad are on top."""
    readings = [lun(number, connected=number != 99) for number in range(200)]
    many = History()
    for at in (0.0, 1.0):
        many.add(
            Look(at, at, tuple(Seen(f"/dev/nbd{n}", "0", n, at, each)
                               for n, each in enumerate(readings)))
        )  # fmt: skip
    assert "/dev/nbd99 " in drawn(View(), 80, 24, many).splitlines()[3]
    view = View("where")
    for each in in_order(many, "where"):
        view.chosen = each.seen.key
        text = drawn(view, 80, 24, many)
        assert f"\n{each.seen.where} " in text
        assert f"latency of {each.seen.where} " in text
        assert re.search(r"200 LUNs, 1 bad \(\d+-\d+ shown\)", text)


def test_names_do_nothing_to_the_terminal() -> None:
    """Names with escapes, wide characters, and of any length."""
    names = ["\x1b[2J\x1b]0;x\x07", "漢字" * 30, "/mnt/" + "x" * 300, "a\nb", "\u202egnp.exe", ""]
    found = History()
    for at in (0.0, 1.0):
        seen = [
            Seen(where, "0", 1, at, replace(lun(target=where, portal=where, url=where)))
            for where in names
        ]
        found.add(Look(at, at, tuple(seen), notes=tuple(names), others=tuple(names)))
    for chosen in in_order(found, "where"):
        for page in (False, True):
            view = View(chosen=chosen.seen.key, page=page)
            for width, height in SIZES:
                lines = frame(found, view, width, height, host=names[0])
                assert max(line.cell_len for line in lines) <= width
                assert all(each.isprintable() for each in (line.plain for line in lines))


def test_a_terminal_that_is_too_small() -> None:
    for size in ((LEAST_WIDTH - 1, 24), (80, LEAST_HEIGHT - 1), (1, 1)):
        lines = frame(history(), View(), *size)
        assert len(lines) == size[1] and max(line.cell_len for line in lines) <= size[0]
    assert "too small" in drawn(View(), LEAST_WIDTH - 1, 24)


def test_nothing_is_in_use() -> None:
    empty = History()
    empty.add(Look(0.0, 0.0, notes=("root: only root can look at it",), others=("copy",)))
    text = drawn(View(), 80, 24, empty)
    for words in ("no LUN is in use", "not looked at: root:", "without metrics: copy"):
        assert words in text


def test_the_first_picture_has_no_rates_yet() -> None:
    first = History()
    first.add(Look(0.0, 0.0, (Seen("/dev/nbd0", "0", 1, 0.0, then(lun(), Load(9))),)))
    text = drawn(View(), 80, 24, first)
    assert "no requests" in text and "- IOPS" in text


@pytest.mark.parametrize("sort", SORTS)
def test_what_is_sorted_by_is_marked(sort: str) -> None:
    (head,) = [
        line for line in frame(history(), View(sort), 80, 24) if line.plain.startswith("WHERE")
    ]
    assert [span for span in head.spans if "reverse" in str(span.style)]


def test_without_a_terminal_all_luns_are_in_it() -> None:
    lines = frame(history(), View(), 100, None)
    text = text_of(lines)
    for each in history().luns.values():
        assert any(line.startswith(each.seen.where[:5]) for line in text.splitlines())
    assert "q quit" not in text
    rows = [line for line in lines if not line.plain.startswith("WHERE")]
    assert not [span for line in rows for span in line.spans if span.style == "reverse"]
    assert not [line for line in rows if line.style == "reverse"]  # none is chosen


def test_a_drawing_needs_nothing_else() -> None:
    drawing = svg_of(frame(history(), View(), 80, 24), 80)
    ElementTree.fromstring(drawing)
    assert set(re.findall(r"https?://[^\s\"')]+", drawing)) <= {
        "http://www.w3.org/2000/svg",
        "https://www.textualize.io",
    }
    assert "url(&#x27;" not in drawing and "@font-face" not in drawing
    assert "/dev/nbd0" in drawing


def test_lines_are_not_spoilt_by_being_drawn() -> None:
    lines = frame(history(), View(), 80, 24)
    before = [line.copy() for line in lines]
    svg_of(lines, 80)
    text_of(lines)
    assert lines == before
    assert isinstance(lines[0], Text)


@pytest.mark.parametrize("view", [View(), View(page=True), View(help=True)], ids=str)
def test_a_style_is_of_its_words(view: View) -> None:
    """And not of all that follows in the line: what is faint is so on purpose."""
    for line in frame(history(), replace(view), 120, 40):
        assert line.style in ("", "reverse", "bold underline") or not line.spans, line.plain


def test_figures_are_not_cut_off_by_a_long_name() -> None:
    (long,) = [each for each in history().luns.values() if "images" in each.seen.where]
    text = drawn(View(chosen=long.seen.key), 80, 24)
    assert re.search(r"latency of .*others.* p99\.9 [\d.]+ms ", text)
