"""The FUSE face of a simulated world: its open files, and what each of them is told."""

from __future__ import annotations

import pytest

pytest.importorskip("pyfuse3", reason="pyfuse3 is missing: run scripts/setup")

from tests.simulation.cases import Case
from tests.simulation.faces import CLOSED_UNFLUSHED, FUSE_STATES, READS_AT_ONCE
from tests.simulation.playing import played, played_twice

pytestmark = pytest.mark.usefixtures("silent")
OPERATIONS = 200
FILES = (
    *(("front", "fuse"), ("other", "none"), ("hearers", "4")),
    *(("scheme", "iscsi"), ("connections", "1")),  # the quickest
)


def test_a_case_does_the_same_again() -> None:
    case = Case(3, OPERATIONS, settings=(*FILES, ("between", "5"), ("journal", "off")))
    played_twice(case)


def test_open_files_without_a_fault_are_told_of_nothing() -> None:
    result = played(Case(4, OPERATIONS, (), (*FILES, ("journal", "off"))))
    assert result.losses == 0
    reached = {state for state, times in result.states.items() if times} & set(FUSE_STATES)
    assert reached == {CLOSED_UNFLUSHED, READS_AT_ONCE}


def test_all_of_it_is_reached() -> None:
    states = set(FUSE_STATES)
    settings = (*FILES, ("between", "5"), ("journal", "off"), ("clients", "8"))
    for seed in range(2, 20):
        result = played(Case(seed, OPERATIONS, settings=settings))
        states -= {state for state, times in result.states.items() if times}
        if not states:
            return
    pytest.fail(f"never reached: {states}")
