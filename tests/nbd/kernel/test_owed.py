"""The file with the losses of which the kernel was not told."""

from __future__ import annotations

from pathlib import Path

import pytest

from iserblk.disk.seam import LossCount
from iserblk.nbd.kernel.owed import Owed


def test_it_is_there_while_there_is_something_to_tell(tmp_path: Path) -> None:
    owed = Owed(tmp_path / "owed")
    assert owed.read() == (0, 0)
    owed.write(LossCount(7, 7))
    assert [*tmp_path.iterdir()] == []
    owed.write(LossCount(8, 7))
    assert owed.read() == (8, 7) and [each.name for each in tmp_path.iterdir()] == ["owed"]
    owed.write(LossCount(8, 8))
    assert owed.read() == (0, 0) and [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("text", ["", "1", "x y", "1 1", "1 -1", "1 2 3", "1 2", "\0"])
def test_a_file_that_makes_no_sense_is_a_loss(tmp_path: Path, text: str) -> None:
    path = tmp_path / "owed"
    path.write_text(text)
    assert Owed(path).read() == (1, 0)


def test_at_least_one(tmp_path: Path) -> None:
    owed = Owed(tmp_path / "owed")
    owed.owe()
    assert owed.read() == (1, 0)
    owed.write(LossCount(8, 7))
    owed.owe()
    assert owed.read() == (8, 7)


@pytest.mark.logs("owed: Not a directory")
def test_where_it_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    Owed(tmp_path / "file" / "owed").write(LossCount(1, 0))
