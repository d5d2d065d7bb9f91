"""What has come and what is missing at an initiator: the order, the gaps, and their bounds."""

from __future__ import annotations

import pytest

from iserblk.datamover.arrivals import (
    MOST_ASKED,
    MOST_BYTES,
    MOST_PDUS,
    NOTHING,
    PATIENCE,
    Arrivals,
    Gaps,
)
from iserblk.errors import RemoteProtocolError

LAST = 0xFFFFFFFF


def pdu(stat_sn: int) -> memoryview:
    return memoryview(stat_sn.to_bytes(4, "big"))


@pytest.mark.parametrize("first", [1, LAST - 1, LAST])
def test_those_behind_a_lost_one_come_in_order(first: int) -> None:
    """Also where StatSN wraps."""
    numbers = [(first + at) & LAST for at in range(5)]
    arrivals = Arrivals(first)
    assert [arrivals.ahead(each) for each in numbers] == [0, 1, 2, 3, 4]
    for at in (3, 1):
        arrivals.keep(numbers[at], pdu(numbers[at]))
    assert arrivals.exists((first + 5) & LAST) == [
        (numbers[0], 1),
        (numbers[2], 1),
        (numbers[4], 1),
    ]
    assert arrivals.head() is None and arrivals.waiting
    arrivals.next()
    assert arrivals.head() == pdu(numbers[1])
    arrivals.take()
    assert arrivals.head() is None
    assert arrivals.missing() == [(numbers[2], 1), (numbers[4], 1)]
    arrivals.next()
    arrivals.take()
    assert not arrivals.waiting
    assert arrivals.expected == numbers[4]
    assert arrivals.ahead(numbers[0]) == -4


def test_what_waits_is_a_copy() -> None:
    """The receive buffer is used for the next PDU, and a second copy changes nothing."""
    arrivals = Arrivals(1)
    buffer = bytearray(b"two")
    arrivals.keep(2, memoryview(buffer))
    buffer[:] = b"xxx"
    arrivals.keep(2, memoryview(buffer))
    assert arrivals.held() == [(2, memoryview(b"two"))]


def test_only_what_is_newly_known_is_told_as_missing() -> None:
    arrivals = Arrivals(10)
    assert arrivals.exists(12) == [(10, 2)]
    assert arrivals.exists(12) == []
    assert arrivals.exists(11) == []
    assert arrivals.exists(14) == [(12, 2)]
    assert arrivals.missing() == [(10, 4)]


def test_a_status_that_comes_by_itself_is_not_missing() -> None:
    """Nothing was told of it before: what is known to exist moves along with what has come."""
    arrivals = Arrivals(10)
    arrivals.next()
    assert arrivals.missing() == []
    assert arrivals.exists(12) == [(11, 1)]


def test_a_number_that_cannot_be() -> None:
    arrivals = Arrivals(1)
    assert arrivals.ahead(1 + MOST_PDUS) == MOST_PDUS
    with pytest.raises(RemoteProtocolError, match="expected 1"):
        arrivals.ahead(2 + MOST_PDUS)


def test_the_bounds_of_what_waits() -> None:
    """A target that never sends the lost one does not fill our memory. PDUs whose task has ended
    count no bytes."""
    many = Arrivals(0)
    for at in range(1, MOST_PDUS + 1):
        many.keep(at, pdu(at))
    with pytest.raises(RemoteProtocolError, match="does not come"):
        many.keep(MOST_PDUS + 1, pdu(0))
    large = Arrivals(0)
    half = memoryview(bytes(MOST_BYTES // 2))
    large.keep(1, half)
    large.keep(2, half)
    with pytest.raises(RemoteProtocolError, match="does not come"):
        large.keep(3, half[:1])
    large.forget(1)
    large.keep(3, half)
    large.next()
    assert large.head() == NOTHING
    large.take()
    large.take()
    large.keep(4, half)
    with pytest.raises(RemoteProtocolError, match="does not come"):
        large.keep(5, half[:1])


def test_a_lost_status_is_asked_for_again_but_not_for_ever() -> None:
    arrivals = Arrivals(5)
    arrivals.exists(7)
    for _ in range(MOST_ASKED):
        asked = [arrivals.ask_again() for _ in range(PATIENCE)]
        assert asked == [*[[]] * (PATIENCE - 1), [(5, 2)]]
    for _ in range(PATIENCE - 1):
        assert arrivals.ask_again() == []
    with pytest.raises(RemoteProtocolError, match="does not come"):
        arrivals.ask_again()


def test_the_count_begins_anew_when_one_has_come() -> None:
    arrivals = Arrivals(5)
    arrivals.keep(6, pdu(6))
    arrivals.exists(8)
    for _ in range(MOST_ASKED * PATIENCE):
        arrivals.ask_again()
    arrivals.next()
    arrivals.take()
    for _ in range(PATIENCE - 1):
        assert arrivals.ask_again() == []
    assert arrivals.ask_again() == [(7, 1)]


@pytest.mark.parametrize(
    "come, left",
    [
        (4, [(5, 8), (10, 11)]),
        (5, [(4, 5), (6, 8), (10, 11)]),
        (7, [(4, 7), (10, 11)]),
        (10, [(4, 8)]),
    ],
)
def test_a_gap_is_filled_from_either_end_or_in_the_middle(
    come: int, left: list[tuple[int, int]]
) -> None:
    gaps = Gaps(0, 0, 0)
    gaps.add(10, 11, 0, 100)
    gaps.add(4, 8, 0, 100)
    gaps.asked = gaps.age = 3
    assert gaps.fill(come, 0, 0)
    assert [run[:2] for run in gaps.runs] == left
    assert (gaps.asked, gaps.age) == (0, 0)


def test_the_bytes_of_a_gap_come_once() -> None:
    """Data-In that were lost have the bytes between those that came, in the order of both."""
    gaps = Gaps(0, 0, 0)
    gaps.add(4, 8, 100, 500)
    assert gaps.fill(5, 200, 100)
    assert gaps.runs == [(4, 5, 100, 200), (6, 8, 300, 500)]
    for sn, offset, size in ((4, 150, 100), (4, 50, 100), (6, 250, 100), (7, 450, 100)):
        with pytest.raises(RemoteProtocolError, match="are missing"):
            gaps.fill(sn, offset, size)
    assert gaps.fill(4, 100, 100)
    assert gaps.fill(7, 400, 100)
    assert gaps.runs == [(6, 7, 300, 400)]


@pytest.mark.parametrize("come", [3, 8, 9, 11])
def test_what_was_not_missing_fills_no_gap(come: int) -> None:
    """A duplicate is no progress: the count of questions goes on."""
    gaps = Gaps(0, 0, 0)
    gaps.add(4, 8, 0, 100)
    gaps.add(10, 11, 0, 100)
    gaps.asked = gaps.age = 3
    assert not gaps.fill(come, 0, 0)
    assert gaps.runs == [(4, 8, 0, 100), (10, 11, 0, 100)]
    assert (gaps.asked, gaps.age) == (3, 3)
