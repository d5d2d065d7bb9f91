"""The table of peers is made from results, and keeps what was not run again."""

from __future__ import annotations

import importlib.util
import json
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


# --- the page that is written by hand -------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "short"),
    [
        ("Linux 6.1.0-56-amd64", "Linux 6.1"),
        ("tgt 1:1.0.85-1", "tgt 1.0.85"),
        ("qemu-utils 1:7.2+dfsg-7+deb12u18+b3", "qemu-utils 7.2"),
        ("OpenSLP 2.0.0", "OpenSLP 2.0.0"),
    ],
)
def test_versions_that_the_page_lacks(version: str, short: str) -> None:
    """Debian's epochs and revisions do not matter."""
    results = {ONE: {**row(), "version": version}, GONE: None}
    assert interop.unnamed(f"| x | {short} |", results) == []
    assert interop.unnamed("| x | other |", results) == [short]


def test_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on with the document of the run before; without any row there is none."""
    monkeypatch.setattr(interop, "DOCUMENT", tmp_path / "build/docs/interop-results.md")
    results = tmp_path / "results"
    monkeypatch.setattr("sys.argv", ["interop.py", str(results)])
    results.write_text("{}")
    assert interop.main() == 0 and not interop.DOCUMENT.exists()
    for test in (ONE, ONE + "x"):
        results.write_text(json.dumps({test: row()}))
        assert interop.main() == 0
    rows = interop.old_rows(interop.DOCUMENT.read_text(encoding="utf-8"))
    assert set(rows) == {ONE, ONE + "x"}


# --- rows of the past -----------------------------------------------------------------------------

GROUP = "tests/integration/test_conformance.py::test_group"
LONG, SHORT = f"{GROUP}[ExtendedCopy-4096]", f"{GROUP}[ExtendedCopy-512]"


def conformance(
    passed: str, lun: str, group: str = "ExtendedCopy", version: str = "1"
) -> dict[str, str]:
    return {"table": "conformance", "group": group, "lun": lun, "passed": passed, "left_out": "",
            "version": version}  # fmt: skip


def document(*runs: tuple[str, dict[str, dict[str, str]]]) -> dict[str, tuple[str, ...]]:
    """The rows of the document after runs on these days, each read from what the one before has
    written."""
    rows: dict[str, tuple[str, ...]] = {}
    for today, results in runs:
        rows = interop.old_rows(interop.render(interop.merge(rows, results, today)))
    return rows


def test_a_change_takes_the_rows_of_the_same_function_that_were_not_run() -> None:
    first = {LONG: conformance("0 of 6", "4096"), SHORT: conformance("0 of 6", "512"),
             f"{GROUP}[Read6-4096]": conformance("2 of 2", "4096", "Read6")}  # fmt: skip
    rows = document(("2026-01-01", first), ("2026-02-02", {SHORT: conformance("6 of 6", "512")}))
    assert set(rows) == {SHORT, f"{GROUP}[Read6-4096]"}


def test_a_run_of_all_of_a_function_gives_all_its_rows_one_day() -> None:
    """Also those that say what they said before."""
    both = {LONG: conformance("6 of 6", "4096"), SHORT: conformance("0 of 6", "512")}
    again = {**both, SHORT: conformance("6 of 6", "512")}
    rows = document(("2026-01-01", both), ("2026-02-02", again))
    assert {test: cells[-2] for test, cells in rows.items()} == dict.fromkeys(both, "2026-02-02")


def test_a_run_that_changes_nothing_takes_nothing() -> None:
    both = {LONG: conformance("6 of 6", "4096"), SHORT: conformance("6 of 6", "512")}
    rows = document(("2026-01-01", both), ("2026-02-02", {SHORT: both[SHORT]}))
    assert {test: cells[-2] for test, cells in rows.items()} == dict.fromkeys(both, "2026-01-01")


def test_two_parts_of_one_day_are_one_run() -> None:
    """As scripts/test has the tests of this machine, and then those of each virtual machine."""
    rows = document(
        ("2026-01-01", {SHORT: conformance("6 of 6", "512")}),
        ("2026-01-01", {LONG: conformance("6 of 6", "4096")}),
    )
    assert set(rows) == {SHORT, LONG}


def test_a_document_with_rows_of_several_days() -> None:
    """As older versions of the script have written it: the newest of each function stay."""
    new = interop.merge({}, {SHORT: conformance("6 of 6", "512")}, "2026-02-02")
    old = interop.merge({}, {LONG: conformance("0 of 6", "4096")}, "2026-01-01")
    (left,) = interop.merge({LONG: old[0], SHORT: new[0]}, {}, "2026-03-03")
    assert left == new[0]


def test_another_version_of_a_peer_takes_the_rows_of_the_one_before() -> None:
    """Of all functions, but only where tests of the same place have run."""
    elsewhere = "tests/scripts/test_interop.py::test_two"
    here = "tests/lab/test_lab.py::test_three"
    first = {ONE: row(), here: row(), elsewhere: row()}
    rows = document(("2026-01-01", first), ("2026-02-02", {ONE: {**row(), "version": "2"}}))
    assert {test: cells[2] for test, cells in rows.items()} == {ONE: "2", elsewhere: "1"}


def test_several_versions_of_a_peer_in_one_run() -> None:
    here = "tests/lab/test_lab.py::test_three"
    both = {ONE: row(), here: {**row(), "version": "2"}}
    assert set(document(("2026-01-01", both), ("2026-02-02", both))) == {ONE, here}
