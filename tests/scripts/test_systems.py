"""systems.md: every system of the specifications has tests, or a reason."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import systems

from ..support.target import ROOT


def test_the_script(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts/systems.py"), "--output", str(tmp_path / "new")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    made = systems.document(systems.read(), systems.collect(ROOT / "tests"))
    assert (tmp_path / "new/systems.md").read_text(encoding="utf-8") == made


def test_every_system_has_a_test_or_a_reason() -> None:
    data = systems.read()
    assert list(data) == list(range(1, systems.COUNT + 1))
    assert systems.mistakes(data, systems.collect(ROOT / "tests")) == []


def test_entries_have_known_keys_and_are_cells_of_a_table() -> None:
    needed = {"name", "source", "works"}
    for number, system in systems.read().items():
        assert needed <= set(system) <= {*needed, "against", "missing", "reason"}, number
        assert all(text and not set("|\n") & set(text) for text in system.values()), number


def test_tests_name_systems_by_number(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_x.py").write_text(
        'BAD = "SYSTEM-9 in a string"\n\n# shows: SYSTEM-2, SYSTEM-10\ndef test_a(): pass\n\n'
        'def test_b():\n    """Something. shows: SYSTEM-2"""\n'
    )
    assert systems.collect(tmp_path / "tests") == {
        2: ["tests/test_x.py::test_a", "tests/test_x.py::test_b"],
        10: ["tests/test_x.py::test_a"],
    }


def test_mistakes_and_the_document() -> None:
    row = {"name": "n", "source": "s", "works": "w"}
    data = {
        1: {**row, "against": "LIO", "missing": "the rest"},
        2: {**row, "reason": "hardware"},
        3: row,
        4: {**row, "reason": "hardware"},
        5: {**row, "against": "LIO"},
    }
    tests = {1: ["t::a", "t::b"], 3: ["t::c"], 4: ["t::d"], 9: ["t::e"]}
    assert systems.mistakes(data, tests) == [
        "SYSTEM-9 does not exist: t::e",
        "system 3 (n) does not say against whom",
        "system 4 has a reason, and tests: ['t::d']",
        "system 5 (n) has neither a test nor a reason",
    ]
    text = systems.document(data, tests)
    assert "3 of 5 are shown by tests; 2 cannot be (2, 4), for a reason." in text
    assert "| 1 | n | s | w | LIO. Not shown: the rest | `t::a`<br>`t::b` |\n" in text
    assert "| 2 | n | s | w |  | not shown: hardware |\n" in text
    assert "| 5 | n | s | w | LIO | none |\n" in text
