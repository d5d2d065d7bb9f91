"""requirements.md: how it is built, and what the tests of this project name."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import requirements

TOP = Path(__file__).resolve().parents[2]

MODULE = '''\
"""ISER-1.1-1 belongs to the module."""
BAD = "ISER-9.9-9 in a string counts for nothing"

# ISER-1.1-2: the comment directly above
@decorator
def test_above(): pass

def test_docstring():
    """First line.

    ISER-1.1-3, ISER-GEN-2.1.1-1.
    """
    value = 1  # proves: ISER-1-A-1

class TestGroup:
    async def test_inner(self):
        # ISER-RC-3
        assert value
'''


def test_ids_are_attributed_to_the_innermost_test(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_x.py").write_text(MODULE)
    assert requirements.collect(tmp_path / "tests") == {
        "ISER-1.1-1": ["tests/test_x.py"],
        "ISER-1.1-2": ["tests/test_x.py::test_above"],
        "ISER-1.1-3": ["tests/test_x.py::test_docstring"],
        "ISER-GEN-2.1.1-1": ["tests/test_x.py::test_docstring"],
        "ISER-1-A-1": ["tests/test_x.py::test_docstring"],
        "ISER-RC-3": ["tests/test_x.py::TestGroup::test_inner"],
    }


def test_document_counts_and_says_what_is_missing() -> None:
    rows = [
        {"id": "ISER-1-1", "role": "both", "level": "MUST", "requirement": "a | b"},
        {"id": "ISER-1-2", "role": "target", "level": "MUST", "requirement": "c"},
        {"id": "ISER-1-3", "role": "both", "level": "MAY", "requirement": "d"},
    ]
    tests = {"ISER-1-2": ["tests/t.py::x", "tests/t.py::y"]}
    text = requirements.document(rows, tests, {"ISER-1-3": "a permission"})
    assert "| MAY | 1 | 0 | 1 |\n| MUST | 2 | 1 | 0 |\n" in text
    assert "| ISER-1-1 | both | MUST | a \\| b | none |\n" in text
    assert "| ISER-1-2 | target | MUST | c | `tests/t.py::x`<br>`tests/t.py::y` |\n" in text
    assert "| ISER-1-3 | both | MAY | d | not shown: a permission |\n" in text


def test_mistakes() -> None:
    tests = {"ISER-1-1": ["tests/t.py::x"], "ISER-2-2": ["tests/t.py::y"]}
    unshown = {"ISER-1-1": "why", "ISER-1-2": "why", "ISER-3-3": "why"}
    assert requirements.mistakes({"ISER-1-1", "ISER-1-2", "ISER-4-4"}, tests, unshown) == [
        "ISER-2-2 does not exist: tests/t.py::y",
        "ISER-3-3 of requirements-unshown.toml does not exist",
        "ISER-1-1 has a reason in requirements-unshown.toml, and a test: tests/t.py::x",
        "ISER-4-4 has neither a test nor a reason in requirements-unshown.toml",
    ]


@pytest.fixture(scope="module")
def unshown() -> dict[str, str]:
    with (TOP / "docs/requirements-unshown.toml").open("rb") as file:
        return tomllib.load(file)


def test_each_requirement_has_a_test_or_a_reason_but_not_both() -> None:
    text, wrong = requirements.made()
    assert wrong == []
    ids = [line.split(" | ")[0][2:] for line in text.splitlines() if line.startswith("| ISER-")]
    assert len(ids) > 500 and all(map(requirements.ID.fullmatch, ids))


def test_the_script(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(TOP / "scripts/requirements.py"), "--output", str(tmp_path / "new")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (tmp_path / "new/requirements.md").read_text(encoding="utf-8") == requirements.made()[0]


def test_each_reason_is_one_cell_of_the_table(unshown: dict[str, str]) -> None:
    for reason in unshown.values():
        assert reason and not set("|\n") & set(reason)
