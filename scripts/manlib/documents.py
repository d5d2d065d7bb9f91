"""The documents that have the text of the manual pages: docs/, with a page for each command.

Links are changed as they are read: all lead from docs/, ``commands/copy.md`` or
``options.md#anchor``, whichever page they stand in.
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from manlib.markdown import Block, Section, parse, walk

_LINK = re.compile(r"\]\(([^)#:]*)(#[^):]*)?\)")
SHARED = ("urls.md", "options.md", "common.md", "named.md", "units.md")


@dataclass(slots=True, frozen=True)
class Documents:
    """``shared``: pages of several commands, by name. ``commands``: the pages of each command, the
    first of which is called like the command."""

    shared: dict[str, Section]
    commands: dict[str, list[tuple[str, Section]]]

    def all(self) -> Iterator[tuple[str, Section]]:
        """Path below docs/, and page."""
        yield from self.shared.items()
        for pages in self.commands.values():
            yield from pages


def read(docs: Path) -> Documents:
    """Raises OSError."""
    shared = {name: _page(docs, name) for name in SHARED}
    commands: dict[str, list[tuple[str, Section]]] = {}
    for path in sorted((docs / "commands").glob("*.md"), key=lambda path: path.stem):
        name = f"commands/{path.name}"
        of = path.stem if path.stem.split("-")[0] not in commands else path.stem.split("-")[0]
        commands.setdefault(of, []).append((name, _page(docs, name)))
    return Documents(shared, commands)


def _page(docs: Path, name: str) -> Section:
    text = (docs / name).read_text(encoding="utf-8")
    return parse(_LINK.sub(lambda link: f"]({_from_docs(name, *link.groups(''))})", text))


def _from_docs(page: str, path: str, anchor: str) -> str:
    if not path:
        return page + anchor
    return os.path.normpath(os.path.join(os.path.dirname(page), path)) + anchor


def body(page: Section) -> list[Block]:
    """What stands below the title, without the first paragraph, which says for whom the page is,
    or what the command does, and without the command's synopsis: manual pages have these in their
    own form."""
    blocks = page.blocks[1:]
    return (
        blocks[1:] if _is_of_command(page) and blocks[:1] and blocks[0].kind == "code" else blocks
    )


def _is_of_command(page: Section) -> bool:
    return page.title.startswith("iserblk ")


def sections(page: Section) -> list[Section]:
    """The page, and all below it, for those who look for text."""
    return [Section(page.title, page.level, body(page), page.parts), *walk(page)[1:]]
