"""Inputs of a fuzzer that is guided by coverage (scripts/fuzz)."""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Iterator

import pytest

from tests.fuzz import guided
from tests.fuzz.engine import Case, Row
from tests.fuzz.guided import SEPARATOR, Decisions, GuidedCase
from tests.fuzz.table import PLANTED, ROWS

SOME = 40  # seeds of a row


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def decided(data: bytes) -> list[object]:
    chance = Decisions(data)
    return [
        chance.random(),
        chance.randrange(1000),
        chance.choice("abcdef"),
        chance.randbytes(3),
        chance.sample(range(50), 3),
    ]


def test_decisions_are_those_of_the_input() -> None:
    data = random.Random(1).randbytes(200)
    assert decided(data) == decided(data)
    assert decided(data) != decided(data[::-1])
    assert Decisions(b"\x80\0").random() == 0.5
    assert Decisions(b"\x01\x02").randbytes(2) == b"\x01\x02"[::-1]


def test_no_loop_waits_for_ever_for_another_number() -> None:
    chance = Decisions(b"")
    assert chance.random() == 0
    while chance.random() < 0.5:
        pass


def test_bytes_are_the_parts_of_the_input() -> None:
    case = GuidedCase(b"one" + SEPARATOR + b"two" + SEPARATOR + b"\x80\0", ROWS["keys"])
    assert [case.data, case.data, case.data] == [b"one", b"two", b""]
    assert case.chance.random() == 0.5
    both = GuidedCase(b"\x80\0", ROWS["keys"])
    assert both.data == b"\x80\0" and both.chance.random() == 0.5


def test_what_a_row_may_raise_is_nothing_and_all_else_is() -> None:
    def run(case: Case) -> None:
        raise ValueError if case.data == b"known" else KeyError

    row = Row("row", run, (), (ValueError,))
    guided.run_input(row, b"known")
    with pytest.raises(KeyError):
        guided.run_input(row, b"other")
    with pytest.raises(IndexError, match="planted"):
        guided.run_input(PLANTED, bytes((0xB0, 0xEA, 0x17, 0x77)) + bytes(5))


@pytest.mark.parametrize("name", ROWS)
def test_what_a_corpus_begins_with(name: str) -> None:
    row = ROWS[name]
    seeds = list(itertools.islice(guided.seeds(row), SOME))
    assert len(set(seeds)) > 12
    for seed in seeds:
        assert len(seed) <= guided.MOST_INPUT
        guided.run_input(row, seed)


def test_words() -> None:
    words = guided.dictionary(ROWS["text"])
    assert {SEPARATOR, b"MaxBurstLength", b"\xff\xff\xff\xff"} <= set(words)
