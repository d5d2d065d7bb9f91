"""The table of a session's life, and its one writer."""

from __future__ import annotations

import pytest

from iserblk.errors import ConnectionLost, LocalProtocolError
from iserblk.initiator.session.life import TABLE, Event, Life, State


def _at(*events: Event) -> Life:
    life = Life("a portal")
    for event in events:
        life.enter(event, ConnectionLost(f"by {event}"))
    return life


def _all_of(life: Life) -> list[object]:
    return [
        getattr(life, name)
        for name in ("state", "connected", "leaving", "over", "spent", "error", "absence")
    ]


def test_every_state_but_the_last_may_fail() -> None:
    for state in State:
        if state is State.ENDED:
            assert not [event for other, event in TABLE if other is state]
        else:
            assert TABLE[state, Event.FAIL] is State.ENDED


def test_a_connection_is_lost_and_replaced() -> None:
    life = _at(Event.LOGIN)
    assert life.connected and not life.absent
    life.enter(Event.LOSS, ConnectionLost("the cable"))
    assert life.absent and not life.connected and str(life.absence) == "the cable"
    life.enter(Event.CLEAN)
    assert life.absent and life.state is State.SUSPENDED
    life.enter(Event.ADOPT)
    assert life.connected and life.error is None


def test_another_thread_may_ask_for_the_absence_while_an_older_one_dies() -> None:
    """An error may be the last to refer to the memory of an attempt, and other threads run while
    that is unmapped. This memory asks itself."""
    life = _at(Event.LOGIN)
    seen: list[str] = []

    class Memory(bytearray):
        def __del__(self) -> None:
            seen.append(str(life.absence))

    life.enter(Event.LOSS, ConnectionLost(Memory(1)))
    life.still_absent(ConnectionLost("later"))
    assert seen == ["later"]


def test_what_ended_a_connection_is_over_with_it() -> None:
    """The next one may be lost for another reason. What only a fresh session mends stays until
    there is one."""
    life = _at(Event.LOGIN)
    life.leaving = life.over = life.spent = True
    life.enter(Event.LOSS, ConnectionLost("the cable"))
    assert life.leaving and life.over
    life.enter(Event.CLEAN)
    assert (life.leaving, life.over, life.spent) == (False, False, True)


def test_who_leaves_is_connected_still() -> None:
    assert _at(Event.LOGIN, Event.LOG_OUT).connected


def test_an_end_keeps_its_first_reason() -> None:
    life = _at(Event.LOGIN, Event.FAIL)
    with pytest.raises(LocalProtocolError, match="a session that is ended cannot take: fail"):
        life.enter(Event.FAIL, ConnectionLost("later"))
    assert str(life.error) == "by fail" and not life.connected and not life.absent


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("event", Event)
def test_what_the_table_does_not_have_changes_nothing(state: State, event: Event) -> None:
    life = Life("a portal")
    life.state = state
    life.leaving = life.over = True
    before = _all_of(life)
    after = TABLE.get((state, event))
    if after is None:
        with pytest.raises(LocalProtocolError, match=f"that is {state} cannot take: {event}"):
            life.enter(event, ConnectionLost("the cable"))
        assert _all_of(life) == before
    else:
        life.enter(event, ConnectionLost("the cable"))
        assert life.state is after
