"""scripts/simulate: a world that fails is made smaller, as long as it fails in the same way."""

from __future__ import annotations

import pytest
from simulatelib.shrinking import Failure, Shrinking, kind_of

from tests.simulation.cases import Case, read_case

CASE = Case(7, 1000)
SETTINGS = {"clients": "8", "portals": "3", "scheme": "iscsi"}


def shrunk(
    needs: int, faults: set[int], tries: int = 1000, orders: int = 1, kind: str = "Wrong"
) -> tuple[Case, int]:
    """Of a world of 20 faults that fails at ``needs`` operations, if these ``faults`` happen, in
    one of ``orders``."""

    def play(case: Case) -> Failure | None:
        happened = range(20) if case.faults is None else case.faults
        if case.operations < needs or not faults <= set(happened) or case.order % orders:
            return None
        settings = SETTINGS | dict(case.settings)
        if settings["portals"] == "1":
            return Failure("Stuck", needs, tuple(happened), settings)
        return Failure(kind, needs, tuple(happened), settings)

    failure = play(CASE)
    assert failure is not None
    shrinking = Shrinking(CASE, failure, play, tries)
    case = shrinking.run()
    assert play(case) == shrinking.failure
    return case, shrinking.tried


@pytest.mark.parametrize("orders", [1, 2, 3])
def test_what_is_not_needed_goes(orders: int) -> None:
    case, _ = shrunk(37, {3, 17}, orders=orders)
    assert case.operations == 37
    assert case.faults == (3, 17)
    assert dict(case.settings)["clients"] == "1"


def test_no_fault_may_be_needed() -> None:
    assert shrunk(2, set())[0].faults == ()


def test_it_stays_the_same_failure() -> None:
    """With one portal it is another one."""
    assert "portals" not in dict(shrunk(1, {4})[0].settings)


def test_so_many_worlds_and_no_more() -> None:
    case, tried = shrunk(37, {3, 17}, tries=5)
    assert tried == 5
    assert case.operations == 37  # the first of them is the best


def test_failures_of_one_kind() -> None:
    first = AssertionError("block 12: version 3 in a read from 1.5 to 2e-5; legal are [1, 2]")
    second = AssertionError("block 7: version 33 in a read from 7.5 to 8.25; legal are [9]")
    assert kind_of(first) == kind_of(second)
    assert kind_of(first) != kind_of(AssertionError("block 7: is said to be a hole"))
    assert kind_of(first) != kind_of(ValueError(str(first)))


def test_a_case_is_what_its_words_say() -> None:
    for case in (
        CASE,
        Case(1, 2, ()),
        Case(1, 2, (3, 4), (("clients", "1"), ("journal", "off")), 5),
    ):
        assert read_case(f"{case.words()} # what it found") == (case, "what it found")
