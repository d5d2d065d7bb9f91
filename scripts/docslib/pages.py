"""Which pages there are. README.md lists them, by those who read them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

_ROW = re.compile(r"(?m)^\|.*?\| \[([^]]+)\]\(([^)#]+\.md)\)")


class Group(NamedTuple):
    title: str
    pages: list[tuple[str, str]]  # title, and path from the root of the project


def every(top: Path) -> list[Path]:
    """All documents that a link may be in."""
    return [*sorted(top.glob("*.md")), *sorted((top / "docs").rglob("*.md"))]


def listed(top: Path) -> list[Group]:
    """The lists below "Documents" in README.md: the second column of a row begins
    with a page."""
    text = (top / "README.md").read_text(encoding="utf-8")
    section = text.partition("\n## Documents\n")[2].partition("\n## ")[0]
    groups = []
    for part in section.split("\n### ")[1:]:
        title, _, rest = part.partition("\n")
        groups.append(Group(title, [(row[1], row[2]) for row in _ROW.finditer(rest)]))
    return groups


def unlisted(top: Path) -> list[str]:
    """Pages of docs/ that no list has. Those of a folder below docs/ belong to a page that lists
    them."""
    have = {path for group in listed(top) for _, path in group.pages}
    return [
        str(page.relative_to(top))
        for page in sorted((top / "docs").glob("*.md"))
        if str(page.relative_to(top)) not in have
    ]
