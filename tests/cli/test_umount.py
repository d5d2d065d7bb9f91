"""``iserblk mount`` and ``iserblk umount``, one after the other."""

from __future__ import annotations

from pathlib import Path

from tests.cli.commands import bad, good
from tests.support.fuse import need_fuse


def test_mount_and_umount(url: str, tmp_path: Path) -> None:
    need_fuse()
    place = tmp_path / "place"
    place.mkdir()
    assert good("mount", url, place, "-o", "noauto", "--io-timeout", "20") == ""
    try:
        assert sorted(path.name for path in place.iterdir()) == ["lun0", "lun1", "lun2"]
        assert (place / "lun2").read_bytes() == b"written once" * 4096
        assert "mounted there already" in bad(1, "mount", url, place)
    finally:
        assert good("umount", place) == ""
    assert list(place.iterdir()) == []
    assert "no LUNs are mounted" in bad(1, "umount", place)
