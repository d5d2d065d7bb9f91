"""What is counted in the source of a checkout."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PRODUCT = ("iserblk", "fuse_mount", "nbd_plugin")
_SOURCES = (".py", ".pyx", ".pxd")
_LOCKS = {"Lock", "RLock", "Condition", "Semaphore", "BoundedSemaphore", "CapacityLimiter"}
# Faces, and what stands beside the way of a request: their locks are their own.
_BESIDE = ("cli", "csi", "discovery", "metrics", "nbd")
MOST_ATTRIBUTES = 30
MOST_LINES = 80


@dataclass(slots=True, frozen=True)
class Figures:
    """``locks``, ``task_slot``: module → how many; ``classes``, ``functions``: those that are too
    large, as "module: name" → attributes, lines."""

    product_lines: int
    test_lines: int
    locks: dict[str, int]
    task_slot: list[str]
    classes: dict[str, int]
    functions: dict[str, int]


def count(top: Path) -> Figures:
    """Count in the checkout ``top``. Raises OSError, SyntaxError."""
    sources = [path for name in PRODUCT for path in _files(top / name)]
    locks: dict[str, int] = {}
    task_slot: list[str] = []
    classes: dict[str, int] = {}
    functions: dict[str, int] = {}
    for path in sources:
        if path.suffix != ".py":
            continue
        module = path.relative_to(top).as_posix()
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
        found = sum(_makes_lock(node) for node in ast.walk(tree))
        if found and _is_below_the_faces(module):
            locks[module] = found
        if _is_above_the_initiator(module) and any(map(_imports_task_slot, ast.walk(tree))):
            task_slot.append(module)
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not _is_dataclass(node):
                attributes = len(_attributes(node))
                if attributes > MOST_ATTRIBUTES:
                    classes[f"{module}: {node.name}"] = attributes
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MOST_LINES:
                    functions[f"{module}: {node.name}"] = lines
    return Figures(
        sum(map(_lines, sources)),
        sum(map(_lines, _files(top / "tests"))),
        locks,
        task_slot,
        classes,
        functions,
    )


def _files(directory: Path) -> Iterator[Path]:
    for path in sorted(directory.rglob("*")):
        if path.suffix in _SOURCES:
            yield path


def _lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def _is_below_the_faces(module: str) -> bool:
    package, _, rest = module.partition("/")
    return package == "iserblk" and rest.partition("/")[0] not in _BESIDE


def _is_above_the_initiator(module: str) -> bool:
    return not module.startswith("iserblk/initiator/")


def _makes_lock(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    made = node.func
    name = made.attr if isinstance(made, ast.Attribute) else getattr(made, "id", "")
    return name in _LOCKS


def _imports_task_slot(node: ast.AST) -> bool:
    return isinstance(node, ast.ImportFrom) and any(each.name == "TaskSlot" for each in node.names)


def _is_dataclass(node: ast.ClassDef) -> bool:
    """Of fields that belong together, such as the options of a URL: their number says nothing."""
    for each in node.decorator_list:
        called = each.func if isinstance(each, ast.Call) else each
        if getattr(called, "id", "") == "dataclass":
            return True
    return False


def _attributes(node: ast.ClassDef) -> set[str]:
    """What the class sets on ``self``, or declares."""
    found = {
        each.target.id
        for each in node.body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    for each in ast.walk(node):
        if (
            isinstance(each, ast.Attribute)
            and isinstance(each.ctx, ast.Store)
            and getattr(each.value, "id", "") == "self"
        ):
            found.add(each.attr)
    return found
