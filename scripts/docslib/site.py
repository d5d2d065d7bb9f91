"""The documents as mkdocs wants them, and the site that it makes of them.

mkdocs takes one directory, and a Markdown of its own, so it gets a copy: README.md is the first
page, and README.md, CONTRIBUTING.md and CHANGES.md stand beside the pages of docs/.
"""

from __future__ import annotations

import html.parser
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

from docslib import generated, links, pages

_ITEM = re.compile(r"(- |\d+\. )")


def prepare(top: Path, work: Path, made: Path | None = None) -> Path:
    """Writes the pages, and a configuration with their order, into the empty directory ``work``.
    ``made``: the directory of generated documents. Returns the configuration's path."""
    shutil.copytree(top / "docs", work / "pages")
    names = set()
    for page in sorted(made.glob("*.md")) if made else ():
        shutil.copyfile(page, work / "pages" / page.name)
        names.add(page.name)
    shutil.copytree(top / "examples", work / "pages" / "examples")
    for page in sorted(top.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        (work / "pages" / _name(page.name)).write_text(text, encoding="utf-8")
    for page in sorted((work / "pages").rglob("*.md")):
        inside = page.relative_to(work / "pages")
        text = page.read_text(encoding="utf-8")
        if inside.name in names or (len(inside.parts) == 1 and (top / "docs" / inside).exists()):
            text = _relinked(text, "../", "")
        elif len(inside.parts) == 1:
            text = _relinked(text, "docs/", "")
        else:
            text = _relinked(text, "../../", "../")
        page.write_text(as_mkdocs(generated.relinked(text, names)), encoding="utf-8")
    order: list[dict[str, object]] = [{"iserblk": _name("README.md")}]
    for group in [*pages.listed(top, names), *pages.folders(top)]:
        order.append(
            {group.title: [{name: _name(path.removeprefix("docs/"))} for name, path in group.pages]}
        )
    configuration = work / "mkdocs.yml"
    inherited = {"INHERIT": str(top / "mkdocs.yml"), "docs_dir": str(work / "pages"), "nav": order}
    configuration.write_text(json.dumps(inherited), encoding="utf-8")  # JSON is YAML
    return configuration


def _name(name: str) -> str:
    return "index.md" if name == "README.md" else name


def _relinked(text: str, before: str, after: str) -> str:
    """Links to files below ``before`` lead below ``after``; README.md is index.md."""
    out = text.splitlines()
    for number, line in links.lines(text):
        moved = re.sub(rf"\]\({re.escape(before)}", f"]({after}", line)
        out[number - 1] = re.sub(r"\]\(((?:\.\./)*)README\.md", r"](\1index.md", moved)
    return "\n".join(out) + "\n"


def as_mkdocs(text: str) -> str:
    """mkdocs' Markdown wants an empty line in front of a list, four columns in front of what
    belongs to an item of a list, and no backslash in the code of a table."""
    out: list[str] = []
    plain = {number for number, _ in links.lines(text)}
    within = parted = False  # within a list; an item of it has more than one paragraph
    for number, line in enumerate(text.splitlines(), 1):
        made = line
        if number in plain and _ITEM.match(line):
            if out and out[-1].strip() and (parted or not within):
                out.append("")
            within, parted = True, False
        elif within and line.startswith("  "):
            parted = parted or not out[-1].strip()
            indent = len(line) - len(line.lstrip())
            made = " " * (4 * max(1, indent // 2)) + line.lstrip()
        elif line.strip():
            within = False
        if number in plain and line.lstrip().startswith("|"):
            made = re.sub("`[^`]+`", lambda code: code[0].replace(r"\|", "|"), made)
        out.append(made)
    return "\n".join(out) + "\n"


def build(configuration: Path, output: Path) -> None:
    """Raises CalledProcessError, FileNotFoundError (mkdocs is missing)."""
    subprocess.run(
        ["mkdocs", "build", "--quiet", "--strict", "--clean", "--config-file", str(configuration),
         "--site-dir", str(output)],
        check=True,
    )  # fmt: skip


class _Page(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.ids.add(value)
            elif name in ("href", "src") and value:
                self.links.append(value)


def broken(site: Path) -> Iterator[str]:
    """A line for each link of the site that leads nowhere."""
    read: dict[Path, _Page] = {}
    for path in sorted(site.rglob("*.html")):
        read[path] = _Page()
        read[path].feed(path.read_text(encoding="utf-8"))
    for path, page in read.items():
        for link in page.links:
            if re.match(r"[a-z][a-z0-9+.-]*:|//", link) or path.name == "404.html":
                continue
            target, _, anchor = link.partition("#")
            place = (path.parent / unquote(target.partition("?")[0])).resolve() if target else path
            if place.is_dir():
                place = place / "index.html"
            if not place.exists():
                yield f"{path.relative_to(site)}: {link}: there is no such file"
            elif anchor and place in read and unquote(anchor) not in read[place].ids:
                yield f"{path.relative_to(site)}: {link}: no such heading"
