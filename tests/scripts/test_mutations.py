"""scripts/mutations: the table fits the sources, and what is printed about a tree of two tests."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from mutationslib.__main__ import main
from mutationslib.table import BadTable, Mutation, read_table

TOP = Path(__file__).resolve().parents[2]
TABLE = read_table()
FEWEST = 52  # the twelve, and at least forty others

CODE = "def size(blocks: int) -> int:\n    return blocks * 512\n"
TESTS = """
import pytest
from iserblk.sizes import size

def test_none(): assert size(0) == 0
@pytest.mark.parametrize("blocks", [1, 3], ids=["a: b", "c]"])
def test_some(blocks): assert size(blocks) == blocks << 9
"""
CONFTEST = """
def pytest_addoption(parser):
    parser.addoption("--failures")

failed = []

def pytest_runtest_logreport(report):
    if report.failed:
        failed.append(report.nodeid)

def pytest_sessionfinish(session):
    with open(session.config.getoption("--failures"), "w") as file:
        file.writelines(f"{each}: because: of it\\n" for each in failed)
"""


@pytest.mark.parametrize("mutation", TABLE, ids=lambda each: each.name)
def test_each_still_fits_its_source(mutation: Mutation) -> None:
    """And names tests that there are, and says what a user loses, and whether the simulation finds
    it, or why it does not."""
    path = TOP / mutation.file
    assert mutation.file.split("/")[0] in ("iserblk", "fuse_mount", "nbd_plugin", "scripts")
    assert mutation.changed(path.read_text(encoding="utf-8"))
    for test in mutation.tests:
        assert test.startswith("tests/") and (TOP / test.partition("::")[0]).exists(), test
    assert len(mutation.loses.split()) > 8 and mutation.loses.endswith(".")
    assert (mutation.world is None) != (mutation.no_world is None)


def test_there_are_enough_of_them() -> None:
    assert len(TABLE) >= FEWEST


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("blocks + 512", "blocks", "0 times"),
        ("blocks", "block", "2 times"),
        ("* 512", "*", "no Python"),
        ("* 512", "* 0x200", "means the same"),
    ],
)
def test_one_that_does_not_fit_is_told_of(old: str, new: str, why: str) -> None:
    mutation = Mutation("name-of-it", "iserblk/sizes.py", old, new, ("tests",), "")
    with pytest.raises(BadTable, match=f"^name-of-it: .*{why}"):
        mutation.changed(CODE)


def row(
    name: str, old: str = "* 512", new: str = "* 4096", test: str = "tests/test_sizes.py"
) -> str:
    return (
        f"[[mutation]]\nname = '{name}'\nfile = 'iserblk/sizes.py'\nold = '{old}'\n"
        f"new = '{new}'\ntests = ['{test}']\nloses = 'The user.'\n"
    )


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[[mutation]]\nname = 'short'\n", "short: a key that is missing, or not known: file"),
        (row("twice") + row("twice"), "twice: two mutations have this name"),
        (row("none").replace("['tests/test_sizes.py']", "[]"), "none: names no test"),
        (row("both") + "world = ''\nno_world = 'x'\n", "both: the simulation finds it, or does"),
        ("name =", "a.toml: "),
    ],
)
def test_a_table_that_cannot_be_read(
    text: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.toml").write_text(text)
    assert main([], tmp_path) == 1
    assert capsys.readouterr().err.startswith(f"mutations: {why}")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A checkout of a project of its own."""
    top = tmp_path / "tree"
    for name, text in {
        "iserblk/__init__.py": "",
        "iserblk/sizes.py": CODE,
        "tests/test_sizes.py": TESTS,
        "tests/test_broken.py": "def test_it(): assert 0\n",
        "conftest.py": CONFTEST,
    }.items():
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_text(text)
    (top / ".gitignore").write_text(".venv\n__pycache__\n")
    (top / ".venv").symlink_to(TOP / ".venv")
    subprocess.run(["git", "init", "--quiet", top], check=True)
    return top


