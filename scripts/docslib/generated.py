"""The documents that are made from code and tests (docs/made.md).

A link to a section of docs/made.md is one to the document of the same name, where that is there.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

from docslib import links

PAGE = "made.md"
# Of one machine: only copied, where tests have been run.
RESULTS = "interop-results.md"
_MAKERS = ("requirements", "systems", "api")
_LINK = re.compile(rf"\]\(((?:[\w.-]+/)*){re.escape(PAGE)}#([\w-]+)\)")


def build(top: Path, output: Path) -> None:
    """Write them into the directory ``output``. What is wrong with what they are made of is
    printed; raises CalledProcessError then."""
    for name in _MAKERS:
        script = top / "scripts" / f"{name}.py"
        subprocess.run([sys.executable, str(script), "--output", str(output)], check=True)
    results = top / "build" / "docs" / RESULTS
    if results.exists() and results.parent != output:
        shutil.copyfile(results, output / RESULTS)


def relinked(text: str, names: set[str]) -> str:
    """Links to sections of docs/made.md lead to those documents that are in ``names``."""

    def place(match: re.Match[str]) -> str:
        folder, name = match.groups()
        return f"]({folder}{name}.md)" if f"{name}.md" in names else match[0]

    out = text.splitlines()
    for number, line in links.lines(text):
        out[number - 1] = _LINK.sub(place, line)
    return "\n".join(out) + "\n"
