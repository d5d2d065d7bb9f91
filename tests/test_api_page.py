"""The examples of docs/api.md, as a user would type them, and what they print."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.target import IQN, ROOT, running_target

PAGE = ROOT / "docs/api.md"
PORTAL = "192.0.2.1"
_EXAMPLE = re.compile(r"^```python\n(.*?)^```\n(?:\nprints\n\n```\n(.*?)^```\n)?", re.M | re.S)


class Example(NamedTuple):
    line: int
    code: str
    prints: str


def examples() -> Iterator[Example]:
    text = PAGE.read_text(encoding="utf-8")
    for found in _EXAMPLE.finditer(text):
        yield Example(text.count("\n", 0, found.start()) + 2, found[1], found[2] or "")


def test_every_example(tmp_path: Path) -> None:
    """One after the other, in one namespace: later ones use what earlier ones have imported."""
    known: dict[str, Any] = {"__name__": "example"}
    with running_target([f"{tmp_path}/disk:size=64M"], tmp_path / "log") as target:
        portal = target.url.removeprefix("iser://").partition("/")[0]
        for line, code, prints in examples():
            placed = "\n" * (line - 1) + code.replace(PORTAL, portal)
            said = io.StringIO()
            with contextlib.redirect_stdout(said):
                exec(compile(placed, str(PAGE), "exec"), known)
            assert said.getvalue() == prints, f"docs/api.md, line {line}"


def test_the_page_is_read_as_it_is_shown() -> None:
    """Each block of code is an example, and the address is the one that the test replaces."""
    text = PAGE.read_text(encoding="utf-8")
    found = list(examples())
    assert len(found) == text.count("```python\n") >= 7
    assert text.count("\nprints\n") == sum(bool(each.prints) for each in found)
    assert f'"iser://{PORTAL}/{IQN}/0"' in found[0].code
