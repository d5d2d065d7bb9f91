"""The two forms of the data path: which of them runs, and that it is said."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
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
    reason, suffixes = show(checkout)
    assert reason != forms.STALE, "what was compiled is older than its sources: run scripts/setup"
    assert (reason, suffixes) == ("", {SUFFIX})
    edited = checkout / "iserblk/rcap/stags.py"
    built = (checkout / LIBRARY).stat().st_mtime_ns
    os.utime(edited, ns=(built + 1, built + 1))
    assert show(checkout) == (forms.STALE, {".py"})
    (checkout / "setup.py").unlink()  # then it is installed, and times tell nothing
    assert show(checkout) == ("", {SUFFIX})


def made_before(checkout: Path, module: str) -> Path:
    """A file of that extension module which is older than all sources, and cannot be loaded."""
    path = checkout / f"{module.replace('.', '/')}{SUFFIX}"
    path.write_bytes(b"")
    os.utime(path, (1, 1))
    return path


@pytest.mark.parametrize("module", ["iserblk.scsi.limits", "iserblk.metrics.counting"])
def test_compiled_constants_have_a_source_elsewhere(checkout: Path, module: str) -> None:
    """mypyc writes the value into the code: an edit of a module that is not compiled counts."""
    made_before(checkout, forms.LIBRARY)
    later = 1 << 31
    for path in (checkout / "iserblk").rglob("*.py"):
        os.utime(path, (0, 0))
    edited = checkout / (module.replace(".", "/") + ".py")
    os.utime(edited, (later, later))
    assert show(checkout) == (forms.STALE, {".py"})


def test_what_is_compiled_no_more(checkout: Path) -> None:
    """It leaves its extension module, which would be preferred to its source."""
    made_before(checkout, forms.LIBRARY)
    made_before(checkout, "iserblk.limited_log")
    assert show(checkout) == (forms.STALE, {".py"})
    loaded(checkout, "iserblk.limited_log")


def run_in(top: Path, program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-c", program],
        env={**os.environ, "PYTHONPATH": str(top), "ISERBLK_PLAIN": "0"}, cwd=top, check=False,
        capture_output=True, text=True,
    )  # fmt: skip


def loaded(top: Path, module: str) -> None:
    done = run_in(top, f"import {module}")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("module", "user"),
    [
        ("iserblk._crc", "iserblk.crc"),
        ("iserblk.disk.durability._copies", "iserblk.disk.durability.journal"),
    ],
)
def test_what_cython_has_compiled_before_an_edit(checkout: Path, module: str, user: str) -> None:
    """It is not used: the edit would be ignored, or meet a caller that expects more."""
    made_before(checkout, module)
    loaded(checkout, user)
    refused = run_in(checkout, f"import {module}")
    assert f"{module} is older than its source" in refused.stderr


def test_all_that_cython_compiles_is_named() -> None:
    there = {str(path.relative_to(TOP)) for path in (TOP / "iserblk").rglob("*.p[xy][xd]")}
    named = [source for sources in forms.OF_CYTHON.values() for source in sources]
    assert there == {source for source in named if not source.endswith(".py")}
    assert all((TOP / source).is_file() for source in named)


def imported(tree: ast.AST) -> set[tuple[str, str]]:
    """What a module takes from others: their names, each with the name in it."""
    return {
        (node.module, each.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module
        for each in node.names
    }


def constants(module: str) -> set[str]:
    """Names of ``Final`` of a module, at its top level or in its classes."""
    return {
        node.target.id
        for node in ast.walk(ast.parse(Path(forms.source_of(module)).read_text()))
        if isinstance(node, ast.AnnAssign)
        and "Final" in ast.unparse(node.annotation)
        and isinstance(node.target, ast.Name)
    }


def test_all_modules_that_have_compiled_constants_are_named() -> None:
    of_constants = set()
    for module in forms.MODULES:
        for other, name in imported(ast.parse(Path(forms.source_of(module)).read_text())):
            for source, names in ((other, {name}), (f"{other}.{name}", None)):
                if source in forms.MODULES or not Path(forms.source_of(source)).is_file():
                    continue
                found = constants(source)
                if found if names is None else found & names:
                    of_constants.add(source)
    assert of_constants == set(forms.OF_CONSTANTS)


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


def at_import(node: ast.AST) -> Iterator[ast.AST]:
    """The expressions in a module that are computed while it is imported."""
    for each in ast.iter_child_nodes(node):
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = each.args
            found = [*arguments.defaults, *filter(None, arguments.kw_defaults)]
            for expression in (*found, *each.decorator_list):
                yield from ast.walk(expression)
        elif not isinstance(each, ast.Lambda):
            yield each
            yield from at_import(each)


def without_type(module: str) -> set[str]:
    """Names of a module that it computes at its top level, and does not say of which type."""
    found = set()
    for node in ast.parse(Path(forms.source_of(module)).read_text()).body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) != "Final":
            continue
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            computed = not isinstance(node.value, ast.Constant | ast.UnaryOp | ast.BinOp)
            if computed:
                found |= {
                    each.id
                    for target in targets
                    for each in ast.walk(target)
                    if isinstance(each, ast.Name)
                }
    return found


def test_what_others_compute_with_at_import_says_its_type() -> None:
    """mypyc has mypy take all compiled modules as one circle of imports, within which a module may
    be looked at before those of which it takes ``module.NAME``."""
    for path in sorted((TOP / "iserblk").rglob("*.py")):
        tree = ast.parse(path.read_text())
        modules = {
            name: f"{package}.{name}"
            for package, name in imported(tree)
            if (TOP / forms.source_of(f"{package}.{name}")).is_file()
        }
        for node in at_import(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                module = modules.get(node.value.id)
                assert not module or node.attr not in without_type(module), (
                    f"{path}:{node.lineno}: {module}.{node.attr} has no type that mypyc could see"
                )


def test_every_module_is_there() -> None:
    assert len(set(forms.MODULES)) == len(forms.MODULES)
    for module in forms.MODULES:
        assert Path(forms.source_of(module)).is_file()
