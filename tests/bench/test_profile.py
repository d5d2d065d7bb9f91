"""Samples of py-spy, sorted into layers."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchlib import profile
from benchlib.load import Measurement
from benchlib.profile import Recording
from benchlib.results import Sample

# 10,000 requests a second, 50 µs of CPU time each, sampled for 10 s.
RUN = Sample(Measurement(20_000, 20_000 * 4096, 2.0), {"nbdkit": 1.0}, {"nbdkit": 1})


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/src/iserblk/iserblk/rcap/iwarp/mpa.py", "iserblk.rcap.iwarp"),
        ("/src/iserblk/iserblk/disk/blocking.py", "iserblk.disk"),
        ("/src/iserblk/iserblk/url.py", "iserblk"),
        ("/src/iserblk/nbd_plugin/iserblk.py", "nbd_plugin"),
        ("/src/iserblk/fuse_mount/operations.py", "fuse_mount"),
        ("/src/iserblk/.venv/lib/python3.11/site-packages/trio/_core/_run.py", "trio"),
        ("/src/iserblk/.venv/lib/python3.11/site-packages/attr/_make.py", "python"),
        ("/usr/lib/python3.11/threading.py", "python"),
        ("<frozen importlib._bootstrap>", "python"),
    ],
)
def test_layer_of_a_file(path: str, expected: str) -> None:
    assert profile.layer(path) == expected


def test_innermost_frame_counts() -> None:
    raw = (
        "main (/x/run.py:3);read_into (/x/iserblk/disk/blocking.py:120) 7\n"
        "pread (/x/nbd_plugin/iserblk.py:9);read_into (/x/iserblk/disk/blocking.py:120) 5\n"
        "main (/x/run.py:3) 2\n"
        "1\n"
        " 4\n"
    )
    counts = profile.parse_raw(raw)
    assert counts["iserblk.disk", "read_into iserblk/disk/blocking.py:120"] == 12
    assert counts["python", "main x/run.py:3"] == 2
    assert counts["python", "(no Python frame)"] == 5
    assert counts.total() == 19


def test_samples_of_running_threads_share_the_cpu_time() -> None:
    recording = Recording(1, Path("x.raw"), gil_only=False)
    times = profile.per_request({"disk": 30, "rcap": 70}, recording, RUN, "nbdkit", 10)
    assert list(times.items()) == [("rcap", pytest.approx(35.0)), ("disk", pytest.approx(15.0))]  # type: ignore[comparison-overlap]
    assert profile.per_request({}, recording, RUN, "nbdkit", 10) == {}


def test_samples_of_the_gils_holder_are_a_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "HERTZ", 100)
    recording = Recording(1, Path("x.raw"), gil_only=True)
    # Held in 200 of 1,000 samples: 20 µs of each 100 µs that a request takes.
    times = profile.per_request({"rcap": 200}, recording, RUN, "nbdkit", 10)
    assert times["rcap"] == pytest.approx(20.0)
    (rest,) = (value for key, value in times.items() if key.startswith("(without the GIL"))
    assert rest == pytest.approx(30.0)


def test_only_processes_of_many_threads_are_sampled_by_the_gil() -> None:
    command = Recording(77, Path("x.raw"), gil_only=True).command("py-spy", 5)
    assert "--gil" in command
    assert command[command.index("--pid") + 1] == "77"
    assert "--gil" not in Recording(77, Path("x.raw"), gil_only=False).command("py-spy", 5)
