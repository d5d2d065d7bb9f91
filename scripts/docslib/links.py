"""Links and headings of the documents, and which links lead nowhere. No network is needed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_LINK = re.compile(r"!?\[[^][]*(?:\[[^]]*\][^][]*)*\]\(([^()\s]+(?:\([^()\s]*\)[^()\s]*)*)\)")
_CODE = re.compile(r"(`+)(.+?)\1")
_ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:")


class Link(NamedTuple):
    line: int
    target: str  # as it is written


def lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines with their numbers, without those of blocks of code."""
    fence = ""
    for number, line in enumerate(text.splitlines(), 1):
        mark = re.match(r"\s*(```+|~~~+)", line)
        if mark and not fence:
            fence = mark[1]
        elif mark and mark[1].startswith(fence):
            fence = ""
        elif not fence:
            yield number, line


def links(text: str) -> list[Link]:
    """Links within the documents: those to other places of the network are left out."""
    return [
        Link(number, target)
        for number, line in lines(text)
        for target in _LINK.findall(_CODE.sub("", line))
        if not _ELSEWHERE.match(target)
    ]


def anchors(text: str) -> set[str]:
    """The anchors of the headings, as GitHub makes them."""
    found: set[str] = set()
    seen: Counter[str] = Counter()
    for _, line in lines(text):
        heading = re.fullmatch(r"#{1,6} +(.*?) *#*", line)
        if heading:
            words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading[1])
            anchor = re.sub(r"[^\w\s-]", "", words.lower()).replace(" ", "-")
            found.add(f"{anchor}-{seen[anchor]}" if seen[anchor] else anchor)
            seen[anchor] += 1
    return found


def broken(page: Path, top: Path) -> Iterator[str]:
    """A line for each link of the page that leads nowhere. ``top``: the root of the project."""
    text = page.read_text(encoding="utf-8")
    for line, target in links(text):
        path, _, anchor = target.partition("#")
        place = (page.parent / path).resolve() if path else page
        where = f"{page.relative_to(top)}:{line}"
        if not place.exists():
            yield f"{where}: {target}: there is no such file"
        elif not place.is_relative_to(top):
            yield f"{where}: {target}: that is outside of the project"
        elif anchor and anchor not in anchors(place.read_text(encoding="utf-8")):
            yield f"{where}: {target}: {place.relative_to(top)} has no such heading"