def test_what_is_printed(tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The test that notices a change, and those that none does; the checkout stays as it is."""
    (tmp_path / "a.toml").write_text(
        row("noticed")
        + row("survives", test="tests/test_sizes.py::test_none")
        + row("says-nothing", test="tests/test_broken.py")
        + row("no-tests", test="tests/test_away.py")
        + row("rotten", old="* 4096")
    )
    status = main(["--jobs", "2"], tmp_path, tree)
    lines = capsys.readouterr().out.splitlines()
    said = {line.split()[0]: " ".join(line.split()[3:]) for line in lines[:-2]}
    assert said["noticed"] == "tests/test_sizes.py::test_some[a: b]"
    assert said["survives"] == "NOT NOTICED"
    assert "tests/test_broken.py::test_it fails without it, too" in said["says-nothing"]
    assert "pytest ended with 4" in said["no-tests"]
    assert "0 times, not once" in said["rotten"]
    assert lines[-2] == "mutations: 1 of 5 were noticed" and status == 1
    assert set(lines[-1].split()[3:]) == {"survives", "says-nothing", "no-tests", "rotten"}
    assert (tree / "iserblk/sizes.py").read_text() == CODE


def test_some_of_them(tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.toml").write_text(row("noticed") + row("other", old="blocks:", new="block:"))
    assert main(["not*"], tmp_path, tree) == 0
    assert capsys.readouterr().out.endswith("\nmutations: 1 of 1 were noticed\n")
    assert main(["--list", "*/sizes.py"], tmp_path, tree) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [
        *("noticed", "The"),
        *("other", "The"),
    ]


SIMULATE = """#!/bin/sh
case "$*" in
  *--plant\\ found*"--with journal=off --with clients=1") ;;
  *--plant\\ always*) ;;
  *--plant\\ broken*) echo "a traceback"; exit 1 ;;
  *--plant*) exit 0 ;;
  *"--seed 7 --operations 1000 --with journal=off --with clients=1") exit 0 ;;
  *) exit 1 ;;
esac
echo "seed 7: Wrong: it is lost"
echo "after 3000 operations; again: scripts/simulate --seed 7 --operations 1000 --trace"
exit 1
"""


def test_what_the_simulation_finds(
    tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without any test; rows that it is not to find are left out."""
    script = tree / "scripts" / "simulate"
    script.parent.mkdir()
    script.write_text(SIMULATE)
    script.chmod(0o755)
    (tmp_path / "a.toml").write_text(
        row("found")
        + "world = 'journal=off clients=1'\n"
        + row("missed")
        + "world = ''\n"
        + row("always")
        + "world = ''\n"
        + row("broken")
        + "world = ''\n"
        + row("unseen")
        + "no_world = 'The world has none'\n"
        + row("elsewhere")
    )
    status = main(["--simulated", "--operations", "5000", "--jobs", "2"], tmp_path, tree)
    lines = capsys.readouterr().out.splitlines()
    said = {line.split()[0]: " ".join(line.split()[3:]) for line in lines[:-2]}
    assert said == {
        "found": "after 3000 operations, seed 7: Wrong: it is lost",
        "missed": "NOT NOTICED",
        "always": "SAYS NOTHING: seed 7: Wrong: it is lost: without it, too",
        "broken": "SAYS NOTHING: scripts/simulate ended with 1: a traceback",
    }
    assert lines[-2] == "mutations: 1 of 4 were noticed" and status == 1
    assert main(["--list"], tmp_path, tree) == 0
    listed = capsys.readouterr().out
    assert "Found by the simulation: journal=off clients=1." in listed
    assert "Not found by the simulation: The world has none." in listed
    with pytest.raises(SystemExit):
        main(["--simulated", "unseen"], tmp_path, tree)
    assert "no mutation that the simulation finds fits unseen" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["nothing-like-it"], ["--jobs", "0"], ["--frobnicate"]])
def test_wrong_arguments_do_nothing(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 7 and "scripts/mutations --help" in capsys.readouterr().err
