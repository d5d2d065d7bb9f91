"""The documents: their links lead somewhere, README.md lists them, they are short, and a wheel has
them."""

from __future__ import annotations

import re
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from docslib import generated, links, pages, site
from docslib.__main__ import problems

from tests.support.nbdkit import need
from tests.support.target import ROOT

LISTED = {group.title: group.pages for group in pages.listed(ROOT)}
GENERATED = {"docs/states.md"}  # by scripts/diagrams.py
WRITTEN = [
    (group, path)
    for group, rows in LISTED.items()
    for _, path in rows
    if path not in GENERATED and path.startswith("docs/")
]
# What is read in ten minutes, and a little more where developers look things up.
MOST_WORDS = {"For users": 2400, "For operators": 2000, "For developers": 2500}
LOOKED_UP = {"docs/json.md"}  # a section for each command; nobody reads all of them
COMMANDS = sorted(
    path.relative_to(ROOT).as_posix() for path in (ROOT / "docs/commands").glob("*.md")
)


def test_every_link_leads_somewhere_and_every_page_is_listed() -> None:
    assert problems(ROOT) == []


def test_the_lists_of_the_first_page() -> None:
    """By those who read them, and each page once."""
    assert list(LISTED) == list(MOST_WORDS)
    paths = [path for rows in LISTED.values() for _, path in rows]
    assert len(paths) == len(set(paths)) > 30


@pytest.mark.parametrize(("group", "path"), WRITTEN, ids=[path for _, path in WRITTEN])
def test_a_page_is_short_and_says_for_whom_it_is(group: str, path: str) -> None:
    text = (ROOT / path).read_text(encoding="utf-8")
    title, first = text.split("\n\n")[:2]
    assert title.startswith("# ") and "\n" not in title
    assert re.match("For (users|operators|developers|those)", first), first
    words, most = len(text.split()), MOST_WORDS[group]
    assert path in LOOKED_UP or words <= most, f"{path} has {words} words, and may have {most}"


@pytest.mark.parametrize("path", COMMANDS)
def test_a_page_of_a_command_is_short(path: str) -> None:
    assert len((ROOT / path).read_text(encoding="utf-8").split()) <= MOST_WORDS["For users"]


@pytest.mark.parametrize("path", [path.relative_to(ROOT).as_posix() for path in pages.every(ROOT)])
def test_actors_are_named(path: str) -> None:
    """Thread, caller, peer, target, user: a sentence about nobody in particular is read twice."""
    text = (ROOT / path).read_text(encoding="utf-8")
    found = re.findall(r"(?i)\b(?:whoever|somebody|someone|anybody|anyone|nobody)\b", text)
    assert not found


def test_the_changes_are_one_page() -> None:
    text = (ROOT / "CHANGES.md").read_text(encoding="utf-8")
    for version in text.split("\n## ")[1:]:
        assert len(version.splitlines()) <= 80, version.partition("\n")[0]
        assert len(version.split()) <= 1500


# --- the check of links ------------------------------------------------------------------------


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "docs/more").mkdir(parents=True)
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples/a.sh").touch()
    rows = "| a | [A](docs/a.md): first |\n| b | [B](docs/b.md) |\n"
    (tmp_path / "README.md").write_text(f"# P\n\n## Documents\n\n### For users\n\n{rows}\n## End\n")
    (tmp_path / "docs/a.md").write_text(
        "# A\n\n## One `two`, (three)\n\n[b](b.md#b), [e](../examples/a.sh)\n"
    )
    (tmp_path / "docs/b.md").write_text(
        "# B\n\n[a](a.md#one-two-three), [up](../README.md), [c](more/c.md)\n"
    )
    (tmp_path / "docs/more/c.md").write_text("# C\n\n[b](../b.md), [top](../../README.md#p)\n")
    return tmp_path


def test_a_project_without_faults(project: Path) -> None:
    assert problems(project) == []
    assert pages.listed(project) == [("For users", [("A", "docs/a.md"), ("B", "docs/b.md")])]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("[x](c.md)", "docs/a.md:6: c.md: there is no such file"),
        ("![x](c.svg)", "docs/a.md:6: c.svg: there is no such file"),
        ("[x](b.md#c)", "docs/a.md:6: b.md#c: docs/b.md has no such heading"),
        ("[x](#one-two)", "docs/a.md:6: #one-two: docs/a.md has no such heading"),
        ("| [`x [1]`](b.md) | [x](#y) |", "docs/a.md:6: #y: docs/a.md has no such heading"),
        ("[x](../../out.md)", "docs/a.md:6: ../../out.md: that is outside of the project"),
    ],
)
def test_a_link_that_leads_nowhere(project: Path, line: str, said: str) -> None:
    (project.parent / "out.md").write_text("")
    with (project / "docs/a.md").open("a") as page:
        page.write(f"{line}\n")
    assert problems(project) == [said]


