"""Generates docs/requirements.md: each requirement of requirements.csv, and the tests naming it.

A test names a requirement in its docstring, in a comment inside it, or in the comment directly
above it. A name in a class's or module's docstring, or in a comment between tests, counts for the
class or the module. Other text (strings, code) does not count. The output depends only on the csv
and the tests.

If the document is out of date, rewrites it, and says so. With --check it writes nothing, and ends
with status 1. The status is also 1 if a test names a requirement that does not exist.
"""

from __future__ import annotations

import argparse
import ast
import csv
import io
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ID = re.compile(r"\bISER-(?:[A-Z0-9.]+-)+[0-9]+\b")

HEAD = """# Requirements and the tests that prove them

Made by scripts/test (scripts/requirements.py) from requirements.csv and the tests; do not edit.
The ids are those of the csv, which paraphrases the specifications; "not yet" means that no test
names the requirement.

"""


def scopes(tree: ast.Module, lines: list[str]) -> list[tuple[int, int, str]]:
    """(first line, last line, name) of each test and class, outer before inner.

    A scope begins with the comment lines directly above it.
    """
    found = []

    def walk(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            first = min([node.lineno, *(item.lineno for item in node.decorator_list)])
            while first > 1 and lines[first - 2].lstrip().startswith("#"):
                first -= 1
            found.append((first, node.end_lineno or first, prefix + node.name))
            if isinstance(node, ast.ClassDef):
                walk(node.body, f"{prefix}{node.name}::")

    walk(tree.body, "")
    return found


def prose(tree: ast.Module, source: str) -> Iterator[tuple[int, str]]:
    """(line number, text) of every comment and of every line of every docstring."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    holders = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in ast.walk(tree):
        if isinstance(node, holders) and ast.get_docstring(node, clean=False):
            first, last = node.body[0].lineno, node.body[0].end_lineno or 0
            yield from enumerate(source.splitlines()[first - 1 : last], first)


def named_by(path: Path, label: str) -> Iterator[tuple[str, str]]:
    """(requirement id, test) pairs of one test module; ``label`` names the module."""
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    inside = scopes(tree, source.splitlines())
    for line, text in prose(tree, source):
        for match in ID.finditer(text):
            names = [name for first, last, name in inside if first <= line <= last]
            yield match[0], f"{label}::{names[-1]}" if names else label


def collect(tests: Path) -> dict[str, list[str]]:
    """requirement id → the tests that name it, sorted."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for path in sorted(tests.rglob("*.py")):
        for requirement, test in named_by(path, path.relative_to(tests.parent).as_posix()):
            found[requirement].add(test)
    return {requirement: sorted(names) for requirement, names in found.items()}


def document(rows: list[dict[str, str]], tests: dict[str, list[str]]) -> str:
    """The whole text of requirements.md."""
    out = [HEAD]
    by_level: defaultdict[str, list[bool]] = defaultdict(list)
    for row in rows:
        by_level[row["level"]].append(row["id"] in tests)
    out.append("| level | requirements | named by a test |\n|---|---|---|\n")
    for level, named in sorted(by_level.items()):
        out.append(f"| {level} | {len(named)} | {sum(named)} |\n")
    out.append("\n| id | role | level | requirement | tests |\n|---|---|---|---|---|\n")
    for row in rows:
        names = "<br>".join(f"`{name}`" for name in tests.get(row["id"], [])) or "not yet"
        text = row["requirement"].replace("|", "\\|")
        out.append(f"| {row['id']} | {row['role']} | {row['level']} | {text} | {names} |\n")
    return "".join(out)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    top = Path(__file__).resolve().parent.parent
    with (top / "docs/requirements.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    tests = collect(top / "tests")
    target = top / "docs/requirements.md"
    text = document(rows, tests)
    stale = not target.exists() or target.read_text(encoding="utf-8") != text
    if stale:
        if not check:
            target.write_text(text, encoding="utf-8")
        done = "run scripts/requirements.py" if check else "rewritten, please commit it"
        print(f"requirements: docs/requirements.md is out of date; {done}")
    unknown = sorted(set(tests) - {row["id"] for row in rows})
    for requirement in unknown:
        print(f"requirements: {requirement} does not exist: {', '.join(tests[requirement])}")
    return 1 if unknown or (check and stale) else 0


if __name__ == "__main__":
    sys.exit(main())
