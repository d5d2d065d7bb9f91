"""The target asks for the logout of one connection of several."""

from __future__ import annotations

import pytest

from iserblk.commands.command import QUEUED
from iserblk.initiator.session.life import State
from iserblk.initiator.session.logout import ANSWER_S
from iserblk.iscsi import bhs, pdu
from tests.initiator.fake import response
from tests.initiator.several import MOST, Bench, announced, logout_of, patient
from tests.support import logs

pytestmark = pytest.mark.logs(logs.ONE_OF_SEVERAL, logs.RECONNECTED, logs.ASYNC_MESSAGE)


def asked(bench: Bench, cid: int, seconds: int = 5) -> None:
    """The target asks for the logout of connection ``cid``."""
    bench.receive(cid, announced(pdu.ASYNC_LOGOUT_REQUEST, parameter3=seconds))


# shows: SYSTEM-43
def test_only_the_connection_that_the_target_names_is_logged_out(two: Bench) -> None:
    """When its commands have ended; new ones go by the other, and the session goes on (RFC 7143
    section 11.9.1)."""
    two.reconnectable()
    slots = [two.submit() for _ in range(2)]
    before = len(two.dms[0].sent)
    asked(two, 0)
    assert len(two.dms[0].sent) == before
    slots += [two.submit() for _ in range(3)]
    assert [slot.connection.cid for slot in slots] == [0, 1, 1, 1, 1]
    two.receive(0, response(slots[0].itt, max_cmd_sn=MOST))
    request = pdu.LogoutRequest.unpack_from(logout_of(two.dms[0]))
    assert (request.reason, request.cid) == (pdu.LOGOUT_CLOSE_CONNECTION, 0)
    assert len(two.dms[0].sent) == before + 1 and not two.dms[0].terminated
    two.logged_out(0, logout_of(two.dms[0]), exp_cmd_sn=6)
    assert two.dms[0].terminated and not two.dms[1].terminated
    assert two.session.life.state is State.LOGGED_IN
    assert two.calls == 1 and two.session.missing == 1 and two.session.free_cid() == 0
    assert two.dms[1].opcodes() == [bhs.SCSI_COMMAND] * 4
    for slot in slots[1:]:
        two.receive(1, response(slot.itt, max_cmd_sn=MOST))
    assert not two.waiter.pending and all(slot.error is None for slot in slots)


def test_commands_that_take_too_long_for_that_go_over(two: Bench) -> None:
    """The logout ends them at the target."""
    slots = [two.submit() for _ in range(4)]
    asked(two, 0, 0)
    two.progress(1)
    two.logged_out(0, logout_of(two.dms[0]), exp_cmd_sn=3)
    assert two.dms[0].terminated and two.session.life.state is State.LOGGED_IN
    assert [slot.connection.cid for slot in slots] == [1] * 4
    assert [slot.cmd_sn for slot in slots] == [5, 2, 3, 4]
    assert (two.session.counts.recovered, two.session.counts.replayed) == (1, 2)


@pytest.mark.parametrize("code", [pdu.LOGOUT_CID_NOT_FOUND, pdu.LOGOUT_CLEANUP_FAILED, None])
def test_a_logout_that_is_refused_or_not_answered_cuts_the_connection(
    two: Bench, code: int | None
) -> None:
    """Then it is recovered from as from any that is lost."""
    two.submit()
    asked(two, 0, 0)
    two.progress(1)
    if code is None:
        two.progress(ANSWER_S)
    else:
        two.logged_out(0, logout_of(two.dms[0]), code)
    assert two.dms[0].disconnected and not two.dms[0].terminated
    two.lose(0)
    patient(two)
    assert two.dms[1].opcodes() == [bhs.LOGOUT_REQUEST]


def test_the_session_is_logged_out_when_none_would_be_left(two: Bench) -> None:
    two.reconnectable()
    asked(two, 0, 5)
    slot = two.submit()
    asked(two, 1, 5)
    assert two.session.life.state is State.LOGGING_OUT
    assert two.submit().state == QUEUED
    two.receive(1, response(slot.itt, max_cmd_sn=MOST))
    reasons = [pdu.LogoutRequest.unpack_from(logout_of(dm)).reason for dm in two.dms]
    assert sorted(reasons) == [pdu.LOGOUT_CLOSE_SESSION, pdu.LOGOUT_CLOSE_CONNECTION]


def test_the_session_is_logged_out_when_the_others_are_lost(two: Bench) -> None:
    two.reconnectable()
    two.submit()
    asked(two, 0, 5)
    two.lose(1)
    assert two.session.life.state is State.LOGGING_OUT


def test_a_connection_may_take_the_place_of_one_that_leaves(two: Bench) -> None:
    """Which is lost, then."""
    two.reconnectable()
    slot = two.submit()
    asked(two, 0, 5)
    two.add(2)
    two.lose(1)
    assert two.session.life.state is State.LOGGED_IN
    assert two.submit().connection.cid == 2 and slot.connection.cid == 0


def test_the_times_of_a_drop_are_kept(level2: Bench) -> None:
    """Not those of the login (RFC 7143 section 7.5.2)."""
    level2.submit()
    level2.receive(1, announced(pdu.ASYNC_CONNECTION_DROP, parameter1=0, parameter2=3))
    assert level2.dms[0].disconnected
    level2.lose(0)
    level2.progress(2.9)
    assert not level2.dms[1].sent
    level2.progress(0.1)
    assert level2.dms[1].opcodes() == [bhs.LOGOUT_REQUEST]
