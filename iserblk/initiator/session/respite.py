"""When a target may be logged in to again, by what it has said and what it agreed to."""

from __future__ import annotations

from iserblk.initiator.session.logout import MOST_WAIT_S
from iserblk.loop.clock import monotonic


class Respite:
    """Belongs to one session. Monotonic seconds.

    ``reconnect_at``: the target wants no login before that, it has said. ``reinstate_at``: what was
    lost without a word must not be logged out before that, explicitly or by a login that reinstates
    the session. ``left_nothing``: the lost connection ended in order, with no task at the target.
    """

    __slots__ = ("left_nothing", "reconnect_at", "reinstate_at")

    def __init__(self) -> None:
        self.reconnect_at = 0.0
        self.reinstate_at = 0.0
        self.left_nothing = False

    def stay_away(self, time2wait: float) -> None:
        """The target wants no login for ``time2wait`` seconds."""
        self.reconnect_at = max(self.reconnect_at, monotonic() + min(time2wait, MOST_WAIT_S))

    def give(self, time2wait: float) -> None:
        """A connection was lost without a word: its target wants ``time2wait`` seconds before what
        was on it is logged out (RFC 7143 sections 7.5, 13.15)."""
        self.reinstate_at = max(self.reinstate_at, monotonic() + min(time2wait, MOST_WAIT_S))
