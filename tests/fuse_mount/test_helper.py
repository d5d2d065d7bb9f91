"""mount(8)'s helper: its arguments, and how it ends. Real mounts: tests/cli/test_units.py."""

from __future__ import annotations

import pytest

from fuse_mount import helper

URL, POINT = "iser://192.0.2.1/iqn.2026-11.example:disk", "/no/such/directory"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "one URL and one mount point"),
        ([URL], "one URL and one mount point"),
        ([URL, POINT, "more"], "one URL and one mount point"),
        ([URL, POINT, "-x"], "option -x not recognized"),
        ([URL, POINT, "-o"], "option -o requires argument"),
        ([URL, POINT, "-N", "1"], "use nsenter"),
    ],
)
def test_wrong_arguments(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert helper.main(arguments) == 1
    out = capsys.readouterr()
    assert words in out.err and out.err.startswith("mount.iserblk: ")
    assert out.err.count("\n") == 1 and not out.out


def test_a_fake_mount_mounts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert helper.main([URL, POINT, "-f", "-o", "ro"]) == 0
    assert capsys.readouterr().err == ""


def test_a_mount_point_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert helper.main([URL, POINT]) in (1, 2)
    assert capsys.readouterr().err.startswith("mount.iserblk: ")
