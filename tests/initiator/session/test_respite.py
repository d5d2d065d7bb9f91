"""When a target may be logged in to again."""

from __future__ import annotations

import pytest

from iserblk.initiator.session.logout import MOST_WAIT_S
from iserblk.initiator.session.respite import Respite
from iserblk.loop.clock import monotonic


def test_the_longer_time_counts() -> None:
    """What is over already is not waited for again."""
    respite = Respite()
    respite.give(9)
    respite.stay_away(8)
    before = respite.reinstate_at, respite.reconnect_at
    respite.give(2)
    respite.stay_away(1)
    assert (respite.reinstate_at, respite.reconnect_at) == before


@pytest.mark.parametrize("wish", [0.0, 3.0, 3600.0])
def test_each_wish_has_its_time(wish: float) -> None:
    """Of a wish that is longer than commands may wait, the beginning is obeyed."""
    before, respite = monotonic(), Respite()
    respite.give(wish)
    assert before <= respite.reinstate_at - min(wish, MOST_WAIT_S) <= monotonic()
    assert not respite.reconnect_at
    respite.stay_away(wish)
    assert before <= respite.reconnect_at - min(wish, MOST_WAIT_S) <= monotonic()
