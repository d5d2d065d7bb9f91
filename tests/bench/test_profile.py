"""Samples of py-spy, sorted into layers."""

from __future__ import annotations

import pytest
from benchlib import profile


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
