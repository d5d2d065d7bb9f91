"""The order of the calls that set a connection up, as a table."""

from __future__ import annotations

import pytest

from iserblk.datamover.allocation import TABLE, Allocation, Event, State
from iserblk.errors import LocalProtocolError


def test_from_nothing_to_full_feature_phase() -> None:
    """proves: ISER-3.1.4-1, ISER-3.1.6-1"""
    allocation = Allocation()
    assert allocation.enter(Event.ALLOCATE) and not allocation.enter(Event.ALLOCATE)
    assert allocation.state.value == "allocated"
    assert allocation.enter(Event.ENABLE) and not allocation.enter(Event.ALLOCATE)
    assert allocation.state.value == "in full feature phase"


@pytest.mark.parametrize("state", list(State))
@pytest.mark.parametrize("event", list(Event))
def test_what_the_table_does_not_have_changes_nothing(state: State, event: Event) -> None:
    allocation = Allocation()
    allocation.state = state
    if (state, event) in TABLE:
        allocation.enter(event)
        assert allocation.state is TABLE[state, event]
    else:
        with pytest.raises(LocalProtocolError, match=f"{state} cannot take: {event}"):
            allocation.enter(event)
        assert allocation.state is state


def test_more_resources_only_where_there_are_some() -> None:
    allocation = Allocation()
    with pytest.raises(LocalProtocolError, match="without resources"):
        allocation.need_resources()
    allocation.enter(Event.ALLOCATE)
    allocation.need_resources()
