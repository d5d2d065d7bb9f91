"""The file of --luns: its lines, and LUNs that come and go with them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from iserblk.errors import BadArgument, Busy
from iserblk.target.lunlist import LunList, parse_lun_list, read_lun_list
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
    luns = LunList(IQN)
    a, b = (LunSpec(f"{tmp_path}/{name}", size=1 << 20) for name in "ab")
    specs = {3: a, 4: b}
    assert luns.gone(specs) == [] and luns.new(specs) == specs
    for lun, spec in specs.items():
        luns.open(lun, spec)
    assert luns.gone(specs) == [] and luns.new(specs) == {}
    specs = {4: replace(b, read_only=True), 5: LunSpec(f"{tmp_path}/c", size=1 << 20)}
    assert luns.gone(specs) == [3, 4] and list(luns.new(specs)) == [5]
    with pytest.raises(Busy):
        luns.open(9, LunSpec(f"{tmp_path}/b"))
    assert 9 not in luns.units
    leaving = luns.withdraw(luns.gone(specs))
    assert not luns.units and [each.lun for each in leaving] == [3, 4]
    assert [luns.close(each) for each in leaving] == ["", ""]
    assert luns.new(specs) == specs
    assert luns.open(4, specs[4]).read_only
    assert luns.close_all() == [] and not luns.units


def test_the_end_closes_what_is_leaving_too(tmp_path: Path) -> None:
    luns = LunList(IQN)
    for lun in range(2):
        luns.open(lun, LunSpec(f"{tmp_path}/{lun}", size=1 << 20))
    luns.withdraw([1])
    assert luns.close_all() == [] and not luns.leaving
    for lun in range(2):  # else Busy
        luns.open(lun, LunSpec(f"{tmp_path}/{lun}"))
    luns.close_all()


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "luns"
    with pytest.raises(BadArgument, match=r"--luns .*No such file"):
        read_lun_list(path)
    path.write_bytes(b"\xff")
    with pytest.raises(BadArgument, match="UTF-8"):
        read_lun_list(path)
    path.write_bytes(b"1 /srv/a\0b")
    with pytest.raises(BadArgument, match="NUL"):
        read_lun_list(path)
    path.write_text("1 /srv/a")
    assert read_lun_list(path) == {1: LunSpec("/srv/a")}


@pytest.mark.plain("replaces a method")
def test_a_unit_that_cannot_be_closed_keeps_no_other_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    luns = LunList(IQN)
    units = [luns.open(lun, LunSpec(f"{tmp_path}/{lun}", size=1 << 20)) for lun in range(2)]
    close = units[0].close

    def fail() -> None:
        close()
        raise OSError(5, "bad block")

    monkeypatch.setattr(units[0], "close", fail)
    assert luns.close_all() == [f"{tmp_path}/0: bad block: what its cache held is lost"]
    assert not luns.units and not luns.leaving
