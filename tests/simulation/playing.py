"""Plays cases for tests."""

from __future__ import annotations

from tests.simulation.cases import Case
from tests.simulation.world import Result, play


def played(case: Case) -> Result:
    """What raises has a note that says how to see it again."""
    try:
        return play(case)
    except BaseException as error:
        error.add_note(f"again with scripts/simulate {case.words()}")
        raise


def played_twice(case: Case) -> Result:
    """The same has to happen in the same order."""
    lines: list[list[str]] = [[], []]
    first, second = (play(case, each.append) for each in lines)
    assert lines[0] == lines[1]
    assert first == second
    return first
