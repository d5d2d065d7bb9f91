"""The two forms of the data path: which of them runs, and that it is said."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import iserblk
from iserblk import forms

TOP = Path(iserblk.__file__).parent.parent
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
LIBRARY = f"{forms.LIBRARY}{SUFFIX}"
COMPILED = (TOP / LIBRARY).exists()
SHOW = """
import importlib
from iserblk import forms
print(forms.why_plain)
for module in forms.MODULES:
    print(importlib.import_module(module).__file__)
"""


def show(top: Path, plain: str = "") -> tuple[str, set[str]]:
    """Why the checkout at ``top`` runs its plain form, and the suffixes of its modules' files."""
    shown = subprocess.run(
        [sys.executable, "-P", "-c", SHOW],
        env={**os.environ, "PYTHONPATH": str(top), "ISERBLK_PLAIN": plain},
        cwd=top,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    reason, *files = shown.splitlines()
    assert len(files) == len(forms.MODULES)
    assert all(Path(file).is_relative_to(top) for file in files)
    return reason, {file.removeprefix(file.split(".")[0]) for file in files}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of this one, with what was compiled."""
    top = tmp_path / "checkout"
    shutil.copytree(TOP / "iserblk", top / "iserblk", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy2(TOP / "setup.py", top)
    if COMPILED:
        shutil.copy2(TOP / LIBRARY, top)
    return top


def test_this_process() -> None:
    if forms.why_plain == forms.STALE:
        pytest.fail("what was compiled is older than its sources: run scripts/setup")
    from iserblk.rcap import stags  # noqa: PLC0415

    assert stags.__file__.endswith(".py" if forms.why_plain else SUFFIX)


def test_as_written(checkout: Path) -> None:
    assert show(checkout, plain="1") == (forms.UNWANTED, {".py"})
    (checkout / LIBRARY).unlink(missing_ok=True)
    assert show(checkout) == (forms.NOT_COMPILED, {".py"})
    assert show(checkout, plain="0") == (forms.NOT_COMPILED, {".py"})


@pytest.mark.skipif(not COMPILED, reason="not compiled: run scripts/setup")
def test_compiled_as_long_as_no_source_is_newer(checkout: Path) -> None:
    assert show(checkout) == ("", {SUFFIX})
    edited = checkout / "iserblk/rcap/stags.py"
    built = (checkout / LIBRARY).stat().st_mtime_ns
    os.utime(edited, ns=(built + 1, built + 1))
    assert show(checkout) == (forms.STALE, {".py"})
    (checkout / "setup.py").unlink()  # then it is installed, and times tell nothing
    assert show(checkout) == ("", {SUFFIX})


WRAPPING = {"i64", "i32", "i16", "u8"}


def test_no_module_computes_with_numbers_that_wrap() -> None:
    """A peer's numbers must not overflow: only Python's own integers are exact."""
    for module in forms.MODULES:
        tree = ast.parse(Path(forms.source_of(module)).read_text())
        names = {each.id for each in ast.walk(tree) if isinstance(each, ast.Name)}
        names |= {each.attr for each in ast.walk(tree) if isinstance(each, ast.Attribute)}
        names |= {each.name for each in ast.walk(tree) if isinstance(each, ast.alias)}
        assert not names & WRAPPING, module


WAITS = (ast.Yield, ast.YieldFrom, ast.Await, ast.AsyncFor, ast.AsyncWith)
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


def waits(node: ast.AST) -> bool:
    """Whether this code, without functions that are defined in it, may be suspended."""
    if isinstance(node, SCOPES):
        return False
    return isinstance(node, WAITS) or any(waits(each) for each in ast.iter_child_nodes(node))


def waiting_handlers(tree: ast.AST) -> list[int]:
    """Lines of each ``try`` of which a handler, or the ``finally``, may be suspended."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Try)
        for each in (*node.handlers, *node.finalbody)
        if waits(each)
    ]


def test_no_generator_waits_while_it_handles_an_exception() -> None:
    """A compiled one sets back what is handled when it leaves the handler: to what was handled when
    it came there. If it is closed meanwhile, the process crashes."""
    for module in forms.MODULES:
        tree = ast.parse(Path(forms.source_of(module)).read_text())
        assert not waiting_handlers(tree), module


def test_handlers_that_wait_are_found() -> None:
    for line in ("yield", "yield from x()", "if x:\n        y = await z", "async with x: pass"):
        for kind in ("except ValueError", "finally"):
            assert waiting_handlers(ast.parse(f"try:\n    pass\n{kind}:\n    {line}"))
    assert not waiting_handlers(ast.parse("try:\n    yield\nfinally:\n    def f(): yield"))


def test_every_module_is_there() -> None:
    assert len(set(forms.MODULES)) == len(forms.MODULES)
    for module in forms.MODULES:
        assert Path(forms.source_of(module)).is_file()
