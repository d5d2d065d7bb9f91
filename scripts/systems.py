"""Builds systems.md: the specifications' systems, and the tests that show each.

    scripts/systems.py [--output DIR]      the default is build/docs

systems.toml has the systems. A test names one, as SYSTEM-26, where it may name requirements
(scripts/requirements.py). The output depends only on systems.toml and the tests.

The status is 1 if a system has neither tests nor a reason, or both; if a system with tests does not
say against whom; and if a test names a system that does not exist.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

import requirements
from documents import TOP, built

ID = re.compile(r"\bSYSTEM-([0-9]+)\b")
DATA = TOP / "docs/systems.toml"
COUNT = 54
# Being built: these may be without tests, until the tests are there.
UNDER_WAY: frozenset[int] = frozenset()

HEAD = """# Systems of the specifications and the tests that show them

For developers. Made by scripts/systems.py from systems.toml and the tests. The specifications
describe {count} systems and roles: RFC 7145 (iSER), the drafts about iSER on InfiniBand and its
generalisation, and what they build on. "Against" says who is at the other end: a program that was
not written here, or our own other end, and what fixed the bytes then. Which versions were run is in
[interop.md](interop.md).

"""

Systems = Mapping[int, Mapping[str, str]]


def read() -> Systems:
    """The systems of systems.toml, by number."""
    data = tomllib.loads(DATA.read_text(encoding="utf-8"))
    return {int(number): system for number, system in data.items()}


def collect(tests: Path) -> dict[int, list[str]]:
    """System → the tests that name it, sorted."""
    found = requirements.collect(tests, ID)
    return {int(name.partition("-")[2]): names for name, names in found.items()}


def document(systems: Systems, tests: Mapping[int, list[str]]) -> str:
    """The whole text of systems.md."""
    shown = sum(number in tests for number in systems)
    reasons = [number for number, system in systems.items() if "reason" in system]
    out = [HEAD.format(count=len(systems))]
    out.append(f"{shown} of {len(systems)} are shown by tests; ")
    out.append(f"{len(reasons)} cannot be ({', '.join(map(str, reasons))}), for a reason.\n\n")
    out.append(
        "| # | system | source | works when | against | tests |\n|---|---|---|---|---|---|\n"
    )
    for number, system in systems.items():
        names = "<br>".join(f"`{name}`" for name in tests.get(number, []))
        against = system.get("against", "")
        if "missing" in system:
            against += f". Not shown: {system['missing']}"
        if "reason" in system:
            names = f"not shown: {system['reason']}"
        cells = (system["name"], system["source"], system["works"], against, names or "none")
        out.append(f"| {number} | {' | '.join(cells)} |\n")
    return "".join(out)


def mistakes(systems: Systems, tests: Mapping[int, list[str]]) -> list[str]:
    """What is wrong with systems and tests, one line each."""
    wrong = [
        f"SYSTEM-{number} does not exist: {', '.join(tests[number])}"
        for number in sorted(set(tests) - set(systems))
    ]
    for number, system in systems.items():
        if number in UNDER_WAY:
            continue
        if "reason" in system:
            if number in tests or "against" in system:
                wrong.append(f"system {number} has a reason, and tests: {tests.get(number)}")
        elif number not in tests:
            wrong.append(f"system {number} ({system['name']}) has neither a test nor a reason")
        elif not system.get("against"):
            wrong.append(f"system {number} ({system['name']}) does not say against whom")
    return wrong


def made() -> tuple[str, list[str]]:
    """The document, and mistakes."""
    systems, tests = read(), collect(TOP / "tests")
    return document(systems, tests), mistakes(systems, tests)


if __name__ == "__main__":
    sys.exit(built("systems", __doc__, "systems.md", made))
