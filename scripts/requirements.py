"""Builds requirements.md: each requirement of requirements.csv, and the tests naming it.

    scripts/requirements.py [--output DIR]      the default is build/docs

For a requirement that no test can show, requirements-unshown.toml has the reason: id = "reason".

A test names a requirement in its docstring, in a comment inside it, or in the comment directly
above it. A name in a class's or module's docstring, or in a comment between tests, counts for the
class or the module. Other text (strings, code) does not count. The output depends only on the csv,
the reasons and the tests.

The status is 1 if a requirement has neither a test nor a reason, or both, and if a test or a reason
names a requirement that does not exist.
"""

from __future__ import annotations

import ast
import csv
import io
import re
import sys
import tokenize
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from documents import TOP, built

ID = re.compile(r"\bISER-(?:[A-Z0-9.]+-)+[0-9]+\b")

HEAD = """# Requirements and the tests that prove them

For developers. Made by scripts/requirements.py from requirements.csv and the tests. The ids are
those of the csv, which paraphrases the specifications. "Not shown" gives the reason why no test can
show the requirement (requirements-unshown.toml).

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


def named_by(path: Path, label: str, pattern: re.Pattern[str]) -> Iterator[tuple[str, str]]:
    """(id, test) pairs of one test module, for ids that match; ``label`` names the module."""
    source = path.read_text(encoding="utf-8")
    if not pattern.search(source):  # most have none, and parsing takes long
        return
    tree = ast.parse(source)
    inside = scopes(tree, source.splitlines())
    for line, text in prose(tree, source):
        for match in pattern.finditer(text):
            names = [name for first, last, name in inside if first <= line <= last]
            yield match[0], f"{label}::{names[-1]}" if names else label


def collect(tests: Path, pattern: re.Pattern[str] = ID) -> dict[str, list[str]]:
    """Id → the tests that name it, sorted. ``pattern``: what is an id."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for path in sorted(tests.rglob("*.py")):
        for each, test in named_by(path, path.relative_to(tests.parent).as_posix(), pattern):
            found[each].add(test)
    return {each: sorted(names) for each, names in found.items()}


def document(
    rows: list[dict[str, str]], tests: Mapping[str, list[str]], unshown: Mapping[str, str]
) -> str:
    """The whole text of requirements.md. ``tests``, ``unshown``: id → tests, and id → reason."""
    out = [HEAD]
    by_level: defaultdict[str, list[str]] = defaultdict(list)
    for row in rows:
        by_level[row["level"]].append(row["id"])
    out.append("| level | requirements | named by a test | not shown, for a reason |\n")
    out.append("|---|---|---|---|\n")
    for level, ids in sorted(by_level.items()):
        named = sum(each in tests for each in ids)
        out.append(f"| {level} | {len(ids)} | {named} | {sum(each in unshown for each in ids)} |\n")
    out.append("\n| id | role | level | requirement | tests |\n|---|---|---|---|---|\n")
    for row in rows:
        names = "<br>".join(f"`{name}`" for name in tests.get(row["id"], []))
        if not names:
            reason = unshown.get(row["id"])
            names = f"not shown: {reason}" if reason else "none"
        text = row["requirement"].replace("|", "\\|")
        out.append(f"| {row['id']} | {row['role']} | {row['level']} | {text} | {names} |\n")
    return "".join(out)


def mistakes(
    known: set[str], tests: Mapping[str, list[str]], unshown: Mapping[str, str]
) -> list[str]:
    """What is wrong with the ids that tests and reasons name, one line each."""
    wrong = [
        f"{each} does not exist: {', '.join(tests[each])}" for each in sorted(set(tests) - known)
    ]
    wrong += [
        f"{each} of requirements-unshown.toml does not exist"
        for each in sorted(set(unshown) - known)
    ]
    wrong += [
        f"{each} has a reason in requirements-unshown.toml, and a test: {', '.join(tests[each])}"
        for each in sorted(set(unshown) & set(tests))
    ]
    wrong += [
        f"{each} has neither a test nor a reason in requirements-unshown.toml"
        for each in sorted(known - set(tests) - set(unshown))
    ]
    return wrong


def made() -> tuple[str, list[str]]:
    """The document, and mistakes."""
    with (TOP / "docs/requirements.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    unshown = tomllib.loads((TOP / "docs/requirements-unshown.toml").read_text(encoding="utf-8"))
    tests = collect(TOP / "tests")
    return document(rows, tests, unshown), mistakes({row["id"] for row in rows}, tests, unshown)


if __name__ == "__main__":
    sys.exit(built("requirements", __doc__, "requirements.md", made))
