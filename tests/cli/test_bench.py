"""``iserblk bench``."""

from __future__ import annotations

import json
import re

import pytest

from iserblk.cli import bench, progress
from tests.cli.commands import bad, good, good_json
from tests.cli.runs import JSON_DOCUMENT, MIB, documented


@pytest.mark.parametrize("face", ["async", "queue", "blocking"])
@pytest.mark.parametrize("pattern", ["randread", "read", "randwrite", "write"])
def test_bench(url: str, face: str, pattern: str) -> None:
    found = good_json(
        "bench", f"{url}/0", "--face", face, "--rw", pattern, "--time", "0.2", "--destroy"
    )
    latencies = found["latency_us"]
    assert set(found) == documented("bench")
    assert all(f"`{name}`" in JSON_DOCUMENT for name in latencies)
    assert (found["rw"], found["face"], found["depth"]) == (pattern, face, 32)
    assert found["bytes"] == found["ios"] * 4096 > 0
    assert latencies["min"] <= latencies["p50"] <= latencies["p99.9"] <= latencies["max"]


def test_bench_for_people(url: str) -> None:
    words = good("bench", f"{url}/0", "--time", "0.1", "--bs", "64k", "--depth", "2")
    assert "IOPS" in words and "MB/s" in words and "p99" in words


def test_bench_does_not_write_unasked(url: str) -> None:
    assert "--destroy" in bad(7, "bench", f"{url}/0", "--rw", "randwrite")
    assert "read-only" in bad(13, "bench", f"{url}/2", "--rw", "write", "--yes")
    assert f"which has {4 * MIB} bytes" in bad(7, "bench", f"{url}/1", "--bs", "5M")
    assert "--bs 0" in bad(7, "bench", f"{url}/1", "--bs", "0")


@pytest.mark.parametrize("seconds", ["nan", "inf", "-inf", "1e300"])
def test_bench_wants_a_time_that_ends(url: str, seconds: str) -> None:
    assert "is not in the range" in bad(7, "bench", f"{url}/0", f"--time={seconds}")


def test_bench_shows_how_far_it_is(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The lines come from a thread beside the requests. The result is on stdout alone."""
    monkeypatch.setattr(progress, "PAUSE_S", 0.01)
    bench.command.main([f"{url}/0", "--time", "1", "--json"], standalone_mode=False)
    shown, said = capsys.readouterr()
    assert json.loads(shown)["interrupted"] is False
    lines = said.splitlines()
    assert lines
    for line in lines:
        assert re.fullmatch(r"iserblk: measuring: [01] of 1 s, [\d,]+ IOPS", line)
