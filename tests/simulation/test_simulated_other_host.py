"""A second host of a simulated world: its part of the LUN, and its reservations."""

from __future__ import annotations

import os
from collections import Counter

import pytest

from tests.simulation.cases import BESIDE, FENCES, INVADES, NONE, REPLACES, TAKE, TAKES, Case
from tests.simulation.other_host import INVADED, RESET, STATES, Shut
from tests.simulation.playing import played
from tests.simulation.world import REPLACING, REPLAYED, TAKING, TIMED_OUT, WORDLESS, play

pytestmark = pytest.mark.usefixtures("silent")
OPERATIONS = 200


def _case(seed: int, other: str, *settings: tuple[str, str]) -> Case:
    others = (("other", other), ("front", "disk"), ("between", "5"))
    return Case(seed, OPERATIONS, settings=(*others, *settings))


@pytest.mark.parametrize("other", [BESIDE, FENCES, INVADES, TAKES, REPLACES])
def test_a_case_does_the_same_again(other: str) -> None:
    lines: list[list[str]] = [[], []]
    first, second = (play(_case(5, other), each.append) for each in lines)
    assert lines[0] == lines[1]
    assert first == second
    assert other in (TAKES, REPLACES) or any("other host 0: " in line for line in lines[0])


def test_a_world_without_it() -> None:
    lines: list[str] = []
    result = play(_case(2, NONE), lines.append)
    assert not any("other host" in line for line in lines)
    assert not {state for state, times in result.states.items() if times} & {*STATES, *TAKING}
    assert not result.faults[TAKE]


def test_all_of_it_is_reached() -> None:
    states = {*STATES, WORDLESS}
    for seed in range(20):
        for other, tas in ((BESIDE, "yes"), (BESIDE, "no"), (FENCES, "no"), (INVADES, "no")):
            result = played(_case(seed, other, ("clients", "4"), ("tas", tas)))
            found = {state for state, times in result.states.items() if times}
            assert other in (FENCES, INVADES) or found.isdisjoint(set(STATES) - {RESET})
            assert other == INVADES or INVADED not in found
            assert tas == "no" or WORDLESS not in found
            states -= found
        if not states:
            return
    pytest.fail(f"never reached: {states}")


def test_what_another_host_ends_without_a_word_is_sent_again() -> None:
    """Without TAS. Nothing else disturbs: the clients notice nothing."""
    states: Counter[str] = Counter()
    for seed in range(20):
        case = _case(seed, BESIDE, ("tas", "no"), ("hesitates", "0.5"), ("clients", "8"))
        result = played(case._replace(faults=()))
        states += result.states
        assert not result.losses and not result.states[TIMED_OUT]
        if states[WORDLESS] and states[REPLAYED]:
            return
    pytest.fail(f"never sent again: {states}")


def test_all_of_taking_over_is_reached() -> None:
    states = set(TAKING)
    for seed in range(20):
        result = played(_case(seed, TAKES, ("fault-kinds", "taken-over+cut+restart")))
        states -= {state for state, times in result.states.items() if times}
        if not states:
            return
    pytest.fail(f"never reached: {states}")


def test_all_of_another_lun_is_reached() -> None:
    """A fresh world first."""
    states = set(REPLACING)
    for seed in (int.from_bytes(os.urandom(4), "big"), *range(20)):
        case = _case(seed, REPLACES, ("fault-kinds", "another-LUN-in-its-place+cut+restart"))
        result = played(case)
        states -= {state for state, times in result.states.items() if times}
        if not states:
            return
    pytest.fail(f"never reached: {states}")


@pytest.mark.parametrize("other", [FENCES, INVADES, TAKES, REPLACES])
def test_through_nbd_it_reserves_nothing(other: str) -> None:
    case = _case(5, other)
    assert play(case.having("front", "nbd")).settings.other == BESIDE


def test_where_it_writes_to_the_same_part_no_block_is_changed_in_part() -> None:
    """What one host writes beside that is not the other's to keep."""
    settings = play(_case(5, INVADES, ("block", "4096"), ("granule", "512"))).settings
    assert (settings.block, settings.granule) == (4096, 4096)


def test_since_when_a_host_is_shut_out() -> None:
    shut = Shut()
    assert not shut.surely(0.0, 9.0) and not shut.perhaps(0.0)
    shut.ask(1.0)
    assert not shut.surely(1.5, 2.0) and shut.perhaps(1.5)
    shut.begin(2.0)
    assert not shut.surely(1.5, 3.0)
    assert shut.surely(2.0, 3.0)
    shut.let_go(4.0)
    assert shut.surely(2.0, 4.0) and not shut.surely(2.0, 4.5) and shut.perhaps(4.2)
    shut.end(5.0)
    assert shut.surely(2.0, 4.0) and not shut.surely(4.5, 5.5)
    assert shut.perhaps(4.5) and not shut.perhaps(5.5)
    shut.ask(6.0)
    assert not shut.surely(2.0, 6.5)
    assert shut.perhaps(4.5)
