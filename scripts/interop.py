"""Builds build/docs/interop-results.md from test results: what was run against other programs.

    scripts/interop.py RESULTS        RESULTS: a file that pytest --interop has written

Names the versions of programs that docs/interop.md does not have. That is no failure, because
results depend on the machine.

Rows of earlier runs stay in the document. A row whose test was not run this time (no virtual
machine, only a part of the tests) keeps its date, as long as nothing newer speaks against it:

- The rows of one function with one peer (one test with all its parameters; of the conformance tool
  one group of cases) are of one day. Where one of them is new or has changed, those that were not
  run on that day are removed: what they say may not be so any more.
- A row whose peer has another version now, where tests of the same place have run, is removed.
- A row whose test failed, or does not exist any more, is removed.

The document is rewritten only if a row is new, removed or changed: to run the same tests again does
not change it.
"""

from __future__ import annotations

import datetime
import json
import sys
from pathlib import Path
from typing import NamedTuple

TOP = Path(__file__).resolve().parents[1]
DOCUMENT = TOP / "build" / "docs" / "interop-results.md"
PAGE = TOP / "docs" / "interop.md"
HEAD = """# Results with other programs

For developers. Made by scripts/test (scripts/interop.py) from the results of tests on one machine;
[interop.md](interop.md) is the summary. Each row is one test: those of tests/lab ran in a virtual
machine ([lab.md](lab.md)). Data was compared in all of them. The version is the peer's. The date is
that of the run since which the test has had this result with this version; what a later run says
otherwise replaces all rows of the same test, or the same peer.

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
_BY_WIDTH = {len(table.columns): table for table in TABLES.values()}
_VERSION = "version"
_CONFORMANCE = "libiscsi's iscsi-test-cu"


def old_rows(text: str) -> dict[str, Row]:
    """The rows of the document, by test."""
    rows = {}
    for line in text.splitlines():
        cells = tuple(cell.strip() for cell in line.strip().strip("|").split(" | "))
        if len(cells) in _BY_WIDTH and cells[-1].startswith("`tests/"):
            rows[cells[-1].strip("`")] = cells
    return rows


def merge(old: dict[str, Row], results: dict[str, dict[str, str] | None], today: str) -> list[Row]:
    """All rows after a run. ``results``: by test, its row, or None if it failed. ``table`` in a row
    names its table; the default is that of the peers."""
    rows = dict(old)
    run = {}
    for test, result in results.items():
        rows.pop(test, None)
        if result is None:
            continue
        table = TABLES[result.get("table", "peers")]
        cells = (*(result[key].replace("|", "/") for key in table.keys), *table.closing)
        run[test] = (*cells, today, f"`{test}`")
    versions: dict[tuple[str, str], set[str]] = {}
    for row in run.values():
        versions.setdefault(_place(row), set()).add(_version(row))
    rows = {
        test: row
        for test, row in rows.items()
        if _version(row) in versions.get(_place(row), {_version(row)})
    }
    changed = {
        _function(row) for test, row in run.items() if old.get(test, ("",) * 2)[:-2] != row[:-2]
    }
    for test, row in run.items():
        rows[test] = row if _function(row) in changed else old[test]
    newest: dict[Row, str] = {}
    for row in rows.values():
        newest[_function(row)] = max(newest.get(_function(row), ""), _date(row))
    rows = {test: row for test, row in rows.items() if _date(row) == newest[_function(row)]}
    alive = [row for test, row in rows.items() if (TOP / test.partition("::")[0]).exists()]
    return sorted(alive)


def _date(row: Row) -> str:
    return row[-2]


def _version(row: Row) -> str:
    return row[_BY_WIDTH[len(row)].columns.index(_VERSION)]


def _peer(row: Row) -> str:
    columns = _BY_WIDTH[len(row)].columns
    return row[columns.index("peer")] if "peer" in columns else _CONFORMANCE


def _place(row: Row) -> tuple[str, str]:
    """The peer, and where it runs: a virtual machine has another one than this machine."""
    return _peer(row), "/".join(row[-1].strip("`").split("/")[:2])


def _function(row: Row) -> Row:
    """What rows have in common that are of one run."""
    if _peer(row) == _CONFORMANCE:
        return _CONFORMANCE, row[0]
    return row[0], _peer(row), row[-1].partition("[")[0]


def render(rows: list[Row]) -> str:
    text = ""
    for table in TABLES.values():
        width = len(table.columns)
        mine = [row for row in rows if len(row) == width]
        if mine or not text:
            lines = [table.columns, ("---",) * width, *mine]
            text += table.head + "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
    return text


def unnamed(page: str, results: dict[str, dict[str, str] | None]) -> list[str]:
    """Versions of these results that the page does not name, sorted: Debian's revisions are left
    out, as the page leaves them out."""
    versions = {_short(result["version"]) for result in results.values() if result}
    return sorted(version for version in versions if version not in page)


def _short(version: str) -> str:
    """ "tgt 1:1.0.85-1+b1" → "tgt 1.0.85", "Linux 6.1.0-56-amd64" → "Linux 6.1"."""
    name, _, number = version.rpartition(" ")
    number = number.rpartition(":")[2]
    if name == "Linux":
        return f"{name} {'.'.join(number.split('-')[0].split('.')[:2])}"
    return f"{name} {number.partition('-')[0].partition('+')[0]}"


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 7
    results = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    text = DOCUMENT.read_text(encoding="utf-8") if DOCUMENT.exists() else ""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    rows = merge(old_rows(text), results, today)
    if rows or text:
        DOCUMENT.parent.mkdir(parents=True, exist_ok=True)
        DOCUMENT.write_text(render(rows), encoding="utf-8")
    for version in unnamed(PAGE.read_text(encoding="utf-8"), results):
        print(f"interop: {PAGE.relative_to(TOP)} does not name {version}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
