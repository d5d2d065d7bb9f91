"""The file of --access: which initiator has access to which LUNs, and as which user."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from iserblk.errors import BadArgument
from iserblk.target.access import parse_access, read_access

A, B, C = (f"iqn.2026-11.example:{letter}" for letter in "abc")
TEXT = f"""
# hosts
{A.upper()}   0,2-4   alice
{B}\tall
* none
"""


def test_lines() -> None:
    access = parse_access(TEXT)
    assert [lun for lun in range(8) if access.allows(A, lun)] == [0, 2, 3, 4]
    assert access.allows(A.upper(), 3)
    assert access.allows(B, 0) and access.allows(B, 16383)
    assert not any(access.allows(C, lun) for lun in range(8))
    assert access.users == {"alice"}


def test_users() -> None:
    access = parse_access(TEXT)
    assert access.may_log_in(A, "alice") and access.may_log_in(A.upper(), "alice")
    assert not access.may_log_in(A, "") and not access.may_log_in(A, "bob")
    for user in ("", "alice", "bob"):
        assert access.may_log_in(B, user) and access.may_log_in(C, user)


def test_without_a_line_for_others_they_have_nothing() -> None:
    access = parse_access(f"{A} 0")
    assert access.allows(A, 0) and not access.allows(B, 0)
    assert not parse_access("").allows(A, 0)


def test_a_line_of_its_own_comes_before_that_of_all_others() -> None:
    access = parse_access(f"{A} none\n* 7")
    assert access.allows(B, 7) and not access.allows(A, 7)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (A, "write INITIATOR LUNS"),
        (f"{A} 0 alice bob", "write INITIATOR LUNS"),
        ("disk 0", "no iSCSI name"),
        (f"{A} 0,,1", "'' is no LUN"),
        (f"{A} 4-2", "'4-2' is no LUN"),
        (f"{A} 16384", "'16384' is no LUN"),
        (f"{A} -1", "'-1' is no LUN"),
        (f"{A} \u0663", "is no LUN"),
        ("* 0 alice", "no user"),
        (f"{B} 0\n{B.upper()} 1", "line 3: repeats"),
    ],
)
def test_lines_that_are_wrong(line: str, words: str) -> None:
    with pytest.raises(BadArgument, match=words) as caught:
        parse_access(f"{A.replace(':a', ':z')} 0\n{line}")
    assert re.match("access, line [0-9]+: ", str(caught.value))


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "access"
    path.write_text(TEXT)
    assert read_access(path).users == {"alice"}
    path.write_bytes(b"\xff")
    with pytest.raises(BadArgument, match="UTF-8"):
        read_access(path)
    with pytest.raises(BadArgument, match="No such file"):
        read_access(tmp_path / "nothing")
