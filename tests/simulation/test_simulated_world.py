"""Initiator, target and network in worlds of a seed, with all faults, are right.

ISERBLK_SIMULATION=SEED plays one world again; scripts/simulate plays many.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.simulation.world import FAULTS, Result, play

pytestmark = pytest.mark.usefixtures("silent")
REPLAY = "ISERBLK_SIMULATION"
OPERATIONS = 200
FRESH = 8  # worlds
SEEDS = [
    line.split(maxsplit=2)
    for line in (Path(__file__).parent / "seeds.txt").read_text().splitlines()
    if not line.startswith("#")
]


def _fresh() -> list[int]:
    given = os.environ.get(REPLAY)
    if given:
        return [int(given)]
    return [int.from_bytes(os.urandom(4), "big") for _ in range(FRESH)]


def _played(seed: int, operations: int) -> Result:
    try:
        return play(seed, operations)
    except BaseException as error:
        error.add_note(f"again with scripts/simulate --seed {seed} --operations {operations}")
        raise


def test_fresh_worlds() -> None:
    for seed in _fresh():
        assert _played(seed, OPERATIONS).operations.total() >= OPERATIONS


@pytest.mark.parametrize(("seed", "operations", "what"), SEEDS)
def test_worlds_of_the_list(seed: str, operations: str, what: str) -> None:
    assert what
    _played(int(seed), int(operations))


def test_a_seed_does_the_same_again() -> None:
    """Also behind another world in the same process."""
    lines: list[list[str]] = [[], []]
    first = play(2, OPERATIONS, lines[0].append)
    play(3, OPERATIONS // 4)
    second = play(2, OPERATIONS, lines[1].append)
    assert lines[0] == lines[1]
    assert first == second
    assert play(4, OPERATIONS // 4).trace != play(5, OPERATIONS // 4).trace


def test_all_faults_happen() -> None:
    """Also the rarer ones, within a few worlds."""
    found: set[str] = set()
    for seed in range(100, 130):
        found |= play(seed, OPERATIONS // 2).faults.keys()
        if found == FAULTS.keys():
            return
    pytest.fail(f"there was no {FAULTS.keys() - found}")
