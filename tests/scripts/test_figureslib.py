"""scripts/figures: what counts in a source, and what a READ passes through."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from figureslib.__main__ import figures
from figureslib.path import read
from figureslib.source import MOST_ATTRIBUTES, MOST_LINES, count

TOP = Path(__file__).resolve().parents[2]


def tree(top: Path, **modules: str) -> Path:
    """``modules``: "iserblk/disk/a" → source."""
    for name in ("iserblk", "fuse_mount", "nbd_plugin", "tests"):
        (top / name).mkdir()
    for name, source in modules.items():
        path = top / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return top


def klass(attributes: int, before: str = "") -> str:
    """A class that sets so many attributes, each twice."""
    lines = [f"        self.a{number} = self.a{number} = 0\n" for number in range(attributes)]
    return f"{before}class Many:\n    def __init__(self):\n{''.join(lines)}"


def function(lines: int) -> str:
    return "def long():\n" + "    pass\n" * (lines - 1)


def test_lines(tmp_path: Path) -> None:
    made = tree(tmp_path, **{"iserblk/a": "1\n2\n", "fuse_mount/b": "1\n", "tests/c": "1\n" * 5})
    (tmp_path / "iserblk/d.pyx").write_text("1\n")
    (tmp_path / "iserblk/d.c").write_text("1\n")
    counted = count(made)
    assert (counted.product_lines, counted.test_lines) == (4, 5)


def test_locks_below_the_faces(tmp_path: Path) -> None:
    source = "import threading\nfrom trio import Semaphore\nthreading.Lock(), Semaphore(1)\n"
    made = tree(tmp_path, **{"iserblk/disk/a": source, "iserblk/nbd/b": source, "tests/c": source})
    assert count(made).locks == {"iserblk/disk/a.py": 2}


def test_what_imports_task_slot(tmp_path: Path) -> None:
    source = "from iserblk.initiator.tasks import Other, TaskSlot\n"
    made = tree(
        tmp_path,
        **{"iserblk/disk/a": source, "iserblk/initiator/b": source, "iserblk/c": "TaskSlot = 1\n"},
    )
    assert count(made).task_slot == ["iserblk/disk/a.py"]


def test_large_classes(tmp_path: Path) -> None:
    made = tree(
        tmp_path,
        **{
            "iserblk/a": klass(MOST_ATTRIBUTES),
            "iserblk/b": klass(MOST_ATTRIBUTES + 1),
            "iserblk/c": klass(MOST_ATTRIBUTES + 1, "@dataclass\n"),
        },
    )
    assert count(made).classes == {"iserblk/b.py: Many": MOST_ATTRIBUTES + 1}


def test_long_functions(tmp_path: Path) -> None:
    made = tree(
        tmp_path, **{"iserblk/a": function(MOST_LINES), "iserblk/b": function(MOST_LINES + 1)}
    )
    assert count(made).functions == {"iserblk/b.py: long": MOST_LINES + 1}


def test_what_a_read_passes_through() -> None:
    """As often in each run, within what a pass through the loop takes."""
    one, other = read(TOP), read(TOP)
    for way in (one, other):
        assert {"iserblk/nbd/transmission.py", "iserblk/disk/lun/operations.py"} < set(way.files)
        assert len(way.files) < way.crossings < way.calls
    assert abs(one.calls - other.calls) < 0.2 * one.calls


def test_what_is_printed(tmp_path: Path) -> None:
    made = tree(tmp_path, **{"iserblk/a": function(MOST_LINES + 5)})
    done = CliRunner().invoke(figures, ["--no-path", str(made)])
    assert done.exit_code == 0
    assert "functions of more than 80 lines  1\n      85 iserblk/a.py: long\n" in done.output
    done = CliRunner().invoke(figures, ["--json", "--no-path", str(made)])
    assert json.loads(done.output)["functions"] == {"iserblk/a.py: long": 85}


@pytest.mark.parametrize(
    ("words", "said"),
    [([], "is no checkout of iserblk"), (["--no-path", "--frobnicate"], "No such option")],
)
def test_wrong_arguments(tmp_path: Path, words: list[str], said: str) -> None:
    done = CliRunner().invoke(figures, [*words, str(tmp_path)])
    assert done.exit_code != 0 and said in done.output
