"""docs/threats.md names tests that exist, for each line of its tables."""

from __future__ import annotations

import re

import pytest

from tests.support.target import ROOT

PAGE = (ROOT / "docs/threats.md").read_text(encoding="utf-8")
ROWS = [
    line.strip("|").split(" | ")
    for line in PAGE.splitlines()
    if line.startswith("| ") and not line.startswith(("| what they can do |", "| --- |"))
]


def test_each_table_has_rows() -> None:
    assert PAGE.count("| what they can do | what holds | shown by |") >= 5
    assert len(ROWS) >= 20


@pytest.mark.parametrize("row", ROWS, ids=[row[0].strip()[:40] for row in ROWS])
def test_a_row(row: list[str]) -> None:
    """Its tests exist, or it leads to another table."""
    _, _, shown = row
    named = re.findall(r"`(tests/[^`]*)`", shown)
    assert named or shown.strip() == "the next table"
    for each in named:
        path, _, name = each.partition("::")
        assert (ROOT / path).exists(), path
        assert not name or f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), each
