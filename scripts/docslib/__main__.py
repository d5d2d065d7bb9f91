"""``scripts/docs``: its head says what this does."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from docslib import generated, links, pages, site

_TOP = Path(__file__).resolve().parents[2]
_SITE = _TOP / "build/site"
_GENERATED = _TOP / "build/docs"


def problems(top: Path) -> list[str]:
    """What is wrong with the documents themselves."""
    found = [line for page in pages.every(top) for line in links.broken(page, top)]
    return [*found, *pages.unlisted(top)]


def main() -> int:
    parser = argparse.ArgumentParser("scripts/docs")
    parser.add_argument("--output", metavar="DIR", type=Path)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true")
    what.add_argument("--generated", action="store_true")
    given = parser.parse_args()
    if given.generated:
        return _generate((given.output or _GENERATED).resolve())
    found = problems(_TOP)
    if not found and not given.check:
        output = (given.output or _SITE).resolve()
        with tempfile.TemporaryDirectory() as work:
            made = Path(work) / "made"
            if status := _generate(made):
                return status
            try:
                site.build(site.prepare(_TOP, Path(work), made), output)
            except FileNotFoundError:
                sys.exit("docs: mkdocs is missing: apt install mkdocs")
            except subprocess.CalledProcessError as error:
                sys.exit(f"docs: mkdocs ended with status {error.returncode}")
        found = list(site.broken(output))
        print(output / "index.html")
    for line in found:
        print(f"docs: {line}", file=sys.stderr)
    return int(bool(found))


def _generate(output: Path) -> int:
    try:
        generated.build(_TOP, output)
    except subprocess.CalledProcessError as error:
        return int(error.returncode)
    return 0


if __name__ == "__main__":
    sys.exit(main())
