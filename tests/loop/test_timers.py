"""Timers: their order, and what is kept of those that are cancelled."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iserblk.loop.timers import FEW, Timer, Timers


def test_the_first() -> None:
    timers = Timers()
    assert timers.first == math.inf
    assert not timers
    later = timers.add(2.0, lambda: None)
    sooner = timers.add(1.0, lambda: None)
    assert timers.first == 1.0
    sooner.cancel()
    assert timers.first == 2.0
    later.cancel()
    assert timers.first == math.inf


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=40), st.integers(0, 9))
def test_those_that_are_due_run_in_order(given_: list[tuple[int, bool]], now: int) -> None:
    timers = Timers()
    called: list[int] = []
    made = [
        timers.add(float(when), lambda number=number: called.append(number))  # type: ignore[misc]
        for number, (when, _) in enumerate(given_)
    ]
    for timer, (_, cancelled) in zip(made, given_, strict=True):
        if cancelled:
            timer.cancel()
    left = [(when, number) for number, (when, cancelled) in enumerate(given_) if not cancelled]
    assert len(timers) == len(left)
    timers.run(float(now))
    assert called == [number for when, number in sorted(left) if when <= now]
    assert len(timers) == len(left) - len(called)
    timers.run(9.0)
    assert sorted(called) == sorted(number for _, number in left)
    assert not timers


def test_one_cancels_another_that_is_due() -> None:
    timers = Timers()
    called: list[str] = []
    other: list[Timer] = []

    def first() -> None:
        other[0].cancel()

    timers.add(1.0, first)
    other.append(timers.add(1.0, lambda: called.append("other")))
    timers.add(1.0, lambda: called.append("last"))
    timers.run(1.0)
    assert called == ["last"]
    assert len(timers) == 0
    other[0].cancel()
    assert len(timers) == 0


def test_a_function_that_raises_takes_none_with_it_that_is_not_due() -> None:
    timers = Timers()
    called: list[str] = []
    timers.add(2.0, lambda: called.append("later"))
    timers.add(1.0, lambda: 1 // 0)
    try:
        timers.run(1.5)
    except ZeroDivisionError:
        called.append("raised")
    timers.run(2.0)
    assert called == ["raised", "later"]


def test_those_that_are_cancelled_do_not_pile_up() -> None:
    """Deadlines are set far ahead for each request, and nearly all are cancelled."""
    timers = Timers()
    first, last = (timers.add(when, lambda: None) for when in (1.0, 1e9))
    for number in range(100 * FEW):
        timers.add(1e6 + number, lambda: None).cancel()
        assert timers.kept <= 2 * FEW + 4
    assert len(timers) == 2
    first.cancel()
    assert timers.first == 1e9
    last.cancel()


def test_one_that_raises_keeps_none_from_being_called() -> None:
    """Those of the same time, and those behind it, are called the next time."""
    timers = Timers()
    called: list[str] = []

    def breaks() -> None:
        raise ZeroDivisionError

    timers.add(1.0, lambda: called.append("first"))
    timers.add(1.0, breaks)
    timers.add(1.0, lambda: called.append("second"))
    never = timers.add(2.0, lambda: called.append("never"))
    timers.add(2.0, lambda: called.append("third"))
    with pytest.raises(ZeroDivisionError):
        timers.run(2.0)
    assert called == ["first"] and len(timers) == 3
    never.cancel()
    assert len(timers) == 2 and timers.first == 1.0
    timers.run(2.0)
    assert called == ["first", "second", "third"] and len(timers) == 0