@pytest.mark.parametrize(
    "text",
    [
        "[x](https://example/y.md#z) and [x](mailto:x@y)",
        "`[x](y.md)` and ``[x](`y`.md)``",
        "```\n[x](y.md)\n# no heading\n```",
        "[x](../docs/b.md) [x](#a) [x](more/c.md#c)",
    ],
)
def test_what_is_no_fault(project: Path, text: str) -> None:
    with (project / "docs/a.md").open("a") as page:
        page.write(f"{text}\n")
    assert problems(project) == []


def test_a_page_that_no_list_has(project: Path) -> None:
    (project / "docs/d.md").write_text("# D\n")
    (project / "docs/more/e.md").write_text("# E\n")
    assert problems(project) == [
        "README.md: its lists have no row for docs/d.md",
        "docs/more/e.md: no page leads there",
    ]


def test_headings_that_are_twice_there() -> None:
    assert links.anchors("# A\n## B, c\n## b c\n## [B](x.md) c\n") == {"a", "b-c", "b-c-1", "b-c-2"}


# --- the site ----------------------------------------------------------------------------------


def test_a_list_as_mkdocs_wants_it() -> None:
    text = "Text:\n- one\n  more\n\n  | a | `b\\|c` |\n- two\n\n```\n- code\n  more\n```\n"
    assert site.as_mkdocs(text).splitlines() == [
        "Text:", "", "- one", "    more", "", "    | a | `b|c` |", "", "- two", "",
        "```", "- code", "  more", "```",
    ]  # fmt: skip


