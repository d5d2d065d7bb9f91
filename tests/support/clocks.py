"""A clock that a test moves.

The session and its deadlines get the time as an argument, and in some places read it themselves. A
test that makes up the one must make up the other, too: how far a made-up time is from the real one
depends on how long ago the machine was started.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import pytest

from iserblk.loop import clock

START = 1.0  # a machine that has just been started: 0.0 is no time long ago


class Clock:
    """Monotonic seconds, which only the test changes. ``now``: what it shows. ``given``: the one
    that the test has."""

    given: ClassVar[Clock | None] = None

    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> float:
        return self.now


def give(monkeypatch: pytest.MonkeyPatch, source: Callable[[], float]) -> None:
    """iserblk reads ``source`` instead of the machine's monotonic clock."""
    monkeypatch.setattr(clock.sources, "monotonic", source)
    if isinstance(source, Clock):
        monkeypatch.setattr(Clock, "given", source)


def given() -> Clock:
    """The clock of the fixture ``clock``, for what is made in a test that uses it."""
    assert Clock.given is not None, "the test has no made-up clock: let it use the fixture `clock`"
    return Clock.given
