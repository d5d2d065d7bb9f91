"""docs/glossary.md: its words are used where it says, and developers' pages introduce no others."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest
from docslib import links, pages

from ..support.target import ROOT

PAGE = (ROOT / "docs/glossary.md").read_text(encoding="utf-8")
_ROW = re.compile(r"\| \*\*(.+?)\*\* \| (.+?) \| `([\w/]+\.py)` \|")
# A word that a page introduces: lower case, in italics, or in bold within a sentence.
_INTRODUCED = re.compile(
    r"(?<![*\w`/])\*([a-z][a-z -]+)\*(?![*\w])|(?<=[a-z,] )\*\*([a-z][a-z -]+)\*\*"
)
# Emphasis, and names of columns and rows that a page itself explains.
NO_TERMS = {
    *("receive", "send", "read", "write", "copy", "crc"),  # data-path.md: columns
    *("median", "ratio", "goals", "not measured", "dead", "gathered", "whole or not at all"),
    *("bill of materials", "at each session reinstatement", "never came", "planned change"),
    *("the status of a command", "another portal group", "detach"),
}


class Row(NamedTuple):
    word: str
    sentence: str
    module: str


TABLES = [
    [Row(*found.groups()) for found in _ROW.finditer(part)] for part in PAGE.split("\n## ")[1:]
]
ROWS = [row for table in TABLES for row in table]
WORDS = {row.word.lower().removesuffix(" of a file") for row in ROWS} | {"room"}
DEVELOPERS = [
    path for group in pages.listed(ROOT) if group.title == "For developers"
    for _, path in group.pages if path != "docs/glossary.md"
]  # fmt: skip


def path_of(module: str) -> Path:
    within = ROOT / "iserblk" / module
    return within if within.exists() else ROOT / module


def plain(text: str) -> str:
    """Words as they are spoken: of names in the code, too."""
    text = re.sub(r"(?<=[a-z])(?=[A-Z])|[-_\s]+", " ", text)
    return text.lower()


def says(text: str, word: str) -> bool:
    """ "hand-over" is also handover, HandOver and hand_over; and there may be several."""
    pattern = " ?".join(map(re.escape, plain(word).split()))
    return re.search(rf"\b{pattern}(s|es)?\b", plain(text)) is not None


def introduced(text: str) -> set[str]:
    lines = "\n".join(line for _, line in links.lines(text))
    return {found[1] or found[2] for found in _INTRODUCED.finditer(lines)}


def test_words_are_sorted_and_there_once() -> None:
    assert PAGE.count("| **") == len(ROWS) > 60
    assert len({row.word.lower() for row in ROWS}) == len(ROWS)
    for table in TABLES:
        words = [row.word.lower() for row in table]
        assert words == sorted(words)


@pytest.mark.parametrize("row", ROWS, ids=[row.word for row in ROWS])
def test_a_word_has_one_sentence_and_is_used_in_its_module(row: Row) -> None:
    assert row.sentence[0].isupper() and row.sentence.endswith(".")
    assert not re.search(r"\. [A-Z]", row.sentence)
    text = path_of(row.module).read_text(encoding="utf-8")
    word = row.word.removesuffix(" of a file")
    assert says(text, word), f"{row.module} does not say {word}"


@pytest.mark.parametrize("path", DEVELOPERS)
def test_a_page_introduces_words_of_the_glossary(path: str) -> None:
    """A page that emphasises one says where it is explained."""
    text = (ROOT / path).read_text(encoding="utf-8")
    terms = introduced(text) - NO_TERMS
    known = {term for term in terms if term in WORDS or term.removesuffix("s") in WORDS}
    assert terms == known, "glossary.md has no such word"
    assert not terms or "glossary.md" in text, f"say where {', '.join(terms)} is explained"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("It takes a **task slot**. A *turn* is", {"task slot", "turn"}),
        ("- **Order.** The first", set()),
        ("**Told** when", set()),
        ("see *Busy polling*, `*x*`, a * b * c", set()),
        ("```\na *turn*\n```\n", set()),
    ],
)
def test_what_counts_as_introduced(text: str, words: set[str]) -> None:
    assert introduced(text) == words
