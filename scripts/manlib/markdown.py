"""The subset of Markdown that documents of commands use: text, lists, tables and code. Pictures are
left out."""

from __future__ import annotations

import re
from dataclasses import dataclass, field


@dataclass(slots=True, frozen=True)
class Block:
    """``kind``: "text", "item", "code" or "table". ``lines``: of a text or an item, one; of code,
    all. ``rows``: of a table, without its head."""

    kind: str
    lines: list[str] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)


@dataclass(slots=True, frozen=True)
class Section:
    title: str
    level: int
    blocks: list[Block]
    parts: list[Section]  # those of one level below

    def anchor(self) -> str:
        words = re.sub(r"[^\w\s-]", "", self.title.lower())
        return words.replace(" ", "-")

    def part(self, title: str) -> Section:
        """Raises LookupError that names the title."""
        for each in self.parts:
            if each.title == title:
                return each
        raise LookupError(f"the section {self.title!r} has no part {title!r}")


def parse(text: str) -> Section:
    """The document, as its first section."""
    open_sections: list[Section] = []
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        line = lines[at]
        at += 1
        heading = re.fullmatch("(#+) (.*)", line)
        if heading:
            new = Section(heading[2], len(heading[1]), [], [])
            while open_sections and open_sections[-1].level >= new.level:
                open_sections.pop()
            if open_sections:
                open_sections[-1].parts.append(new)
            else:
                first = new
            open_sections.append(new)
        elif line.startswith("```"):
            end = lines.index("```", at)
            open_sections[-1].blocks.append(Block("code", lines[at:end]))
            at = end + 1
        elif line.startswith("|"):
            rows = [line]
            while at < len(lines) and lines[at].startswith("|"):
                rows.append(lines[at])
                at += 1
            open_sections[-1].blocks.append(Block("table", rows=[_cells(row) for row in rows[2:]]))
        elif line.startswith("- "):
            open_sections[-1].blocks.append(Block("item", [line[2:]]))
        elif line.strip() and not line.startswith("!["):
            open_sections[-1].blocks.append(Block("text", [line]))
    return first


def _cells(row: str) -> list[str]:
    cells = re.split(r"(?<!\\)\|", row.strip().removeprefix("|").removesuffix("|"))
    return [cell.strip().replace(r"\|", "|") for cell in cells]


def walk(section: Section) -> list[Section]:
    """The section and all below it."""
    return [section, *(each for part in section.parts for each in walk(part))]
