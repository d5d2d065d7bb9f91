"""Initiator, target and network in worlds of a seed, with all faults, are right.

ISERBLK_SIMULATION=SEED plays the world of one seed; scripts/simulate plays many.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.simulation import nbd_face, other_host, queue_face, servers
from tests.simulation.cases import (
    ACROSS,
    ALL_OF_IT,
    CUT,
    FAULTS,
    LAST,
    NBD_CUT,
    PARTS,
    STRIKE,
    Case,
    read_case,
)
from tests.simulation.faces import FUSE_STATES
from tests.simulation.history import Wrong
from tests.simulation.playing import played
from tests.simulation.world import (
    OF_BAD_MEDIUM,
    REPLACING,
    SIZE,
    STATES,
    TAKING,
    WORDLESS,
    World,
    play,
)

pytestmark = pytest.mark.usefixtures("silent")
REPLAY = "ISERBLK_SIMULATION"
OPERATIONS = 200
FRESH = 4  # worlds
CASES = [
    read_case(line)
    for line in (Path(__file__).parent / "seeds.txt").read_text().splitlines()
    if not line.startswith("#")
]


def _fresh() -> list[int]:
    given = os.environ.get(REPLAY)
    if given:
        return [int(given)]
    return [int.from_bytes(os.urandom(4), "big") for _ in range(FRESH)]


def test_fresh_worlds() -> None:
    for seed in _fresh():
        assert played(Case(seed, OPERATIONS)).operations.total() >= OPERATIONS


@pytest.mark.parametrize(("case", "what"), CASES)
def test_worlds_of_the_list(case: Case, what: str) -> None:
    assert what
    played(case)


def test_a_case_does_the_same_again() -> None:
    """Also behind another world in the same process."""
    lines: list[list[str]] = [[], []]
    first = play(Case(2, OPERATIONS), lines[0].append)
    play(Case(3, OPERATIONS // 4))
    second = play(Case(2, OPERATIONS), lines[1].append)
    assert lines[0] == lines[1]
    assert first == second
    assert play(Case(4, OPERATIONS // 4)).trace != play(Case(5, OPERATIONS // 4)).trace
    assert play(Case(4, OPERATIONS // 4, order=1)).trace != play(Case(4, OPERATIONS // 4)).trace


def test_faults_that_are_left_out() -> None:
    """The others stay what they are."""
    case = Case(3, OPERATIONS, settings=(("between", "5"),))
    all_of_them = play(case).happened
    assert len(all_of_them) > 2
    some = tuple(all_of_them[::2])
    assert set(play(case._replace(faults=some)).happened) <= set(some)
    assert play(case._replace(faults=())).faults.total() == 0


@pytest.mark.parametrize("block", ["512", "4096"])
@pytest.mark.parametrize("lies", PARTS)
def test_the_clients_use_a_part_of_a_lun(lies: str, block: str) -> None:
    settings = played(
        Case(3, OPERATIONS, settings=(("lies", lies), ("block", block), ("granule", block)))
    ).settings
    first, last = settings.first // int(block), (settings.first + SIZE) // int(block) - 1
    assert (first < 1 << 32 <= last) == (lies == ACROSS)
    assert (settings.first + SIZE == settings.size) == (lies != ACROSS)
    assert settings.size == {ALL_OF_IT: SIZE, ACROSS: int(block) << 33, LAST: 16 << 40}[lies]


@pytest.mark.parametrize(("given", "other"), [("block", "granule"), ("granule", "block")])
def test_a_granule_is_never_larger_than_a_block(given: str, other: str) -> None:
    """Whatever the seed draws of the other one."""
    value = {"block": "512", "granule": "4096"}[given]
    for seed in range(20):
        words = World(Case(seed, 1, settings=((given, value),))).settings.as_words()
        assert words[given] == words[other] == value


def test_what_goes_beside_it_ends_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target takes it for an error of its own, and goes on."""
    monkeypatch.setattr(World, "place", lambda world, at: at * world.settings.granule)
    with pytest.raises(Wrong, match="where no client has asked for any"):
        play(Case(3, OPERATIONS, settings=(("lies", ACROSS),)))


def test_a_world_may_have_some_kinds_of_faults_alone() -> None:
    settings = (("between", "5"), ("fault-kinds", "cut+restart-without-its-cache+NBD-cut"))
    result = played(Case(3, OPERATIONS, settings=settings))
    assert result.settings.front == "nbd"
    assert len(result.faults) > 0 and result.faults.keys() <= {CUT, STRIKE, NBD_CUT}
    again = play(Case(3, OPERATIONS, settings=tuple(result.settings.as_words().items())))
    assert again.trace == result.trace


def test_all_is_reached() -> None:
    """Each fault, and each state of the product, within a few worlds of three kinds. (Those of NBD,
    of FUSE, of a request queue, of a hand-over, of another host, of a bad medium and of another LUN
    have tests of their own.)"""
    faults, states = set(FAULTS), set(STATES)
    states -= {*nbd_face.STATES, *FUSE_STATES, *queue_face.STATES, *servers.STATES}
    states -= {*other_host.STATES, *TAKING, *OF_BAD_MEDIUM, WORDLESS, *REPLACING}
    kinds: tuple[tuple[tuple[str, str], ...], ...] = (
        (("connections", "3"), ("error-recovery-level", "2"), ("scheme", "iscsi")),
        (("journal", "off"), ("portals", "3"), ("hearers", "4")),
        (("io-timeout", "4"), ("error-recovery-level", "1"), ("scheme", "iscsi")),
    )
    for number in (17, 23, 1, 40, *range(18)):  # the first ones are likely to do
        others = (
            ("between", "5"),
            ("front", "disk"),
            ("other", "none"),
            ("header-digest", "crc32c"),
            ("data-digest", "crc32c"),
        )
        settings = (*kinds[number % 3], *others)
        result = played(Case(100 + number, OPERATIONS, settings=settings))
        faults -= result.faults.keys()
        states -= {state for state, times in result.states.items() if times}
        if not faults and not states:
            return
    pytest.fail(f"never reached: {faults | states}")
