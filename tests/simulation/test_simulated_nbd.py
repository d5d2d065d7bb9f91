"""The NBD face of a simulated world: its connections, and what each of them is told."""

from __future__ import annotations

import pytest

from tests.simulation.cases import DISC, NBD_FAULTS, Case
from tests.simulation.nbd_face import STATES
from tests.simulation.playing import played, played_twice

pytestmark = pytest.mark.usefixtures("silent")
OPERATIONS = 200
NBD = ("front", "nbd")
ALONE = ("other", "none")


def test_a_case_does_the_same_again() -> None:
    case = Case(2, OPERATIONS, settings=(NBD, ALONE, ("between", "5"), ("hearers", "4")))
    played_twice(case)


def test_ways_of_ending_that_are_left_out() -> None:
    """The others, and the worlds without the face, stay what they are."""
    settings = (("between", "5"), ALONE)
    without = played(Case(3, OPERATIONS, settings=(*settings, ("front", "disk"))))
    assert not without.faults.keys() & NBD_FAULTS.keys()
    case = Case(3, OPERATIONS, settings=(*settings, NBD))
    happened = played(case).happened
    assert len(happened) > 2
    some = tuple(happened[::2])
    assert set(played(case._replace(faults=some)).happened) <= set(some)
    assert played(case._replace(faults=())).faults.total() == 0


def test_clients_without_a_fault_are_told_of_nothing() -> None:
    result = played(Case(4, OPERATIONS, (), (NBD, ALONE, ("hearers", "4"), ("journal", "off"))))
    assert result.losses == 0
    assert not {state for state, times in result.states.items() if times} & set(STATES)
    assert result.faults[DISC] == 0


def test_all_of_it_is_reached() -> None:
    """Each way in which a connection ends, and each state."""
    faults, states = set(NBD_FAULTS), set(STATES)
    settings = (
        NBD,
        ALONE,
        ("between", "5"),
        ("journal", "off"),
        ("hearers", "4"),
        ("clients", "8"),
    )
    for seed in (15, 16, 7, *range(20)):  # the first ones are likely to do
        result = played(Case(seed, OPERATIONS, settings=settings))
        faults -= result.faults.keys()
        states -= {state for state, times in result.states.items() if times}
        if not faults and not states:
            return
    pytest.fail(f"never reached: {faults | states}")
