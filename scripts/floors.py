"""Prints constraints for pip: the lowest versions that pyproject.toml allows of what iserblk needs.

    scripts/floors.py [PYPROJECT]

One line for each package of the dependencies, of the extras that users have, and of the build
system: ``trio==0.27``. The extra ``dev`` is left out: its tools test, and are not tested. Where two
lines name one package, the higher floor counts, because it is what pip would install. Needs only
the standard library.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

PYPROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"
_FLOOR = re.compile(r"([A-Za-z0-9._-]+)>=([0-9.]+)")


def floors(pyproject: dict[str, Any]) -> dict[str, str]:
    """Package → its floor. Raises ValueError for a requirement that has none."""
    project = pyproject["project"]
    requirements = [*project["dependencies"], *pyproject["build-system"]["requires"]]
    for extra, lines in project["optional-dependencies"].items():
        if extra != "dev":
            requirements += lines
    found: dict[str, str] = {}
    for requirement in requirements:
        match = _FLOOR.fullmatch(requirement)
        if match is None:
            raise ValueError(f"{requirement!r} is not of the form NAME>=VERSION")
        name, version = match[1], match[2]
        found[name] = max(found.get(name, version), version, key=_parts)
    return found


def _parts(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def main(arguments: list[str]) -> None:
    path = Path(arguments[0]) if arguments else PYPROJECT
    for name, version in sorted(floors(tomllib.loads(path.read_text("utf-8"))).items()):
        print(f"{name}=={version}")


if __name__ == "__main__":
    main(sys.argv[1:])
