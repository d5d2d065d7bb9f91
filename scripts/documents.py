"""Documents that are made from code and tests, for the scripts beside it.

docs/states.md, whose pictures are worth reading where the code is, is committed, and compared. The
others are built, into build/docs or wherever they are wanted: docs/made.md lists them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

TOP = Path(__file__).resolve().parent.parent
BUILT = TOP / "build" / "docs"


def made(script: str, about: str | None, name: str, document: Callable[[], str]) -> int:
    """The whole of ``scripts/SCRIPT.py [--check]``, for a document that is committed. ``about``:
    its help. ``name``: of the document, from the project's root. Returns the exit status."""
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


def built(
    script: str, about: str | None, name: str, document: Callable[[], tuple[str, list[str]]]
) -> int:
    """The whole of ``scripts/SCRIPT.py [--output DIR]``, for a document that is not committed.
    ``document`` returns its text, and what is wrong with what it is made of, one line each. Returns
    the exit status."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--output", metavar="DIR", type=Path, default=BUILT)
    output = parser.parse_args().output
    text, wrong = document()
    output.mkdir(parents=True, exist_ok=True)
    (output / name).write_text(text, encoding="utf-8")
    for line in wrong:
        print(f"{script}: {line}")
    return int(bool(wrong))
