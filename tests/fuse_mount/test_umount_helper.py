"""umount(8)'s helper: its arguments. Real mounts: tests/fuse_mount/test_mount.py, and scripts/boot
at a real shutdown."""

from __future__ import annotations

import pytest

from fuse_mount import umount_helper

POINT = "/no/such/directory"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give one mount point"),
        ([POINT, "more"], "give one mount point"),
        ([POINT, "-x"], "option -x not recognized"),
        ([POINT, "-N", "1"], "use nsenter"),
        ([POINT], "no LUNs are mounted there"),
        ([POINT, "-f"], "no LUNs are mounted there"),
    ],
)
def test_wrong_arguments(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert umount_helper.main(arguments) == 1
    out = capsys.readouterr()
    assert words in out.err and out.err.startswith("umount.fuse.iserblk: ")
    assert out.err.count("\n") == 1 and not out.out
