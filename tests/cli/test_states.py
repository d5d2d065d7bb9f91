"""The states of LUNs, as commands name them."""

from __future__ import annotations

from dataclasses import replace

from iserblk.cli.states import BAD, DEAD, lun_state
from tests.support.watched import lun


def test_states_of_a_lun() -> None:
    several = lun(connections=4, wanted=4)
    assert lun_state(several) == "connected"
    assert lun_state(replace(several, connections=3)) == "degraded"
    assert lun_state(replace(several, connected=False, connections=0)) == "not connected"


def test_what_is_bad() -> None:
    assert set(DEAD) < set(BAD)
    assert "connected" not in BAD and "running" not in BAD and "serving" not in BAD
