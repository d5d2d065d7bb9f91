"""Which signals end a process, and which further signal is one of impatience."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from iserblk.endings import PATIENCE_S, Endings, ending_signals, ignore_further

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Clock:
    """Seconds, as of a machine that has just been started."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in NUMBERS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_closed_terminal_ends_it_too(handlers: None) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    assert ending_signals() == NUMBERS
    assert ending_signals(hangup=False) == NUMBERS[:2]


def test_what_nohup_ignores_stays_ignored(handlers: None) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert ending_signals() == NUMBERS[:2]
    Endings(ending_signals()).listen()
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_a_signal_that_comes_again_at_once_is_the_same_wish() -> None:
    clock = Clock()
    told: list[int] = []
    endings = Endings(NUMBERS, told.append, clock)
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        endings.hear(number)
        assert (endings.first, endings.impatient, told) == (signal.SIGTERM, False, [signal.SIGTERM])
        clock.now += PATIENCE_S / 4


def test_one_of_an_impatient_user_comes_later() -> None:
    """Counted from the first; however many come in between."""
    clock = Clock()
    told: list[int] = []
    endings = Endings(NUMBERS, told.append, clock)
    endings.hear(signal.SIGTERM)
    clock.now = PATIENCE_S - 0.001
    endings.hear(signal.SIGTERM)
    assert not endings.impatient
    clock.now = PATIENCE_S
    endings.hear(signal.SIGINT)
    assert (endings.first, endings.impatient) == (signal.SIGTERM, True)
    clock.now = 9 * PATIENCE_S
    endings.hear(signal.SIGTERM)
    assert told == [signal.SIGTERM, signal.SIGINT]


def test_the_handler_may_raise(handlers: None) -> None:
    """Once; what cleans up behind it is not interrupted by the next signal."""

    def end(_number: int) -> None:
        raise InterruptedError

    endings = Endings([signal.SIGTERM], end, Clock())
    endings.listen()
    with pytest.raises(InterruptedError):
        signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGTERM)
    assert endings.first == signal.SIGTERM


def test_at_the_end_of_the_process(handlers: None) -> None:
    """Python gives handlers back before it has ended, but no signal that is ignored."""
    endings = Endings([signal.SIGTERM, signal.SIGHUP], clock=Clock())
    endings.listen()
    ignore_further()
    assert signal.getsignal(signal.SIGTERM) == endings.hear  # it was not told to end
    signal.raise_signal(signal.SIGTERM)
    ignore_further()
    for number in endings.numbers:
        assert signal.getsignal(number) is signal.SIG_IGN
