"""``iserblk mount``: in the foreground, in the mount table, and what it refuses."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.cli.commands import bad, good, serving
from tests.cli.runs import MIB
from tests.support.fuse import need_fuse


def test_mount_in_the_foreground(url: str, tmp_path: Path) -> None:
    need_fuse()
    place = tmp_path / "place"
    place.mkdir()
    with serving("mount", f"{url}/1", place, "-f", log=tmp_path / "log") as server:
        assert server.url == str(place)
        assert (place / "lun1").stat().st_size == 4 * MIB
        assert server.end(signal.SIGTERM) == 0
    assert list(place.iterdir()) == []


@pytest.mark.parametrize("more", ["", "?io-timeout=60"])
def test_the_mount_table_names_the_url(url: str, tmp_path: Path, more: str) -> None:
    """The mount table has the URL as it was given, without options: so mount(8) recognises the line
    of fstab."""
    need_fuse()
    place = tmp_path / "place"
    place.mkdir()
    good("mount", url + more, place)
    try:
        table = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
        assert [line[0] for line in table if line[1] == str(place)] == [url]
    finally:
        good("umount", place)


def test_mount_refuses(url: str, tmp_path: Path) -> None:
    need_fuse()
    (tmp_path / "file").touch()
    place = tmp_path / "place"
    place.mkdir()
    assert "no such directory" in bad(1, "mount", url, tmp_path / "missing")
    assert "not a directory" in bad(1, "mount", url, tmp_path / "file")
    assert "not empty" in bad(1, "mount", url, tmp_path)
    assert "unknown option" in bad(1, "mount", url, place, "-o", "frobnicate")
    assert "io-timeout" in bad(1, "mount", url, place, "--io-timeout", "soon")
    assert "scheme" in bad(1, "mount", "nonsense", place)
    assert "no target" in bad(32, "mount", f"{url}x", place)
