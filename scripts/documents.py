"""Documents that are made from the code: written, or only compared. For the scripts beside it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

TOP = Path(__file__).resolve().parent.parent


def made(script: str, about: str | None, name: str, document: Callable[[], str]) -> int:
    """The whole of ``scripts/SCRIPT.py [--check]``. ``about``: its help. ``name``: of the document,
    from the project's root. Returns the exit status."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    target = TOP / name
    text = document()
    if target.exists() and target.read_text(encoding="utf-8") == text:
        return 0
    if not check:
        target.write_text(text, encoding="utf-8")
    done = f"run scripts/{script}.py" if check else "rewritten, please commit it"
    print(f"{script}: {name} is out of date; {done}")
    return int(check)
