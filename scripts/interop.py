"""Generates docs/interop.md: what iserblk was run against, from the results of tests/lab.

    interop.py RESULTS        a file that pytest --interop has written

A row that was run before and not this time (no virtual machine, a part of the tests only) stays,
with its date; one that failed goes. So does one whose test is no more. The document is rewritten
only where a row came, went, or says something else: running the same again does not touch it.
"""

from __future__ import annotations

import datetime
import json
import sys
from pathlib import Path

TOP = Path(__file__).resolve().parents[1]
DOCUMENT = TOP / "docs" / "interop.md"
HEAD = """# What iserblk was run against

Made by scripts/test (scripts/interop.py) from the tests in tests/lab; do not edit. Each row is one
test, in a virtual machine (docs/lab.md); data was compared in all of them.

"""
COLUMNS = ("ours", "peer", "version", "transport", "what was run", "result", "date", "test")

Row = tuple[str, ...]


def old_rows(text: str) -> dict[str, Row]:
    """By test."""
    rows = {}
    for line in text.splitlines():
        cells = tuple(cell.strip() for cell in line.strip().strip("|").split(" | "))
        if len(cells) == len(COLUMNS) and cells[-1].startswith("`tests/"):
            rows[cells[-1].strip("`")] = cells
    return rows


def merge(old: dict[str, Row], results: dict[str, dict[str, str] | None], today: str) -> list[Row]:
    """``results``: by test, its row, or None where it failed."""
    rows = dict(old)
    for test, result in results.items():
        if result is None:
            rows.pop(test, None)
            continue
        cells = [
            *(result[key].replace("|", "/") for key in ("ours", "peer", "version", "transport")),
            result["ran"].replace("|", "/"),
            "passed",
        ]
        before = rows.get(test)
        if before is None or list(before[:-2]) != cells:
            rows[test] = (*cells, today, f"`{test}`")
    alive = [row for test, row in rows.items() if (TOP / test.partition("::")[0]).exists()]
    return sorted(alive)


def render(rows: list[Row]) -> str:
    lines = [COLUMNS, ("---",) * len(COLUMNS), *rows]
    return HEAD + "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 7
    results = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    text = DOCUMENT.read_text(encoding="utf-8") if DOCUMENT.exists() else ""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    made = render(merge(old_rows(text), results, today))
    if made != text:
        DOCUMENT.write_text(made, encoding="utf-8")
        print(f"interop: rewrote {DOCUMENT.relative_to(TOP)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
