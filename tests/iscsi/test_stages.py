"""The tables of both ends of a login."""

from __future__ import annotations

import pytest

from iserblk.errors import LoginError, RemoteProtocolError
from iserblk.iscsi import pdu
from iserblk.iscsi.stages import CODES, INITIATOR, TARGET, Event, Stages, State, Table
from tests.iscsi.logins import initiator, login, request, target


@pytest.mark.parametrize("table", [INITIATOR, TARGET])
def test_every_state_is_reached_and_leads_to_an_end(table: Table) -> None:
    left = {state for state, _ in table}
    reached = {State.START, *table.values()}
    assert left <= reached
    # A target without resources may still refuse what it was about to conclude.
    withdrawn = {State.FULL_FEATURE} & left
    assert withdrawn == ({State.FULL_FEATURE} if table is TARGET else set())
    assert [event for state, event in table if state in withdrawn] == [Event.REFUSE] * len(
        withdrawn
    )
    assert (reached - left) | withdrawn == {State.FULL_FEATURE, State.FAILED}
    assert all((state, Event.REFUSE) in table for state in left - {State.START})


@pytest.mark.parametrize("table", [INITIATOR, TARGET])
def test_stages_only_rise(table: Table) -> None:
    """Stages only rise (section 6.3), unless an initiator that skipped security is sent back."""
    for (state, event), after in table.items():
        if state in CODES and after in CODES and event is not Event.SEND_BACK:
            assert CODES[state] < CODES[after]


@pytest.mark.parametrize("table", [INITIATOR, TARGET])
@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("event", Event)
def test_what_the_table_does_not_have_changes_nothing(
    table: Table, state: State, event: Event
) -> None:
    stages = Stages(table)
    stages.state = state
    after = table.get((state, event))
    if after is None:
        with pytest.raises(RemoteProtocolError, match=f"login stage {state}: {event}"):
            stages.enter(event)
        assert stages.state is state
    else:
        stages.enter(event)
        assert stages.state is after


def test_nothing_follows_the_end() -> None:
    one, other = initiator(), target()
    login(one, other)
    with pytest.raises(RemoteProtocolError, match="after the end of the login"):
        other.receive(*request([]))
    answer = target().receive(*request([("InitiatorName", "iqn.2026-11.example:host")]))
    with pytest.raises(RemoteProtocolError, match="after the end of the login"):
        one.receive(*answer[0])


def test_a_refusal_is_the_end_of_both() -> None:
    one, other = initiator(target_name="iqn.2026-11.example:another"), target()
    (answer,) = other.receive(*one.start())
    with pytest.raises(LoginError):
        one.receive(*answer)
    assert other.failed and not other.done and not one.done
    with pytest.raises(RemoteProtocolError, match="after the end of the login"):
        other.receive(*request([], stage=pdu.SECURITY_STAGE))
