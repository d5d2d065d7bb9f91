"""What callgrind writes, and what is asked for that is not there."""

from __future__ import annotations

import shutil

import click
import pytest
from benchlib import instructions
from click.testing import CliRunner

DUMP = """# callgrind format
version: 1
events: Ir
summary: 1000

ob=(1) /usr/bin/python3.11
fl=(1) ceval.c
fn=(1) main
16 400
+2 20
-1 30
* 1
cfn=(2) work'2
calls=3 20
16 5000

fn=(2)
20 9
cfi=(9) other.c
cfn=(3) free
calls=1 0
* 77

fn=(3)
5 7
fn=(4) work
7 40

totals: 507
"""


def test_costs_are_those_of_the_function_alone() -> None:
    count = instructions.parse_dump(DUMP)
    assert count.functions == {"main": 451, "work": 49, "free": 7}
    assert count.total == 507


def test_nothing_was_counted() -> None:
    assert instructions.parse_dump("") == instructions.Count(0, {})


def test_a_row_that_there_is_not() -> None:
    done = CliRunner().invoke(instructions.instructions, ["nbd/4k/none"], standalone_mode=False)
    assert isinstance(done.exception, click.UsageError)
    assert "no row without a network is called nbd/4k/none" in done.exception.message


def test_valgrind_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda program: None)
    done = CliRunner().invoke(instructions.instructions, [], standalone_mode=False)
    assert isinstance(done.exception, click.UsageError)
    assert done.exception.message == "valgrind is missing: apt install valgrind"