def test_pages_as_mkdocs_gets_them(project: Path, tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    made = site.prepare(project, work)
    assert sorted(path.name for path in (work / "pages").rglob("*.md")) == [
        "a.md", "b.md", "c.md", "index.md"
    ]  # fmt: skip
    assert "[e](examples/a.sh)" in (work / "pages/a.md").read_text()
    assert (work / "pages/examples/a.sh").exists()
    assert "[A](a.md)" in (work / "pages/index.md").read_text()
    assert "[up](index.md)" in (work / "pages/b.md").read_text()
    assert "[top](../index.md#p)" in (work / "pages/more/c.md").read_text()
    assert '{"For users": [{"A": "a.md"}, {"B": "b.md"}]}, {"More": [{"C": "more/c.md"}]}]' in (
        made.read_text()
    )


def test_links_of_a_site_that_lead_nowhere(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<p id="x"><a href="b.html#y">b</a> <a href="#z">z</a> <img src="c.svg">'
        '<a href="https://example/">e</a> <a href="#x">x</a></p>'
    )
    (tmp_path / "b.html").write_text('<h2 id="y">Y</h2><a href="a.html#x">a</a>')
    assert list(site.broken(tmp_path)) == [
        "a.html: #z: no such heading", "a.html: c.svg: there is no such file"
    ]  # fmt: skip


@pytest.fixture(scope="module")
def generated_pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The documents that are made from code and tests."""
    output = tmp_path_factory.mktemp("generated")
    generated.build(ROOT, output)
    (output / generated.RESULTS).write_text("# Results\n\n[lab](lab.md)\n")
    return output


def test_the_site(tmp_path: Path, generated_pages: Path) -> None:
    """mkdocs warns of nothing, and every link of what it has made leads somewhere."""
    need("mkdocs")
    (tmp_path / "work").mkdir()
    site.build(site.prepare(ROOT, tmp_path / "work", generated_pages), tmp_path / "site")
    assert list(site.broken(tmp_path / "site")) == []
    made = sorted(page.name for page in generated_pages.glob("*.md"))
    for path in [*(path for _, path in WRITTEN), *COMMANDS, *(f"docs/{name}" for name in made)]:
        assert (tmp_path / "site" / Path(path).relative_to("docs").with_suffix(".html")).exists()


def test_each_document_that_is_made_has_its_section(generated_pages: Path) -> None:
    """And its row in README.md, so that the site has it where its readers look."""
    made = {page.name for page in generated_pages.glob("*.md")}
    assert len(made) == 4
    headings = links.anchors((ROOT / "docs/made.md").read_text(encoding="utf-8"))
    assert {name.removesuffix(".md") for name in made} == headings - {"documents-that-are-made"}
    listed = {path for group in pages.listed(ROOT, made) for _, path in group.pages}
    assert {f"docs/{name}" for name in made} <= listed


def test_links_of_documents_that_are_made_lead_somewhere(
    tmp_path: Path, generated_pages: Path
) -> None:
    """Beside the other pages, as packages and the source archive have them."""
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    for page in generated_pages.glob("*.md"):
        shutil.copyfile(page, tmp_path / "docs" / page.name)
        assert list(links.broken(tmp_path / "docs" / page.name, tmp_path)) == []


def test_links_to_a_document_that_is_made(project: Path, tmp_path: Path) -> None:
    """To its section where it is not there, and else to itself; and a list has it."""
    (project / "docs/made.md").write_text("# Made\n\n## r\n\n## s\n")
    with (project / "docs/a.md").open("a") as page:
        page.write("[r](made.md#r), [s](made.md#s)\n")
    readme = project / "README.md"
    rows = "| c | [C](docs/made.md) |\n| r | [R](docs/made.md#r) |\n| s | [S](docs/made.md#s) |\n"
    readme.write_text(readme.read_text().replace("\n## End", f"{rows}\n## End"))
    assert problems(project) == []
    made = tmp_path / "made"
    made.mkdir()
    (made / "r.md").write_text("# R\n\n[a](a.md), [up](../README.md)\n")
    work = tmp_path / "work"
    work.mkdir()
    configuration = site.prepare(project, work, made).read_text()
    assert "[r](r.md), [s](made.md#s)" in (work / "pages/a.md").read_text()
    assert "[R](r.md) |" in (work / "pages/index.md").read_text()
    assert "[a](a.md), [up](index.md)" in (work / "pages/r.md").read_text()
    assert '{"C": "made.md"}, {"R": "r.md"}]' in configuration


def test_a_source_archive_has_them_beside_the_other_pages(project: Path) -> None:
    (project / "docs/r.md").write_text("# R\n")
    assert problems(project) == ["README.md: its lists have no row for docs/r.md"]
    (project / "docs/made.md").write_text("# Made\n\n## r\n")
    readme = project / "README.md"
    rows = "| c | [C](docs/made.md) |\n| r | [R](docs/made.md#r) |\n"
    readme.write_text(readme.read_text().replace("\n## End", f"{rows}\n## End"))
    assert problems(project) == []


# --- a wheel -----------------------------------------------------------------------------------


def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Files below the prefix that a wheel installs outside of Python's packages: their sources."""
    given: dict[str, Any] = {}
    monkeypatch.setattr(pytest.importorskip("setuptools"), "setup", given.update)
    monkeypatch.setattr(sys, "argv", ["setup.py", "sdist"])
    monkeypatch.chdir(ROOT)
    runpy.run_path("setup.py")
    return {
        f"{folder}/{Path(path).name}": path
        for folder, paths in given["data_files"]
        for path in paths
    }


def test_a_wheel_has_the_pages_that_its_messages_name(
    monkeypatch: pytest.MonkeyPatch, made: Path
) -> None:
    """Messages, help texts, manual pages, units and alerts. docs/NAME.md is
    share/doc/iserblk/NAME.md there."""
    files = installed(monkeypatch)
    places = [path for folder in ("iserblk", "fuse_mount", "nbd_plugin")
              for path in (ROOT / folder).rglob("*.py")]  # fmt: skip
    places += [ROOT / path for path in files.values() if not path.startswith("docs/")]
    places += [path for path in made.rglob("*") if path.is_file()]
    named = {
        name
        for path in places
        for name in re.findall(
            r"\bdocs/([\w/-]+\.(?:md|toml))", path.read_text(encoding="utf-8").replace("\\", "")
        )
    }
    assert {"json.md", "kubernetes.md", "monitoring.md"} <= named
    assert {name for name in named if f"share/doc/iserblk/{name}" not in files} == set()


def test_the_pages_of_a_wheel_lead_to_each_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """But to those of the project's root, of which a wheel has the first one as its description."""
    for place, source in installed(monkeypatch).items():
        if source.startswith("docs/"):
            target = tmp_path / place.removeprefix("share/doc/iserblk/")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / source, target)
    assert (tmp_path / "using.md").exists()
    found = [
        line for page in sorted(tmp_path.rglob("*.md")) for line in links.broken(page, tmp_path)
    ]
    assert [line for line in found if "../" not in line] == []
