"""The request queue of a simulated world, and what happens to it."""

from __future__ import annotations

import pytest

from tests.simulation.cases import QUEUE_FAULTS, Case
from tests.simulation.playing import played, played_twice
from tests.simulation.queue_face import STATES

pytestmark = pytest.mark.usefixtures("silent")
OPERATIONS = 200
QUEUE = (
    *(("front", "queue"), ("other", "none")),
    *(("scheme", "iscsi"), ("connections", "1"), ("queue-depth", "128")),  # the quickest
)


def test_a_case_does_the_same_again() -> None:
    case = Case(2, OPERATIONS, settings=(*QUEUE, ("between", "5")))
    played_twice(case)


def test_a_kind_of_fault_that_only_a_queue_has_asks_for_one() -> None:
    settings = (("other", "none"), ("between", "5"), ("fault-kinds", "queue-closed"))
    result = played(Case(3, OPERATIONS, settings=settings))
    assert result.settings.front == "queue"
    assert set(result.faults) == {"queue: closed"}


def test_all_of_it_is_reached() -> None:
    faults, states = set(QUEUE_FAULTS), set(STATES)
    for seed in range(20):
        settings = (*QUEUE, ("between", "5"), ("clients", "16"))
        result = played(Case(seed, OPERATIONS, settings=settings))
        faults -= result.faults.keys()
        states -= {state for state, times in result.states.items() if times}
        if not faults and not states:
            return
    pytest.fail(f"never reached: {faults | states}")
