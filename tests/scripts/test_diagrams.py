"""The diagrams of the state tables."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module

import pytest
from diagrams import SECTIONS, Table

from ..support.target import ROOT


def is_table(value: ast.AST) -> bool:
    """Whether it is written as a state table: a dict whose keys are all (State.X, Event.Y)."""
    return (
        isinstance(value, ast.Dict)
        and len(value.keys) > 0
        and all(
            isinstance(key, ast.Tuple)
            and len(key.elts) == 2
            and all(isinstance(each, ast.Attribute) for each in key.elts)
            for key in value.keys
        )
    )


def tables(text: str) -> Iterator[str]:
    """The names of the state tables of a module, itself or within a call."""
    for statement in ast.parse(text).body:
        if isinstance(statement, ast.AnnAssign):
            target: ast.expr = statement.target
        elif isinstance(statement, ast.Assign):
            target = statement.targets[0]
        else:
            continue
        if statement.value and any(is_table(node) for node in ast.walk(statement.value)):
            yield ast.unparse(target)


def test_the_document_is_current() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts/diagrams.py"), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    "table", [table for *_, table in SECTIONS], ids=[row[0] for row in SECTIONS]
)
def test_every_transition_is_an_arrow(table: Table) -> None:
    text = (ROOT / "docs/states.md").read_text(encoding="utf-8")
    for (state, event), after in table.items():
        words = event.value.replace(":", ",")
        assert f"    {state.name} --> {after.name}: {words}\n" in text


def test_what_counts_as_a_state_table() -> None:
    text = """
A: T = {(State.X, Event.Y): State.Z}
B = frozen({(State.X, Event.Y): State.Z, (State.Z, Event.Y): State.X})
C = {State.X: 1}
D = {(State.X, "text"): 1}
E: T
"""
    assert list(tables(text)) == ["A", "B"]


def test_every_state_table_of_the_code_is_drawn() -> None:
    """The page says that it has them all, with their names and files."""
    text = (ROOT / "docs/states.md").read_text(encoding="utf-8")
    drawn = [table for *_, table in SECTIONS]
    found = 0
    for path in sorted((ROOT / "iserblk").rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        for table in tables(path.read_text(encoding="utf-8")):
            module = import_module(name.removesuffix(".py").replace("/", "."))
            assert any(getattr(module, table) is each for each in drawn), f"{table} of {name}"
            assert f"`{table}` in {name}" in text
            found += 1
    assert found == len(drawn)
