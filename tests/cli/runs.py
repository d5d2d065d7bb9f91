"""What tests of several commands share: a target, and commands that run against it."""

from __future__ import annotations

import re

from tests.support.target import ROOT

MIB = 1 << 20


JSON_DOCUMENT = (ROOT / "docs/json.md").read_text()


def documented(command: str) -> set[str]:
    """Field names that docs/json.md gives for a command: code in the first column of its table."""
    section = JSON_DOCUMENT.partition(f"\n## iserblk {command}\n")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    return {name for cell in cells for name in re.findall("`(.*?)`", cell)}


PATH_FIELDS = {"portal", "in_use", "state", "error", "failures"}
