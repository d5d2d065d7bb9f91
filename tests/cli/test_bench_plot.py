"""The picture of ``iserblk bench --plot``."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from iserblk.cli.bench_plot import bars, draw, rates
from iserblk.cli.histogram import Histogram
from tests.cli.commands import bad, good
from tests.cli.test_drawing import SVG, parsed


def histogram(*microseconds: float) -> Histogram:
    found = Histogram()
    for each in microseconds:
        found.add(round(each * 1000))
    return found


def test_bars_have_every_request() -> None:
    found = bars(histogram(*[100] * 75, *[1000] * 24, 70_000))
    assert len(found) == 3
    assert [each[2] for each in found] == pytest.approx([75, 24, 1])
    for (low, high, _), value in zip(found, (100, 1000, 70_000), strict=True):
        assert low * 0.97 <= value <= high * 1.03
        assert high / low == pytest.approx(2**0.25)
    assert bars(Histogram()) == []


def test_rates_are_of_each_slice() -> None:
    assert rates([(0.0, 0), (1.0, 10), (3.0, 10), (3.0, 10), (3.5, 15)]) == [
        (0.0, 1.0, 10.0),
        (1.0, 3.0, 0.0),
        (3.0, 3.5, 10.0),
    ]


def words(root: ElementTree.Element) -> list[str]:
    return [each.text or "" for each in root.iter(f"{SVG}text")]


def test_the_picture() -> None:
    latencies = histogram(*[100] * 990, *[400] * 8, *[9000] * 2)
    samples = [(0.0, 0), (1.0, 400), (2.0, 1000)]
    root = parsed(draw("a title", "iser://host/iqn.x:y/0", latencies, samples, 1 << 20))
    said = words(root)
    assert "a title" in said and "iser://host/iqn.x:y/0" in said
    assert any(each.startswith("p50 10") and each.endswith("µs") for each in said)
    assert any(each.startswith("p99.9 9") and each.endswith("ms") for each in said)
    assert "600" in said and "629" in said  # requests/s, and MB/s beside it
    shapes = [each for each in root.iter(f"{SVG}rect") if each.get("class") == "ours"]
    tips = [each.findtext(f"{SVG}title") or "" for each in shapes]
    assert [tip.rpartition(": ")[2] for tip in tips] == ["99 %", "0.8 %", "0.2 %"]
    heights = [float(each.get("height") or 0) for each in shapes]
    assert heights[0] > 90 * heights[1] > 0
    (line,) = root.iter(f"{SVG}polyline")
    points = [tuple(map(float, each.split(","))) for each in (line.get("points") or "").split()]
    assert len(points) == 4  # the ends of two slices
    assert points[0][1] > points[-1][1]  # the second was quicker
    # Everything is inside.
    for each in root.iter():
        for name, most in (("x", 860), ("x1", 860), ("y", 580), ("y2", 580)):
            assert 0 <= float(each.get(name) or 0) <= most


def test_of_a_run_without_requests() -> None:
    root = parsed(draw("nothing", "url", Histogram(), [(0.0, 0), (1.0, 0)], 512))
    assert not [each for each in root.iter(f"{SVG}rect") if each.get("class") == "ours"]


# --- the command ---------------------------------------------------------------------------------


@pytest.mark.parametrize("face", ["async", "blocking"])
def test_a_run_is_drawn(url: str, tmp_path: Path, face: str) -> None:
    file = tmp_path / "run.svg"
    said = good("bench", f"{url}/0", "--face", face, "--time", "0.5", "--plot", file)
    root = ElementTree.parse(file).getroot()
    title, place, *_ = words(root)
    assert title.startswith(f"randread, 4096 bytes, depth 32, {face} face: ")
    assert title.rpartition(": ")[2] in said  # the same rate
    assert place == f"{url}/0"
    shares = [
        float((each.findtext(f"{SVG}title") or "").rpartition(": ")[2].rstrip(" %"))
        for each in root.iter(f"{SVG}rect")
        if each.get("class") == "ours"
    ]
    assert sum(shares) == pytest.approx(100, rel=0.02)
    (line,) = root.iter(f"{SVG}polyline")
    assert len((line.get("points") or "").split()) >= 4
    good("bench", f"{url}/0", "--time", "0.1", "--plot", file)  # over the file of another run


def test_where_it_cannot_be_drawn(tmp_path: Path) -> None:
    """That is said before anything is measured."""
    url = "iser://127.0.0.1:1/iqn.2026-11.example:disk/0"
    missing = tmp_path / "missing" / "run.svg"
    assert "there is no such directory" in bad(7, "bench", url, "--plot", missing)
    assert "is a directory" in bad(7, "bench", url, "--plot", tmp_path)
