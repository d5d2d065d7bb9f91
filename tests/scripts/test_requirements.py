"""The generator of docs/requirements.md, and what the tests of this project name."""

from __future__ import annotations

import csv
import importlib.util
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

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


@pytest.fixture(scope="module")
def requirements() -> ModuleType:
    spec = importlib.util.spec_from_file_location("requirements", TOP / "scripts/requirements.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_ids_are_attributed_to_the_innermost_test(requirements: ModuleType, tmp_path: Path) -> None:
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


def test_document_counts_and_says_what_is_missing(requirements: ModuleType) -> None:
    """A requirement without a test has its reason, or "not yet"."""
    rows = [
        {"id": "ISER-1-1", "role": "both", "level": "MUST", "requirement": "a | b"},
        {"id": "ISER-1-2", "role": "target", "level": "MUST", "requirement": "c"},
        {"id": "ISER-1-3", "role": "both", "level": "MAY", "requirement": "d"},
    ]
    tests = {"ISER-1-2": ["tests/t.py::x", "tests/t.py::y"]}
    text = requirements.document(rows, tests, {"ISER-1-3": "a permission"})
    assert "| MAY | 1 | 0 | 1 |\n| MUST | 2 | 1 | 0 |\n" in text
    assert "| ISER-1-1 | both | MUST | a \\| b | not yet |\n" in text
    assert "| ISER-1-2 | target | MUST | c | `tests/t.py::x`<br>`tests/t.py::y` |\n" in text
    assert "| ISER-1-3 | both | MAY | d | not shown: a permission |\n" in text


def test_mistakes(requirements: ModuleType) -> None:
    tests = {"ISER-1-1": ["tests/t.py::x"], "ISER-2-2": ["tests/t.py::y"]}
    unshown = {"ISER-1-1": "why", "ISER-1-2": "why", "ISER-3-3": "why"}
    assert requirements.mistakes({"ISER-1-1", "ISER-1-2"}, tests, unshown) == [
        "ISER-2-2 does not exist: tests/t.py::y",
        "ISER-3-3 of requirements-unshown.toml does not exist",
        "ISER-1-1 has a reason in requirements-unshown.toml, and a test: tests/t.py::x",
    ]


@pytest.fixture(scope="module")
def unshown() -> dict[str, str]:
    with (TOP / "docs/requirements-unshown.toml").open("rb") as file:
        return tomllib.load(file)


def test_ids_exist_and_have_a_test_or_a_reason_but_not_both(
    requirements: ModuleType, unshown: dict[str, str]
) -> None:
    with (TOP / "docs/requirements.csv").open(newline="") as file:
        known = {row["id"] for row in csv.DictReader(file)}
    assert all(requirements.ID.fullmatch(requirement) for requirement in known)
    assert requirements.mistakes(known, requirements.collect(TOP / "tests"), unshown) == []


def test_each_reason_is_one_cell_of_the_table(unshown: dict[str, str]) -> None:
    for reason in unshown.values():
        assert reason and not set("|\n") & set(reason)
