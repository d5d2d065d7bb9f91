"""What an initiator owes: for how long it is awaited."""

from __future__ import annotations

from iserblk.target.iscsi.owing import LONGEST_S, PATIENCE_S, SLOWEST, Owed

ONE, TWO, THREE = object(), object(), object()


def test_what_does_not_come_has_its_time() -> None:
    owed = Owed()
    assert not owed.overdue([ONE], 0, 5.0)
    assert not owed.overdue([ONE], 0, 5.0 + PATIENCE_S)
    assert owed.overdue([ONE], 0, 6.0 + PATIENCE_S)
    assert not owed.overdue([], 0, 7.0 + PATIENCE_S)
    assert not owed.overdue([ONE], 0, 8.0 + PATIENCE_S)  # it is awaited anew


def test_what_is_large_has_more_time() -> None:
    owed = Owed()
    owed.overdue([ONE], 100 * SLOWEST, 0.0)
    assert not owed.overdue([ONE], 100 * SLOWEST, PATIENCE_S + 100)
    assert owed.overdue([ONE], 100 * SLOWEST, PATIENCE_S + 101)


def test_as_long_as_any_comes_more_may_come() -> None:
    owed = Owed()
    owed.overdue([ONE, TWO, THREE], 0, 0.0)
    assert not owed.overdue([ONE, THREE], 0, PATIENCE_S + 1)
    assert not owed.overdue([ONE, THREE], 0, 2 * PATIENCE_S + 1)
    assert owed.overdue([ONE, THREE], 0, 2 * PATIENCE_S + 2)


def test_in_order_only_the_oldest_shows_that_more_may_come() -> None:
    owed = Owed(in_order=True)
    owed.overdue([ONE, TWO, THREE], 0, 0.0)
    assert not owed.overdue([ONE, THREE], 0, PATIENCE_S)
    assert owed.overdue([ONE], 0, PATIENCE_S + 1)
    owed = Owed(in_order=True)
    owed.overdue([ONE, TWO], 0, 0.0)
    assert not owed.overdue([TWO], 0, PATIENCE_S)
    assert not owed.overdue([TWO], 0, 2 * PATIENCE_S)
    assert owed.overdue([TWO], 0, 2 * PATIENCE_S + 1)


def test_whatever_comes_all_of_it_has_an_end() -> None:
    """One that is always behind others."""
    owed = Owed()
    now = 0.0
    held = object()
    others = [object() for _ in range(100)]
    while others:
        if owed.overdue([*others, held], 0, now):
            break
        others.pop(0)
        now += PATIENCE_S / 2
    assert others and LONGEST_S < now <= LONGEST_S + PATIENCE_S


def test_new_ones_begin_a_time_of_their_own() -> None:
    """A peer that always has something under way, and moves it."""
    owed = Owed()
    things: list[object] = [object()]
    for look in range(100):
        assert not owed.overdue(things, 0, look * PATIENCE_S / 2)
        things = [*things, object()][-2:]
