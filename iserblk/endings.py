"""The signals that end a process in order, and the further signal by which a user loses patience.

SIGINT and SIGTERM end a process. So does SIGHUP, which says that the terminal is closed, unless it
was ignored when the process began (nohup(1)), or means that files are to be read again.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from types import FrameType

from iserblk.loop.clock import monotonic

# Within this time, in seconds, a further signal is no further wish: timeout(1) sends SIGTERM to its
# child and to the group of its child, a shell and the kernel each send SIGHUP when a terminal is
# closed, systemd may send SIGHUP behind SIGTERM.
PATIENCE_S = 3.0


def ending_signals(*, hangup: bool = True) -> tuple[signal.Signals, ...]:
    """The signals that end this process. ``hangup``: SIGHUP has no other meaning for it. To be
    called before the handler of SIGHUP is changed."""
    usual = (signal.SIGINT, signal.SIGTERM)
    if not hangup or signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return usual
    return (*usual, signal.SIGHUP)


def ignore_further() -> None:
    """At the end of the process: where an ``Endings`` listens to a signal, and has heard one, it
    ignores all of its own from now on."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        heard = getattr(signal.getsignal(number), "__self__", None)
        if isinstance(heard, Endings) and heard.first:
            heard.ignore()


class Endings:
    """The signals that end a process, as they come. ``hear`` is the handler of ``numbers``.

    ``first``: the number of the first signal; 0 while none has come. ``impatient``: another signal
    came ``PATIENCE_S`` or more after the first. ``told`` is called by the handler, in the main
    thread, with the number of a signal that has changed one of both; it may raise. ``clock``:
    seconds that do not go back.
    """

    def __init__(
        self,
        numbers: Sequence[signal.Signals],
        told: Callable[[int], None] = lambda _number: None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.numbers = numbers
        self.first = 0
        self.impatient = False
        self._told = told
        self._clock = clock
        self._first_s = 0.0

    def hear(self, number: int, _frame: FrameType | None = None) -> None:
        now = self._clock()
        if not self.first:
            self.first = number
            self._first_s = now
        elif not self.impatient and now - self._first_s >= PATIENCE_S:
            self.impatient = True
        else:
            return
        self._told(number)

    def ignore(self) -> None:
        """The process is ending: signals do nothing any more, also while Python ends, which gives
        handlers back before that."""
        for number in self.numbers:
            signal.signal(number, signal.SIG_IGN)

    def listen(self) -> None:
        """From now on the signals do nothing but what ``told`` does."""
        for number in self.numbers:
            signal.signal(number, self.hear)
