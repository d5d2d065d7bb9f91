"""``scripts/manpages``: its head says what this does."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

try:
    from manlib import documents
    from manlib.commands import commands, program
    from manlib.completion import completions
    from manlib.pages import Manual
except ModuleNotFoundError as missing:
    sys.exit(f"manpages: {sys.executable} has no Python package {missing.name}")

_DOCS = Path(__file__).resolve().parents[2] / "docs"


def files() -> dict[str, str]:
    """Path below the output directory, and text, of every file."""
    seconds = int(os.environ.get("SOURCE_DATE_EPOCH") or time.time())
    date = time.strftime("%Y-%m-%d", time.gmtime(seconds))
    above, below = program(), list(commands())
    found = {
        f"share/man/man{page.section}/{page.name}.{page.section}": page.text()
        for page in Manual(above, below, documents.read(_DOCS), date).pages()
    }
    return {**found, **completions(above, below)}


def main() -> None:
    parser = argparse.ArgumentParser("scripts/manpages")
    parser.add_argument("--output", metavar="DIR", type=Path, required=True)
    directory = parser.parse_args().output
    try:
        for name, text in files().items():
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            print(path)
    except ModuleNotFoundError as error:
        sys.exit(f"manpages: {sys.executable} has no Python package {error.name}")
    except OSError as error:
        sys.exit(f"manpages: {error.filename}: {error.strerror}")


if __name__ == "__main__":
    main()
