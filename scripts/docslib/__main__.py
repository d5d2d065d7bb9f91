"""``scripts/docs``: its head says what this does."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from docslib import links, pages, site

_TOP = Path(__file__).resolve().parents[2]


def problems(top: Path) -> list[str]:
    """What is wrong with the documents themselves."""
    found = [line for page in pages.every(top) for line in links.broken(page, top)]
    return [*found, *pages.unlisted(top)]


def main() -> int:
    parser = argparse.ArgumentParser("scripts/docs")
    parser.add_argument("--output", metavar="DIR", type=Path, default=_TOP / "build/site")
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    found = problems(_TOP)
    if not found and not given.check:
        output = given.output.resolve()
        with tempfile.TemporaryDirectory() as work:
            try:
                site.build(site.prepare(_TOP, Path(work)), output)
            except FileNotFoundError:
                sys.exit("docs: mkdocs is missing: apt install mkdocs")
            except subprocess.CalledProcessError as error:
                sys.exit(f"docs: mkdocs ended with status {error.returncode}")
        found = list(site.broken(output))
        print(output / "index.html")
    for line in found:
        print(f"docs: {line}", file=sys.stderr)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
