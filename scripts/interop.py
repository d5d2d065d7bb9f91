"""Generates docs/interop.md from test results: which programs iserblk was run against.

    interop.py [--check] RESULTS        RESULTS: a file that pytest --interop has written

--check: reports a difference, and writes nothing. A difference is no failure, because results
depend on the machine.

A row whose test was not run this time (no virtual machine, only a part of the tests) stays, with
its date. A row whose test failed, or does not exist any more, is removed. The document is rewritten
only if a row is new, removed or changed: to run the same tests again does not change it.
"""

from __future__ import annotations

import datetime
import json
import sys
from pathlib import Path
from typing import NamedTuple

TOP = Path(__file__).resolve().parents[1]
DOCUMENT = TOP / "docs" / "interop.md"
HEAD = """# What iserblk was run against

Made by scripts/test (scripts/interop.py) from results of tests; do not edit. Each row is one test:
those of tests/lab ran in a virtual machine (docs/lab.md). Data was compared in all of them.

nbd-tester-client is in no package of Debian, because the NBD sources build it for their own tests
only. Built by hand, it agrees with `iserblk nbd`: handshake, throughput (also with flushes, and
refused writes of a read-only export), integrity-test.tr. integrityhuge-test.tr has requests of more
than 32 MiB, which `iserblk nbd` refuses and nbdkit takes.

OpenSLP is in no package of Debian any more. Tests with it run where a build of it is
($ISERBLK_OPENSLP); the messages that it sent and took are in tests/vectors/slp.py.

"""
CONFORMANCE = """
## Conformance of the target

Every case of libiscsi's iscsi-test-cu, run over TCP with --dataloss --fail --xml, by group. A case
that did not pass is named with the reason.

"""

Row = tuple[str, ...]


class Table(NamedTuple):
    """A table of the document. ``keys``: keys of a result, in the order of the columns. The last
    two columns are made here. Tables are told apart by their number of columns."""

    head: str
    columns: Row
    keys: Row
    closing: Row = ()  # cells after those of ``keys``


TABLES = {
    "peers": Table(
        HEAD,
        ("ours", "peer", "version", "transport", "what was run", "result", "date", "test"),
        ("ours", "peer", "version", "transport", "ran"),
        ("passed",),
    ),
    "conformance": Table(
        CONFORMANCE,
        ("group", "LUN", "passed", "left out", "version", "date", "test"),
        ("group", "lun", "passed", "left_out", "version"),
    ),
}
_WIDTHS = {len(table.columns) for table in TABLES.values()}


def old_rows(text: str) -> dict[str, Row]:
    """The rows of the document, by test."""
    rows = {}
    for line in text.splitlines():
        cells = tuple(cell.strip() for cell in line.strip().strip("|").split(" | "))
        if len(cells) in _WIDTHS and cells[-1].startswith("`tests/"):
            rows[cells[-1].strip("`")] = cells
    return rows


def merge(old: dict[str, Row], results: dict[str, dict[str, str] | None], today: str) -> list[Row]:
    """All rows after a run. ``results``: by test, its row, or None if it failed. ``table`` in a row
    names its table; the default is that of the peers."""
    rows = dict(old)
    for test, result in results.items():
        if result is None:
            rows.pop(test, None)
            continue
        table = TABLES[result.get("table", "peers")]
        cells = (*(result[key].replace("|", "/") for key in table.keys), *table.closing)
        before = rows.get(test)
        if before is None or before[:-2] != cells:
            rows[test] = (*cells, today, f"`{test}`")
    alive = [row for test, row in rows.items() if (TOP / test.partition("::")[0]).exists()]
    return sorted(alive)


def render(rows: list[Row]) -> str:
    text = ""
    for table in TABLES.values():
        width = len(table.columns)
        mine = [row for row in rows if len(row) == width]
        if mine or not text:
            lines = [table.columns, ("---",) * width, *mine]
            text += table.head + "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
    return text


def main() -> int:
    arguments = [argument for argument in sys.argv[1:] if argument != "--check"]
    if len(arguments) != 1:
        print(__doc__, file=sys.stderr)
        return 7
    check = "--check" in sys.argv
    results = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    text = DOCUMENT.read_text(encoding="utf-8") if DOCUMENT.exists() else ""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    made = render(merge(old_rows(text), results, today))
    if made != text:
        if not check:
            DOCUMENT.write_text(made, encoding="utf-8")
        done = "rows differ from" if check else "rewrote"
        print(f"interop: {done} {DOCUMENT.relative_to(TOP)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
