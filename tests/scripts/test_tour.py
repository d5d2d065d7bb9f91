"""docs/tour.md goes through the functions that a login, a READ and a WRITE with its flush call."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from figureslib.__main__ import figures
from figureslib.path import JOURNEYS, Call, Journey, journeys
from figureslib.tour import mistakes, parse

from ..support.target import ROOT

PAGE = """# Tour

`x` (`a.py`) outside of a journey counts for nothing.

## A login

### In the NBD server: one

1. `f` (`a.py`) and `C.g` (`b.py`); see `c.py` and [d](d.md).

### In the target: two

1. `t` (`t.py`)

### In the NBD server: three

1. `h` (`a.py`)
"""
NBD: list[Call] = [
    ("iserblk/z.py", "before"), ("iserblk/a.py", "f"), ("iserblk/c.py", "c"),
    ("iserblk/b.py", "C.g"), ("iserblk/a.py", "f"), ("iserblk/a.py", "h"),
    ("iserblk/z.py", "after"),
]  # fmt: skip
TARGET: list[Call] = [("iserblk/t.py", "t")]


def found(nbd: list[Call], *more: list[Call], page: str = PAGE) -> list[str]:
    """The mistakes of the page where a login makes these calls."""
    taken = [Journey(each, TARGET) for each in (nbd, *more)]
    return list(mistakes(parse(page), {"login": taken}))


def test_the_tour() -> None:
    text = (ROOT / "docs/tour.md").read_text(encoding="utf-8")
    assert list(mistakes(parse(text), journeys(ROOT))) == [], (
        "scripts/figures --calls has the calls"
    )


def test_a_page_without_mistakes() -> None:
    assert found(NBD) == []


def test_a_function_that_is_not_called_any_more() -> None:
    calls = [call for call in NBD if call[1] != "C.g"]
    assert found(calls) == ["login, nbd: C.g of iserblk/b.py is not called after f"]


def test_functions_in_another_order() -> None:
    calls = [NBD[3], NBD[1], NBD[2], NBD[5]]
    assert found(calls) == ["login, nbd: C.g of iserblk/b.py is not called after f"]


def test_no_function_of_the_page() -> None:
    assert found(TARGET) == ["login, nbd: f of iserblk/a.py is not called at all"]


def test_a_function_in_another_file() -> None:
    calls: list[Call] = [("iserblk/moved.py", "C.g") if call[1] == "C.g" else call for call in NBD]
    assert found(calls) == ["login, nbd: C.g of iserblk/b.py is not called after f"]


def test_a_file_that_the_page_lacks() -> None:
    """Between the first step and the last, and each time: a ping is no part of the way."""
    calls: list[Call] = [*NBD[:2], ("iserblk/new.py", "x"), *NBD[2:]]
    assert found(calls) == ["login, nbd: passes through iserblk/new.py, too"]
    assert found(NBD, calls) == []


def test_a_file_that_is_not_passed() -> None:
    calls = [call for call in NBD if call[0] != "iserblk/c.py"]
    assert found(calls) == ["login, nbd: does not pass through iserblk/c.py"]
    assert found(NBD, calls) == []


def test_a_journey_that_the_page_lacks() -> None:
    assert found(NBD, page="# Tour\n") == [
        "login, nbd: the page has no steps", "login, target: the page has no steps"
    ]  # fmt: skip


def test_a_heading_that_names_no_process() -> None:
    with pytest.raises(ValueError, match="In the client"):
        parse("## A READ\n### In the client: x\n")


def test_calls_are_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = [Journey([*NBD, *NBD], TARGET), Journey(NBD, TARGET)]
    given: list[Path] = []

    def instead(top: Path) -> dict[str, list[Journey]]:
        given.append(top)
        return dict.fromkeys(JOURNEYS, taken)

    monkeypatch.setattr("figureslib.__main__.journeys", instead)
    done = CliRunner().invoke(figures, ["--calls", "READ", str(ROOT)])
    assert (done.exit_code, given) == (0, [ROOT])
    lines = done.output.splitlines()
    assert lines[:2] == ["READ, iserblk nbd:", "    iserblk/z.py before"]
    assert lines[-2:] == ["READ, iserblk target:", "    iserblk/t.py t"]
    assert len(lines) == 2 + len(NBD) + len(TARGET)
