"""The file of --luns: its lines, and LUNs that come and go with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from iserblk.errors import BadArgument, Busy
from iserblk.target.lunlist import LunList, parse_lun_list
from iserblk.target.lunspec import LunSpec

IQN = "iqn.2026-11.example:disk"


def test_lines() -> None:
    text = "# disks\n\n7 /srv/a:size=1G\n  0   /srv/with space:ro  \n\t8\t/srv/b\n"
    assert parse_lun_list(text) == {
        7: LunSpec("/srv/a", size=1 << 30),
        0: LunSpec("/srv/with space", read_only=True),
        8: LunSpec("/srv/b"),
    }


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("7", "write NUMBER FILE"),
        ("x /srv/a", "write NUMBER FILE"),
        ("16384 /srv/a", "write NUMBER FILE"),
        ("00000016384 /srv/a", "write NUMBER FILE"),
        ("\u0663 /srv/a", "write NUMBER FILE"),
        ("1 /srv/a", "LUN 1 is in an earlier line"),
        ("2 /srv/a:block=7", "`block=7`"),
    ],
)
def test_lines_that_are_wrong(line: str, words: str) -> None:
    with pytest.raises(BadArgument, match=words) as caught:
        parse_lun_list(f"1 /srv/x\n{line}")
    assert str(caught.value).startswith("luns, line 2: ")


def test_units_come_and_go(tmp_path: Path) -> None:
    path = tmp_path / "luns"
    path.write_text(f"3 {tmp_path}/a:size=1M\n4 {tmp_path}/b:size=1M\n")
    luns = LunList(path, IQN)
    for lun, spec in luns.read().items():
        luns.open(lun, spec)
    specs = luns.read()
    assert luns.gone(specs) == luns.new(specs) == []
    path.write_text(f"4 {tmp_path}/b:size=1M:ro\n5 {tmp_path}/c:size=1M\n")
    specs = luns.read()
    assert luns.gone(specs) == [3, 4] and luns.new(specs) == [5]
    with pytest.raises(Busy):
        luns.open(9, LunSpec(f"{tmp_path}/b"))
    assert 9 not in luns.units
    assert luns.close(luns.gone(specs)) == ""
    assert luns.new(specs) == [4, 5]
    assert luns.open(4, specs[4]).read_only
    assert luns.close(list(luns.units)) == "" and not luns.units


def test_numbers_that_are_taken_and_files_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "luns"
    luns = LunList(path, IQN, range(2))
    with pytest.raises(BadArgument, match="No such file"):
        luns.read()
    path.write_text("1 /srv/a")
    with pytest.raises(BadArgument, match="LUN 1 is a --lun"):
        luns.read()
    path.write_bytes(b"\xff")
    with pytest.raises(BadArgument, match="UTF-8"):
        luns.read()


@pytest.mark.logs("what its cache held is lost")
def test_a_unit_that_cannot_be_closed_keeps_no_other_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    luns = LunList(tmp_path / "luns", IQN)
    units = [luns.open(lun, LunSpec(f"{tmp_path}/{lun}", size=1 << 20)) for lun in range(2)]
    close = units[0].close

    def fail() -> None:
        close()
        raise OSError(5, "bad block")

    monkeypatch.setattr(units[0], "close", fail)
    assert "0: bad block: what its cache held is lost" in luns.close([0, 1])
    assert not luns.units
