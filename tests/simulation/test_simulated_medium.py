"""A target of a simulated world whose medium is bad, and other mixes of operations."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from random import Random

import pytest

from tests.simulation.cases import (
    BAD,
    BESIDE,
    DEFER,
    DROP,
    DURABLE,
    EVICT,
    FENCES,
    GOOD,
    HOARDS,
    LINGERS,
    NONE,
    USUAL,
    Case,
)
from tests.simulation.medium import LingeringMedia
from tests.simulation.nbd_face import FLUSH, FUA, READ, ZERO_FUA
from tests.simulation.world import EVICTED, OF_BAD_MEDIUM, Result, draw, play

pytestmark = pytest.mark.usefixtures("silent")
OPERATIONS = 200


def _played(seed: int, *settings: tuple[str, str]) -> Result:
    case = Case(seed, OPERATIONS, settings=(("between", "5"), *settings))
    try:
        return play(case)
    except BaseException as error:
        error.add_note(f"again with scripts/simulate {case.words()}")
        raise


def test_all_of_it_is_reached() -> None:
    states, faults = set(OF_BAD_MEDIUM), {DROP, DEFER}
    likely = ((5, "off"), (0, "1M"))
    for seed, journal in (*likely, *product(range(20), ("off", "1M"))):
        result = _played(seed, ("medium", BAD), ("front", "disk"), ("journal", journal))
        states -= {state for state, times in result.states.items() if times}
        faults -= result.faults.keys()
        if not states and not faults:
            return
    pytest.fail(f"never reached: {states | faults}")


def test_a_good_one_loses_nothing_by_a_flush() -> None:
    result = _played(5, ("medium", GOOD))
    assert not any(result.states[state] for state in OF_BAD_MEDIUM)
    assert not result.faults.keys() & {DROP, DEFER}


@pytest.mark.parametrize("other", [BESIDE, FENCES])
def test_it_has_one_host(other: str) -> None:
    """Of two hosts either may be told."""
    assert _played(5, ("medium", BAD), ("other", other)).settings.other == NONE


def test_its_faults_ask_for_it() -> None:
    result = _played(5, ("fault-kinds", "flush-that-loses"), ("front", "disk"))
    assert result.settings.medium == BAD
    assert result.faults.keys() == {DROP}


def test_what_is_lost_may_be_shown_still() -> None:
    result = _played(5, ("fault-kinds", "flush-that-loses+memory-pressure"), ("front", "disk"))
    assert result.settings.medium == LINGERS
    assert result.faults.keys() == {DROP, EVICT}
    assert result.states[EVICTED]


def test_a_medium_shows_what_it_has_lost_until_its_page_is_evicted() -> None:
    medium, chance = LingeringMedia(1 << 14), Random(1)
    old, new = bytearray(b"a" * 4096), bytearray(b"b" * 4096)
    medium.write(memoryview(old), 4096, True, False)
    with medium.losing(lambda: True):
        medium.write(memoryview(new), 4096, False, False)
    shown = bytearray(4096)
    assert medium.read_into(memoryview(shown), 4096, True)
    assert shown == new
    assert medium.content[4096:8192] == old
    assert not medium.evict(chance, 0.0)
    assert medium.evict(chance, 1.0)
    assert not medium.evict(chance, 1.0)
    assert medium.read_into(memoryview(shown), 4096, True)
    assert shown == old


@pytest.mark.parametrize("is_lost", [False, True])
@pytest.mark.parametrize("change", [LingeringMedia.zero, LingeringMedia.punch])
def test_zeroes_are_shown_at_once(
    change: Callable[[LingeringMedia, int, int], None], is_lost: bool
) -> None:
    medium, shown = LingeringMedia(1 << 14), bytearray(4096)
    medium.write(memoryview(b"a" * 8192), 4096, True, False)
    with medium.losing(lambda: is_lost):
        change(medium, 4096, 4096)
    assert medium.read_into(memoryview(shown), 4096, True) and not any(shown)
    assert medium.content[4096:8192] == (b"a" if is_lost else b"\0") * 4096
    assert medium.shown[8192:12288] == b"a" * 4096
    assert medium.extents(0, 12288, 9) == [(0, 8192, False), (8192, 4096, True)]


def test_worlds_are_drawn_with_each_medium_and_each_way_to_share() -> None:
    drawn = [draw(Random(f"settings {seed}")) for seed in range(400)]
    assert {each.medium for each in drawn} == {GOOD, BAD, LINGERS}
    sharing = {each.medium for each in drawn if each.options["shared"] == "yes"}
    assert sharing == {GOOD, BAD, LINGERS}


def test_mixes() -> None:
    mixes = {mix: _played(5, ("mix", mix)).operations for mix in (USUAL, HOARDS, DURABLE)}
    assert mixes[HOARDS][FLUSH] < mixes[USUAL][FLUSH]
    assert mixes[DURABLE][FUA] > 3 * mixes[USUAL][FUA]
    assert [mix for mix in mixes if mixes[mix][ZERO_FUA]] == [DURABLE]
    assert all(mix[READ] for mix in mixes.values())
