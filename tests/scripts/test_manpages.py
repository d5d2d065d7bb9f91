"""The manual pages: nothing is missing in them, and man and mandoc have nothing to say."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import click
import pytest
from manlib import documents, markdown, pages
from manlib.commands import commands, program
from manlib.roff import Page, code, inline

from fuse_mount import helper, umount_helper
from iserblk.cli.main import COMMANDS, cli
from iserblk.options import OPTION_NAMES
from tests.scripts.manual import make
from tests.support.nbdkit import need
from tests.support.target import ROOT

PAGES = sorted(
    [
        *("man1/iserblk.1", *(f"man1/iserblk-{name}.1" for name in COMMANDS)),
        *("man1/nbdkit-iserblk-plugin.1", "man5/iserblk.conf.5", "man7/iserblk-url.7"),
        *("man8/mount.iserblk.8", "man8/umount.fuse.iserblk.8"),
    ]
)


def plain(page: Path) -> str:
    """The text of a page without fonts and escapes; each paragraph is a line."""
    text = re.sub(r"\\f[BIR]|\\[%:&]", "", page.read_text(encoding="utf-8"))
    for escape, character in {r"\-": "-", r"\(aq": "'", r"\(dq": '"', r"\e": "\\"}.items():
        text = text.replace(escape, character)
    return text


def tags(page: Path) -> list[str]:
    """What the page defines: options and parameters, as they stand before their text."""
    return re.findall(r"^\.TP\n(.*)$", plain(page), re.MULTILINE)


def params(name: str) -> list[click.Parameter]:
    """What a command takes; "": iserblk itself."""
    above = click.Context(cli, info_name="iserblk", **cli.context_settings)
    if not name:
        return cli.get_params(above)
    command = cli.get_command(above, name)
    assert command is not None
    return command.get_params(click.Context(command, parent=above, info_name=name))


def test_pictures_are_left_out(made: Path) -> None:
    """The documents have some; a terminal shows none."""
    pictures = [
        path for path in (ROOT / "docs/commands").glob("*.md") if "\n![" in path.read_text()
    ]
    assert pictures
    for path in pictures:
        page = made / f"man/man1/iserblk-{path.stem}.1"
        assert "pictures/" not in page.read_text(encoding="utf-8")


def test_which_files_there_are(made: Path) -> None:
    there = sorted(str(path.relative_to(made / "man")) for path in (made / "man").rglob("*.?"))
    assert there == PAGES


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_every_option_is_in_its_page(name: str, made: Path) -> None:
    page = made / "man/man1" / (f"iserblk-{name}.1" if name else "iserblk.1")
    defined = {word for tag in tags(page) for word in re.findall(r"(?<!\S)-[-\w]+", tag)}
    for each in params(name):
        if isinstance(each, click.Option):
            assert set(each.opts) <= defined, each.opts
            words = " ".join((each.help or "").replace("…", "...").split())
            assert words.replace("`", "").rstrip(".") in plain(page)
        elif each.metavar:
            assert each.metavar.replace("…", "...") in plain(page)


def test_every_option_of_a_url_is_described(made: Path) -> None:
    """Once in the table; those of CHAP, which are for URLs alone, in the text."""
    page = made / "man/man7/iserblk-url.7"
    defined = {name for tag in tags(page) for name in tag.split(", ")}
    missing = set(OPTION_NAMES) - defined - {"auth", "target-user", "target-password"}
    assert not missing, f"the tables of docs/options.md have no row for {missing}"
    assert set(OPTION_NAMES) - defined == {"auth", "target-user", "target-password"}
    listed = plain(page).partition('"ALL OPTIONS"\n')[2].partition(".\n")[0]
    assert listed.split(", ") == list(OPTION_NAMES)
    plugin = plain(made / "man/man1/nbdkit-iserblk-plugin.1")
    assert ", ".join(OPTION_NAMES) in plugin


@pytest.mark.parametrize(
    ("page", "letters"),
    [
        ("mount.iserblk.8", helper.SHORT_OPTIONS),
        ("umount.fuse.iserblk.8", umount_helper.SHORT_OPTIONS),
    ],
)
def test_every_option_of_the_helpers_is_described(made: Path, page: str, letters: str) -> None:
    defined = [tag.split()[0] for tag in tags(made / "man/man8" / page)]
    for letter in letters.replace(":", ""):
        assert f"-{letter}" in defined


def test_no_section_of_the_documents_is_left_out(made: Path) -> None:
    """Each paragraph of the pages of commands, and of those that they share, begins one of a manual
    page."""
    everything = " ".join(plain(made / "man" / page) for page in PAGES).split()
    joined = " ".join(everything)
    looked_at = 0
    for name, document in documents.read(ROOT / "docs").all():
        for section in documents.sections(document):
            for block in section.blocks:
                if block.kind == "text":
                    # Up to what is shown in another way than as it stands.
                    start = re.split(r"[`\[\\…→µ×–~^\"]|--", block.lines[0].replace("**", ""))[0]
                    assert start.strip() in joined, (name, section.title)
                    looked_at += 1
    assert looked_at > 100


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_has_a_page(name: str) -> None:
    """docs/cli.md lists it, in the words of the help. It says what the command does, and what is
    typed."""
    text = (ROOT / f"docs/commands/{name}.md").read_text(encoding="utf-8")
    title, does, synopsis = text.split("\n\n")[:3]
    assert title == f"# iserblk {name}"
    assert does.endswith(".") and "\n" not in does
    lines = synopsis.splitlines()
    assert (lines[0], lines[-1]) == ("```", "```")
    assert all(re.match(rf"iserblk {name}(?= |$)", line) for line in lines[1:-1])
    contents = (ROOT / "docs/cli.md").read_text(encoding="utf-8")
    assert f"\n| [{name}](commands/{name}.md) | {COMMANDS[name]} |\n" in contents


def test_every_page_is_one_of_a_command() -> None:
    """Or goes on where that of a command ends."""
    for path in (ROOT / "docs/commands").glob("*.md"):
        assert path.stem.split("-")[0] in COMMANDS, path


def test_every_variable_of_the_environment_is_described(made: Path) -> None:
    """Those that the programs look at by name; scripts/manlib/pages.py has their list."""
    ours = re.compile('"((?:ISERBLK|LIBISCSI|XDG|NOTIFY|LISTEN|CREDENTIALS)_[A-Z_]+)"')
    places = ("iserblk", "fuse_mount", "nbd_plugin")
    paths = [path for place in places for path in (ROOT / place).rglob("*.py")]
    sources = [path.read_text(encoding="utf-8") for path in paths]
    used = {name for text in sources if "environ" in text for name in ours.findall(text)}
    described = {name for tag in tags(made / "man/man1/iserblk.1") for name in tag.split(", ")}
    assert len(used) > 8 and used <= described


def test_further_pages_of_a_command_and_their_parts(tmp_path: Path) -> None:
    """They come into its manual page, and into no other."""
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    more = tmp_path / "docs/commands/attach-deeper.md"
    more.write_text(
        "# Deep\n\nFor operators.\n\nfathom\n\n## Deeper\n\n[all](../options.md) drown\n"
    )
    written = documents.read(tmp_path / "docs")
    manual = pages.Manual(program(), list(commands()), written, "2026-01-01")
    made = {page.name: page.text() for page in manual.pages()}
    assert (
        '.SH "DEEP"\nfathom\n.SS "Deeper"\nall (iserblk-url(7)) drown\n' in made["iserblk-attach"]
    )
    assert [name for name, text in made.items() if "fathom" in text] == ["iserblk-attach"]


def test_links_become_pages(made: Path) -> None:
    for page in PAGES:
        assert not re.search(r"\]\(|\.md#", plain(made / "man" / page)), page
    assert "see iserblk-stats(1)" in plain(made / "man/man7/iserblk-url.7")


def test_pages_that_are_named_exist(made: Path) -> None:
    there = {re.sub(r".*/(.*)\.(\d)", r"\1(\2)", page) for page in PAGES}
    for page in PAGES:
        named = re.findall(r"[\w.-]*iserblk[\w.-]*\(\d\)", plain(made / "man" / page))
        assert set(named) <= there, page


def test_the_date_is_that_of_the_source(made: Path) -> None:
    for page in PAGES:
        assert " 2009-02-13 " in (made / "man" / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES)
def test_man_warns_of_nothing(page: str, made: Path) -> None:
    need("man", "groff", "lexgrog")
    done = subprocess.run(
        ["man", "--warnings", "-E", "UTF-8", "-l", "-Tutf8", str(made / "man" / page)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "LC_ALL": "C.UTF-8", "MANWIDTH": "80", "MANROFFSEQ": ""},
    )
    assert (done.returncode, done.stderr) == (0, "")
    shown = re.sub(r"\x1b\[[0-9;]*m|.\x08", "", done.stdout)
    assert max(map(len, shown.splitlines())) <= 120, "only examples may be wide"
    name = Path(page).stem
    found = subprocess.run(
        ["lexgrog", str(made / "man" / page)], capture_output=True, text=True, check=False
    )
    assert f': "{name} - ' in found.stdout  # what apropos(1) will find


@pytest.mark.parametrize("page", PAGES)
def test_mandoc_warns_of_nothing(page: str, made: Path) -> None:
    need("mandoc")
    done = subprocess.run(
        ["mandoc", "-T", "lint", "-W", "warning", str(made / "man" / page)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "share").write_text("")
    done = make(tmp_path)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"manpages: {tmp_path}/share")


def test_an_interpreter_without_packages(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text('#!/bin/sh\nexec /usr/bin/python3 -I -S "$0.py"\n')
    (tmp_path / "python.py").write_text(
        f"import runpy, sys\nsys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'scripts')!r}]\n"
        "runpy.run_module('manlib', run_name='__main__')\n"
    )
    bare.chmod(0o755)
    done = make(tmp_path / "out", PYTHON=str(bare))
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("manpages: ") and "no Python package " in line


# --- text ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "roff"),
    [
        (".so /etc/shadow", r"\&.so /etc/shadow"),
        ("'br", r"\&'br"),
        ("a\\fBb", r"a\efBb"),
        ("see `--rcap` here", r"see \fB\-\-\%rcap\fR here"),
        ("`.x`", r"\fB\&.x\fR"),
        ("with --verify or -v, not e-mail", r"with \fB\%\-\-verify\fR or \fB\-v\fR, not e-mail"),
        ("**No `code`** in it", r"\fBNo code\fR in it"),
        ("5 µs → ü", r"5 \(mcs \(-> \[u00FC]"),
    ],
)
def test_text(text: str, roff: str) -> None:
    assert inline(text).replace(r"\%", "") == roff.replace(r"\%", "")


def test_code_is_not_hyphenated_and_may_be_broken() -> None:
    assert code("io-timeout") == r"\%io\-timeout"
    assert code("/a") == "/a"
    assert r"\:" in code("iser://HOST[:PORT]/TARGET-IQN[/LUN][?option=value]")


def test_a_page() -> None:
    page = Page("x", 1, "2026-01-01", "1.0")
    page.heading("first")
    page.paragraph("one")
    page.paragraph("two")
    page.example(["a  b", "", ".c"])
    lines = page.text().splitlines()[3:]
    assert lines == ['.SH "FIRST"', "one", ".PP", "two", ".PP", ".in +4n", ".EX", "a  b", "",
                     r"\&.c", ".EE", ".in"]  # fmt: skip


def test_a_document() -> None:
    text = "# A\n\none\n\n## B: c\n\n- item\n\n```\nx\n\n# y\n```\n\n"
    text += "| h | i |\n|---|---|\n| `a\\|b` | c |\n"
    document = markdown.parse(text)
    assert [block.kind for block in document.blocks] == ["text"]
    part = document.part("B: c")
    assert part.anchor() == "b-c"
    assert [block.kind for block in part.blocks] == ["item", "code", "table"]
    assert part.blocks[1].lines == ["x", "", "# y"]
    assert part.blocks[2].rows == [["`a|b`", "c"]]
    with pytest.raises(LookupError, match="has no part 'D'"):
        document.part("D")
