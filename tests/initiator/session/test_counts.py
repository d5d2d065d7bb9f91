"""What a session counts."""

from __future__ import annotations

from iserblk.initiator.session.counts import Counts


def test_a_session_that_is_adopted_has_counted_too() -> None:
    """Its losses are those of the session that goes on; how often that was connected again is its
    own."""
    kept, fresh = Counts(), Counts()
    kept.reconnects, kept.replayed, kept.losses.damaged = 1, 5, 2
    fresh.losses.damaged, fresh.losses.snacks = 3, 4
    kept.adopted(fresh, 7)
    assert (kept.reconnects, kept.replayed) == (2, 12)
    assert (kept.losses.damaged, kept.losses.snacks) == (5, 4)
