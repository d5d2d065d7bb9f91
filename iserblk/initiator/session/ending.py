"""When a session stops waiting for a target that is away, because the end of its use was asked for.

A request waits for ``io-timeout``, which may be a day, or have no limit. A process that is told to
end, a device that is being detached, and a shutdown of the machine do not wait for as long: when
the target has been away for AWAY_S since the end was asked for, all that waits for it fails, and so
does at once what is submitted later, until there is a connection again. A target that answers is
not away: what it is slow with keeps its own deadline. Where that is for ever, a target that is
there, and forgets commands, would keep the end up: ANSWERS_S after the end was asked for, a command
that is left unanswered is not sent again.
"""

from __future__ import annotations

from typing import Final

AWAY_S: Final = 45.0
"""How long the target may be away, from the moment at which the end was asked for."""

ANSWERS_S: Final = 180.0
"""How long commands that a target leaves unanswered are sent again, from the moment at which the
end was asked for. A last flush may need minutes; a process waits for longer (``LONGEST_S`` of
``iserblk.disk.ending``)."""

RESUMING_S: Final = 5.0
"""How long what waits goes on to wait behind that, each time that the target is heard on a fresh
connection, on which unflushed writes are being sent again."""


class Ending:
    """Belongs to one session. ``asked``: since when its end is wanted (monotonic seconds); 0: it is
    not wanted."""

    __slots__ = ("_heard", "_resuming_until", "asked")

    def __init__(self) -> None:
        self.asked = 0.0
        self._heard = 0.0
        self._resuming_until = 0.0

    def ask(self, now: float) -> None:
        """The end is wanted. The time counts from the first call on."""
        if not self.asked:
            self.asked = now

    def withdraw(self) -> None:
        """It is not wanted any more: requests wait as long as they may."""
        self.asked = 0.0

    def resuming(self, now: float) -> None:
        """The target was heard on a connection that is about to take the place of the lost one."""
        self._resuming_until = now + RESUMING_S

    def look(self, now: float, absent: bool, heard: float) -> bool:
        """Whether nothing is to wait any longer. ``absent``: there is no connection. ``heard``:
        when the target was heard last, where there is one."""
        if not absent:
            self._heard = heard
            return False
        asked = self.asked
        if not asked:
            return False
        return now >= max(asked, self._heard) + AWAY_S and now >= self._resuming_until

    def overdue(self, now: float) -> bool:
        """Whether a command that the target leaves unanswered is the end of its request."""
        return self.asked > 0 and now >= self.asked + ANSWERS_S

    def stalled(self, seconds: float) -> None:
        """See Session."""
        if self.asked:
            self.asked += seconds
