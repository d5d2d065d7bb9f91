"""The table of peers is made from results, and keeps what was not run again."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

_PATH = Path(__file__).resolve().parents[2] / "scripts" / "interop.py"
_spec = importlib.util.spec_from_file_location("interop", _PATH)
assert _spec is not None and _spec.loader is not None
interop = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(interop)

ONE = "tests/lab/test_lab.py::test_one"
GONE = "tests/lab/test_gone.py::test_gone"


def row(ran: str = "much") -> dict[str, str]:
    return {"ours": "target", "peer": "them", "version": "1", "transport": "RoCE", "ran": ran}


def test_rows_come_back_as_they_were_written() -> None:
    rows = interop.merge({}, {ONE: row(), ONE + "x": row("a | b")}, "2026-01-01")
    text = interop.render(rows)
    assert sorted(interop.old_rows(text).values()) == rows
    assert len(rows) == 2


def test_rows_of_the_other_table() -> None:
    suite = {"table": "conformance", "group": "G", "lun": "L", "passed": "3", "left_out": ""}
    rows = interop.merge({}, {ONE: row(), ONE + "x": {**suite, "version": "1"}}, "2026-01-01")
    text = interop.render(rows)
    assert "## Conformance" in text
    assert sorted(interop.old_rows(text).values()) == rows
    assert interop.merge(interop.old_rows(text), {}, "2026-02-02") == rows


def test_what_was_not_run_again_stays() -> None:
    old = interop.old_rows(interop.render(interop.merge({}, {ONE: row()}, "2026-01-01")))
    (first,) = interop.merge(old, {}, "2026-02-02")
    assert first[-2] == "2026-01-01"


def test_the_same_again_changes_nothing() -> None:
    old = interop.old_rows(interop.render(interop.merge({}, {ONE: row()}, "2026-01-01")))
    assert interop.merge(old, {ONE: row()}, "2026-02-02") == list(old.values())
    (changed,) = interop.merge(old, {ONE: row("more")}, "2026-02-02")
    assert changed[-2] == "2026-02-02"


@pytest.mark.parametrize("results", [{ONE: None}, {ONE: None, GONE: row()}])
def test_failures_and_tests_that_are_no_more_go(results: dict[str, object]) -> None:
    old = interop.old_rows(interop.render(interop.merge({}, {ONE: row()}, "2026-01-01")))
    assert interop.merge(old, results, "2026-02-02") == []


def test_the_document_is_what_the_script_makes() -> None:
    text = interop.DOCUMENT.read_text(encoding="utf-8")
    assert text == interop.render(sorted(interop.old_rows(text).values()))
