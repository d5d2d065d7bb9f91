"""Which of several ways is taken, when it is left, and when it is tried again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iserblk.disk.multipath.policy import (
    FAILED_LATELY_S,
    FIRST_ASK_S,
    FIRST_FAIL_BACK_S,
    LAST_ASK_S,
    LAST_FAIL_BACK_S,
    LASTED_S,
    Asking,
    Ways,
)
from iserblk.scsi import alua


def ways(names: str = "abc") -> Ways[str]:
    return Ways([(name, name) for name in names])


def order(of: Ways[str], now: float) -> str:
    return "".join(way.name for way in of.order(now))


def test_the_order_given() -> None:
    assert order(ways(), 0.0) == "abc"
    with pytest.raises(ValueError, match="no ways"):
        Ways([])


def test_what_failed_lately_comes_last() -> None:
    one = ways()
    a, b, _ = one.all
    one.failed(a, "refused", 0.0)
    assert order(one, 1.0) == "bca"
    one.failed(b, "refused", 5.0)
    assert order(one, 6.0) == "cab"
    assert order(one, FAILED_LATELY_S + 1) == "acb"
    assert order(one, FAILED_LATELY_S + 6) == "abc"


def test_none_is_left_out() -> None:
    one = ways()
    for way in one.all:
        one.failed(way, "refused", 0.0)
    assert order(one, 0.0) == "abc"


def test_states_count() -> None:
    """Standby after all that might work, even those that failed; optimized before the other."""
    one = ways("abcd")
    a, b, c, _ = one.all
    one.refused(a, alua.STANDBY, "standby", 0.0)
    one.state_seen(b, alua.ACTIVE_NON_OPTIMIZED)
    one.failed(c, "refused", 0.0)
    assert order(one, 1.0) == "dbca"
    one.failed(a, "refused", 1.0)  # its state is not known any more
    assert order(one, 1.0 + FAILED_LATELY_S) == "acdb"


def test_a_lost_connection() -> None:
    one = ways("ab")
    a, b = one.all
    one.connected(a, 0.0)
    assert one.current is a
    one.failed(a, "reset", 1.0)
    assert one.current is None
    assert order(one, 1.0) == "ba"
    one.connected(b, 1.5)
    assert one.current is b


def next_fail_back(portals: Ways[str]) -> float | None:
    """The earliest time at which ``fail_back`` returns a way."""
    return min(
        (way.again_at for way in portals.all if portals.fail_back(way.again_at) is not None),
        default=None,
    )


def test_failing_back() -> None:
    """Not at once, and with growing pauses while it does not succeed."""
    one = ways("ab")
    a, b = one.all
    one.failed(a, "reset", 0.0)
    one.connected(b, 1.0)
    assert one.fail_back(1.0) is None
    due = next_fail_back(one)
    assert due == 1.0 + FIRST_FAIL_BACK_S
    pauses = []
    for _ in range(8):
        assert due is not None
        assert one.fail_back(due - 0.1) is None
        assert one.fail_back(due) is a
        one.failed(a, "refused", due)
        assert one.current is b
        later = next_fail_back(one)
        assert later is not None
        pauses.append(later - due)
        due = later
    assert pauses == sorted(pauses)
    assert pauses[-1] == LAST_FAIL_BACK_S
    one.connected(a, due)
    assert (one.current, a.failures, a.error) == (a, 0, "")
    assert one.fail_back(due + 1e6) is None
    assert next_fail_back(one) is None


def test_no_flapping() -> None:
    """Each return to a way that works only briefly comes later, until the way has lasted."""
    one = ways("ab")
    a, b = one.all
    now = 0.0
    pauses = []
    for _ in range(4):
        one.connected(a, now)
        one.failed(a, "reset", now + 1)
        one.connected(b, now + 1)
        due = next_fail_back(one)
        assert due is not None
        pauses.append(due - now)
        now = due
        one.left()
        assert one.current is None
        assert b.failures == 0
    assert pauses == sorted(set(pauses))
    one.connected(a, now)
    one.failed(a, "reset", now + LASTED_S)
    one.connected(b, now + LASTED_S)
    assert next_fail_back(one) == now + LASTED_S + FIRST_FAIL_BACK_S


def test_unusable_ways_take_turns() -> None:
    one = ways("ab")
    tried = ""
    for now in range(4):
        way = one.order(now)[0]
        tried += way.name
        one.refused(way, alua.STANDBY, "standby", float(now))
    assert tried == "abab"


def test_nobody_fails_forward() -> None:
    one = ways("ab")
    one.connected(one.all[0], 0.0)
    assert one.fail_back(1e6) is None


def test_a_state_that_is_better_is_gone_back_to() -> None:
    """An array moved the LUN: the first way is non-optimized now, the second optimized."""
    one = ways("ab")
    a, b = one.all
    one.connected(a, 0.0, alua.ACTIVE_NON_OPTIMIZED)
    one.state_seen(b, alua.ACTIVE_OPTIMIZED)
    assert one.fail_back(FIRST_FAIL_BACK_S) is b
    one.connected(b, FIRST_FAIL_BACK_S, alua.ACTIVE_OPTIMIZED)
    assert one.fail_back(1e6) is None  # not back to what is worse, preferred or not


def test_leaving_a_port_in_standby() -> None:
    one = ways("ab")
    a, b = one.all
    one.connected(a, 0.0, alua.ACTIVE_OPTIMIZED)
    assert not one.must_leave
    one.state_seen(a, alua.STANDBY)
    assert one.must_leave
    one.refused(a, alua.STANDBY, "standby", 1.0)
    assert one.current is None
    assert order(one, 1.0) == "ba"
    one.connected(b, 1.0)
    alone = ways("a")
    alone.connected(alone.all[0], 0.0, alua.STANDBY)
    assert not alone.must_leave


def test_the_last_resort() -> None:
    """All others are of no use: one failure is not enough for that, and an unknown state is not."""
    one = ways("abc")
    a, b, c = one.all
    assert not one.is_last_resort(a)
    one.refused(b, alua.STANDBY, "standby", 0.0)
    one.failed(c, "reset", 0.0)
    assert not one.is_last_resort(a)
    one.failed(c, "refused", 1.0)
    assert one.is_last_resort(a)
    one.failed(b, "refused", 1.0)  # its state is not known any more
    assert one.is_last_resort(a)
    one.connected(b, 2.0, alua.ACTIVE_OPTIMIZED)
    assert not one.is_last_resort(a)


def test_asking_becomes_rarer() -> None:
    one = Asking()
    now, waits = 1000.0, []
    for _ in range(8):
        assert one.may_ask(now)
        one.asked(now)
        begun = now
        while not one.may_ask(now):
            now += 1.0
        waits.append(now - begun)
    assert waits == [300, 600, 1200, 2400, 3600, 3600, 3600, 3600]
    now += LAST_ASK_S  # a long time in which nothing was to be asked for
    one.asked(now)
    assert one.may_ask(now + FIRST_ASK_S)


@pytest.mark.parametrize("state", [*alua.STATE_WORDS, None])
def test_usable_states_are_those_of_alua(state: int | None) -> None:
    one = ways("a")
    one.all[0].state = state
    assert one.all[0].usable == (state is None or state in alua.USABLE)


def test_description() -> None:
    one = ways("ab")
    one.failed(one.all[0], "refused", 0.0)
    one.connected(one.all[1], 0.0, alua.ACTIVE_OPTIMIZED)
    first, second = one.describe()
    assert (first["in_use"], first["failures"], first["error"]) == (False, 1, "refused")
    assert (second["in_use"], second["state"], second["portal"]) == (
        True,
        "active/optimized",
        "b",
    )


EVENTS = st.tuples(
    st.sampled_from(["connected", "failed", "refused", "state_seen"]),
    st.integers(0, 2),
    st.sampled_from([*alua.STATE_WORDS]),
    st.floats(0, 100),
)


@given(st.lists(EVENTS, max_size=30))
def test_whatever_happens(events: list[tuple[str, int, int, float]]) -> None:
    """All ways stay in the order, and nothing that failed or was refused is in use."""
    one, now = ways(), 0.0
    for event, index, state, passed in events:
        now += passed
        way = one.all[index]
        if event == "connected":
            one.connected(way, now, state)
        elif event == "failed":
            one.failed(way, "", now)
        elif event == "refused":
            one.refused(way, state, "", now)
        else:
            one.state_seen(way, state)
        assert sorted(order(one, now)) == ["a", "b", "c"]
        if event in ("failed", "refused"):
            assert one.current is not way
        better = one.fail_back(now)
        assert better is None or (one.current is not None and better is not one.current)
