"""The pictures of scripts/bench, and results that are read back."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from benchlib import goals, plots, report
from benchlib.__main__ import bench
from benchlib.goals import OURS, OURS_TCP, PEERS
from benchlib.load import JOBS, Job, Measurement
from benchlib.results import Row, Sample
from click.testing import CliRunner

from tests.cli.test_drawing import SVG

SMALL, LARGE = JOBS[0], JOBS[-1]


def row(section: str, job: Job, subject: str, *rates: float, timed: bool = True) -> Row:
    found = Row(section, job, subject)
    for rate in rates:
        times = (100.0, 900.0) if timed else (None, None)
        measured = Measurement(round(rate), round(rate) * job.block, 1.0, *times)
        found.samples.append(Sample(measured, {"fio": 0.1}, {"fio": 1 << 20}))
    return found


def rows() -> list[Row]:
    absent = row("nbd", SMALL, "floor")
    absent.absent = "no C compiler"
    return [
        row("nbd", SMALL, OURS, 2000, 3000, 2500),
        row("nbd", SMALL, PEERS["nbd"], 1000, 1500, 1250),
        row("nbd", SMALL, "memory", 9000),
        absent,
        row("nbd", LARGE, OURS, 800),
        row("api", SMALL, PEERS["api"], 4000, timed=False),
    ]


def drawn(path: Path) -> ElementTree.Element:
    return ElementTree.parse(path).getroot()


def words(root: ElementTree.Element) -> list[str]:
    return [each.text or "" for each in root.iter(f"{SVG}text")]


def bars(root: ElementTree.Element) -> dict[str, tuple[str, float]]:
    """Class and width of each bar, by the row's name."""
    found = {}
    for each in root.iter(f"{SVG}rect"):
        tip = each.findtext(f"{SVG}title")
        if tip is not None:
            name = tip.partition(":")[0]
            found[name] = (each.get("class") or "", float(each.get("width") or 0))
    return found


def test_a_file_for_each_table(tmp_path: Path) -> None:
    written = plots.write_plots(tmp_path, rows())
    assert [path.name for path in written] == ["nbd-rate.svg", "nbd-latency.svg", "api-rate.svg"]
    assert sorted(tmp_path.iterdir()) == sorted(written)


def test_bars_beside_peers(tmp_path: Path) -> None:
    plots.write_plots(tmp_path, rows())
    root = drawn(tmp_path / "nbd-rate.svg")
    found = bars(root)
    assert {name: kind for name, (kind, _) in found.items()} == {
        "nbd/4k-randread-d1/iserblk": "ours",
        "nbd/4k-randread-d1/qemu-nbd": "peer",
        "nbd/4k-randread-d1/memory": "other",
        "nbd/1m-write-d8/iserblk": "ours",
    }
    widths = {name.rpartition("/")[2]: width for name, (_, width) in found.items() if "4k" in name}
    assert widths["iserblk"] == pytest.approx(2 * widths["qemu-nbd"], rel=0.01)
    assert widths["memory"] == pytest.approx(3.6 * widths["iserblk"], rel=0.01)
    said = words(root)
    assert "× 2.00" in said and "2.5 K/s" in said and "800 MiB/s" in said
    assert "× 1.00" not in said  # the peer's to itself
    assert "floor" not in said


def test_percentiles(tmp_path: Path) -> None:
    plots.write_plots(tmp_path, rows())
    root = drawn(tmp_path / "nbd-latency.svg")
    assert words(root).count("100 µs, p99 900 µs") == 4
    dots = [each for each in root.iter(f"{SVG}circle") if each.find(f"{SVG}title") is not None]
    assert len(dots) == 4
    assert "p50 100 µs, p99 900 µs" in (dots[0].findtext(f"{SVG}title") or "")
    # On one scale: the ring is right of the dot, and no mark is outside.
    for each in root.iter(f"{SVG}circle"):
        assert 0 < float(each.get("cx") or 0) < float(root.get("width") or 0)


def test_everything_is_inside(tmp_path: Path) -> None:
    every = [row("nbd", job, subject, 1e6) for job in JOBS for subject in (OURS, OURS_TCP)]
    for path in plots.write_plots(tmp_path, every):
        root = drawn(path)
        width, height = float(root.get("width") or 0), float(root.get("height") or 0)
        for each in root.iter():
            for x in ("x", "x1", "x2"):
                assert 0 <= float(each.get(x) or 0) <= width
            for y in ("y", "y1", "y2"):
                assert 0 <= float(each.get(y) or 0) <= height


# --- results that are read back ------------------------------------------------------------------


def test_results_come_back(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    content = report.as_json({"cpu": "x"}, rows(), goals.judge(rows()))
    report.write_json(file, content)
    about, found = report.read_json(file)
    assert about == {"cpu": "x"}
    assert found == rows()


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"version": 2}', '{"version": 1, "machine": {}, "rows": [{}]}', "\0"],
)
def test_what_has_no_results(tmp_path: Path, content: str) -> None:
    (tmp_path / "file").write_text(content)
    with pytest.raises(ValueError):
        report.read_json(tmp_path / "file")
    result = CliRunner().invoke(bench, ["--from", str(tmp_path / "file")])
    assert result.exit_code == 2  # click's; run_command makes it 7
    assert "--from" in result.output


def test_results_of_another_run_are_drawn(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    report.write_json(file, report.as_json({"cpu": "x"}, rows(), goals.judge(rows())))
    words = ["--from", str(file), "--plot", str(tmp_path / "a/b"), "--rows", "nbd/4k-*",
             "--json", str(tmp_path / "again.json")]  # fmt: skip
    result = CliRunner().invoke(bench, words, standalone_mode=False)
    assert result.return_value == 0, result.output
    assert {path.name for path in (tmp_path / "a/b").iterdir()} == {
        "nbd-rate.svg",
        "nbd-latency.svg",
    }
    kept = json.loads((tmp_path / "again.json").read_text())["rows"]
    assert [each["subject"] for each in kept] == [each.subject for each in rows()[:4]]


PICTURES = Path(__file__).parents[2] / "docs/pictures"


def test_pictures_of_the_documents(tmp_path: Path) -> None:
    """They are what the command draws of the samples beside them."""
    words = ["--from", str(PICTURES / "bench.json"), "--plot", str(tmp_path)]
    assert CliRunner().invoke(bench, words).exit_code == 0
    drawings = {path.name: path.read_text() for path in tmp_path.iterdir()}
    kept = {path.name: path.read_text() for path in PICTURES.glob("*.svg")}
    assert drawings == {name: kept[name] for name in kept if name.startswith(("nbd-", "fuse-"))}
    readme = (PICTURES.parents[1] / "README.md").read_text()
    assert sum(f"docs/pictures/{name}" in readme for name in drawings) == 2
