"""Every import is of the standard library, of ours, or of a dependency that is declared."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OURS = {
    "iserblk",
    "fuse_mount",
    "tests",
    "benchlib",
    "bootlib",
    "docslib",
    "figureslib",
    "fuzzlib",
    "kubeletlib",
    "lablib",
    "manlib",
    "mutationslib",
    "outagelib",
    "screenshotlib",
    "simulatelib",
    "soaklib",
    "fake_disk",
}
# Debian's packages: scripts/setup installs those that no index of Python packages has; the build of
# the Debian package has packaging.
DEBIAN = {"pyverbs", "nbd", "nbdkit", "packaging"}
ON_DEMAND = {"atheris"}  # scripts/fuzz installs it, into a place of its own
FOR_TYPES = {"_typeshed"}  # no module at all: type checkers know it
# Where a package has another name than the module that is imported.
IMPORTED_AS = {
    "prometheus-client": "prometheus_client",
    "pytest-trio": "pytest_trio",
    "virtme-ng": "virtme",
    "cython": "Cython",
    "grpcio": "grpc",
    "protobuf": "google",
    "mypy-extensions": "mypy_extensions",
    "cyclonedx-python-lib": "cyclonedx",
}

OF_EXTRAS = {"csi": "iserblk/csi", "fuse": "fuse_mount"}  # extra → who alone may need it


@cache
def declared(*extras: str) -> frozenset[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    lines = list(project["project"]["dependencies"])
    for extra in extras:
        lines += project["project"]["optional-dependencies"][extra]
    names = {re.split(r"[^A-Za-z0-9_-]", line)[0] for line in lines}
    return frozenset(IMPORTED_AS.get(name, name) for name in names)


@cache
def imported(path: Path) -> frozenset[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return frozenset(found - sys.stdlib_module_names - OURS - DEBIAN - ON_DEMAND - FOR_TYPES)


@pytest.mark.parametrize("place", ["iserblk", "fuse_mount", "nbd_plugin"])
def test_what_runs_needs_what_is_declared(place: str) -> None:
    """Without FUSE nothing needs pyfuse3, which has to be compiled."""
    for path in sorted((ROOT / place).rglob("*.py")):
        extras = [name for name in OF_EXTRAS if path.is_relative_to(ROOT / OF_EXTRAS[name])]
        assert imported(path) <= declared(*extras), path


@pytest.mark.parametrize("place", ["scripts", "tests"])
def test_what_develops_needs_what_is_declared(place: str) -> None:
    known = declared("dev", "fuse")
    scripts = ROOT / "scripts"
    for path in sorted((ROOT / place).rglob("*.py")):
        # Run beside each other; tests/scripts/conftest.py puts scripts/ on the path.
        beside = scripts if path.parent == ROOT / "tests/scripts" else path.parent
        here = {each.stem for each in beside.glob("*.py")}
        assert imported(path) - here <= known, path


def test_every_declared_dependency_is_imported() -> None:
    """A dependency that no module needs is to be removed."""
    places = ("iserblk", "fuse_mount", "nbd_plugin")
    used = {
        name for place in places for path in (ROOT / place).rglob("*.py") for name in imported(path)
    }
    assert declared("fuse") <= used
