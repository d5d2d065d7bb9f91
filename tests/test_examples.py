"""The programs in examples/, as a user would run them, and what docs/api.md says of them.

attach.sh needs a kernel with /dev/nbdX: tests/lab/guest/test_none_attach.py runs it."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.fuse import need_fuse
from tests.support.nbdkit import need
from tests.support.target import ROOT, TargetProcess, running_target

EXAMPLES = ROOT / "examples"
PAGE = ROOT / "docs/api.md"
PROGRAMS = sorted(path.name for path in EXAMPLES.glob("*.py"))
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.sh"))
_EXAMPLE = re.compile(
    r"^\[examples/(\w+\.py)\]\(\.\./examples/(\w+\.py)\):\n\n"
    r"```python\n(.*?)^```\n(?:\nprints\n\n```\n(.*?)^```\n)?",
    re.M | re.S,
)


class Example(NamedTuple):
    name: str
    link: str
    code: str
    prints: str


def examples() -> list[Example]:
    """Those of the page."""
    text = PAGE.read_text(encoding="utf-8")
    return [Example(each[1], each[2], each[3], each[4] or "") for each in _EXAMPLE.finditer(text)]


def without_head(code: str) -> str:
    """Without imports and the URL, which the page does not repeat."""
    lines = code.splitlines(keepends=True)
    while lines and re.match(r"import |URL = |\n", lines[0]):
        del lines[0]
    return "".join(lines)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TargetProcess]:
    folder = tmp_path_factory.mktemp("examples")
    with running_target([f"{folder}/disk:size=64M"], folder / "log") as target:
        yield target


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_prints_what_the_page_says(
    name: str, target: TargetProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    (example,) = [each for each in examples() if each.name == name]
    monkeypatch.setattr(sys, "argv", [name, f"{target.url}/0"])
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert said.getvalue() == example.prints


def test_the_page_shows_what_is_in_the_programs() -> None:
    """Each block of code is the body of the program that is named above it."""
    text = PAGE.read_text(encoding="utf-8")
    found = examples()
    assert len(found) == text.count("```python\n") == text.count("\nprints\n")
    assert sorted(each.name for each in found) == PROGRAMS
    for example in found:
        assert example.link == example.name
        code = (EXAMPLES / example.name).read_text(encoding="utf-8")
        assert code.startswith('"""') and f"`python3 examples/{example.name} iser://" in code
        assert code.endswith(f"\n\n{without_head(example.code)}"), example.name
    for name in SCRIPTS:
        assert f"(../examples/{name})" in text


def run(name: str, *words: str) -> str:
    """The output of a script, with the command of this checkout."""
    path = f"{ROOT / '.venv' / 'bin'}:{os.environ['PATH']}"
    done = subprocess.run(
        [EXAMPLES / name, *words], capture_output=True, text=True, check=False,
        env={**os.environ, "PATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_nbd(target: TargetProcess, tmp_path: Path) -> None:
    need("nbdinfo", "nbdcopy")
    assert run("nbd.sh", f"{target.url}/0", str(tmp_path / "copy")) == f"{64 << 20}\n"
    assert (tmp_path / "copy").stat().st_size == 64 << 20


def test_nbdkit(target: TargetProcess) -> None:
    need("nbdkit", "nbdinfo")
    assert run("nbdkit.sh", f"{target.url}/0") == f"{64 << 20}\n"


def test_fuse(target: TargetProcess, tmp_path: Path) -> None:
    need_fuse()
    (tmp_path / "data").write_bytes(os.urandom(3 << 20))
    said = run("fuse.sh", f"{target.url}/0", str(tmp_path / "data"))
    assert said.endswith("/data is on the LUN\n")


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_are_of_sh_and_say_how_they_are_run(name: str) -> None:
    subprocess.run(["sh", "-n", EXAMPLES / name], check=True)
    assert f"\n#   examples/{name} iser://HOST/IQN/LUN" in (EXAMPLES / name).read_text()
