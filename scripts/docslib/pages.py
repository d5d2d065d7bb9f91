"""Which pages there are. README.md lists them, by those who read them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from docslib import generated, links

_ROW = re.compile(r"(?m)^\|.*?\| \[([^]]+)\]\(([^)#]+\.md)(?:#([\w-]+))?\)")


class Group(NamedTuple):
    title: str
    pages: list[tuple[str, str]]  # title, and path from the root of the project


def every(top: Path) -> list[Path]:
    """All documents that a link may be in."""
    return [*sorted(top.glob("*.md")), *sorted((top / "docs").rglob("*.md"))]


def listed(top: Path, made: Collection[str] = ()) -> list[Group]:
    """The lists below "Documents" in README.md: the second column of a row begins with a page.
    ``made``: file names of generated documents that are there, too."""
    text = (top / "README.md").read_text(encoding="utf-8")
    section = text.partition("\n## Documents\n")[2].partition("\n## ")[0]
    groups = []
    for part in section.split("\n### ")[1:]:
        title, _, rest = part.partition("\n")
        rows = []
        for name, path, anchor in (row.groups() for row in _ROW.finditer(rest)):
            if not anchor:
                rows.append((name, path))
            elif Path(path).name == generated.PAGE and f"{anchor}.md" in made:
                rows.append((name, f"docs/{anchor}.md"))
        groups.append(Group(title, rows))
    return groups


def folders(top: Path) -> list[Group]:
    """The pages of each folder below docs/, under their own titles."""
    groups = []
    for folder in sorted(path for path in (top / "docs").iterdir() if path.is_dir()):
        rows = [(title(page), str(page.relative_to(top))) for page in sorted(folder.glob("*.md"))]
        if rows:
            groups.append(Group(folder.name.capitalize(), rows))
    return groups


def title(page: Path) -> str:
    return page.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")


def unlisted(top: Path) -> Iterator[str]:
    """What is wrong with pages that readers do not find: those of docs/ are in a list of README.md,
    and another page leads to each of a folder below docs/."""
    there = {page.name for page in (top / "docs").glob("*.md")}  # a source archive has all
    have = {path for group in listed(top, there) for _, path in group.pages}
    for page in sorted((top / "docs").glob("*.md")):
        if str(page.relative_to(top)) not in have:
            yield f"README.md: its lists have no row for {page.relative_to(top)}"
    led_to = {
        (page.parent / link.target.partition("#")[0]).resolve()
        for page in every(top)
        for link in links.links(page.read_text(encoding="utf-8"))
    }
    for group in folders(top):
        for _, path in group.pages:
            if (top / path).resolve() not in led_to:
                yield f"{path}: no page leads there"
