"""The last connection of a session at ErrorRecoveryLevel 2 is lost, and reinstated; or not."""

from __future__ import annotations

from typing import Any

import pytest

from iserblk.commands.command import QUEUED, SENT
from iserblk.errors import CommandTimeout, ConnectionLost
from iserblk.initiator.session.connection import Connection
from iserblk.initiator.session.deadlines import Ladder
from iserblk.initiator.session.life import State
from iserblk.initiator.session.logout import ANSWER_S
from iserblk.initiator.session.recovery import PATIENCE_S, STEP_S
from iserblk.initiator.session.session import Session
from iserblk.iscsi import bhs, pdu
from iserblk.scsi.tasks import BIDIRECTIONAL, READ, WRITE
from tests.initiator.fake import cmd_sn_of, itt_of, response
from tests.initiator.several import MOST, Bench, Polled
from tests.support import logs

pytestmark = pytest.mark.logs(
    logs.ONE_OF_SEVERAL, logs.RECONNECTED, logs.DEADLINES, logs.ASYNC_MESSAGE
)


async def _more(_session: Session) -> Connection:
    raise AssertionError("these tests have no reconnector")


def made(benches: list[Bench], count: int = 1, **parameters: Any) -> Bench:
    parameters = {"error_recovery_level": 2, "default_time2wait": 0, **parameters}
    bench = Bench(count, **parameters)
    benches.append(bench)
    bench.reconnectable()
    bench.session.more = _more
    return bench


@pytest.fixture
def one(benches: list[Bench]) -> Bench:
    return made(benches)


def state(bench: Bench) -> State:
    return bench.session.life.state


def told(bench: Bench, exp_cmd_sn: int, cid: int = 0, at: int = -1) -> list[bytes]:
    """Answer the ping that was sent on connection ``cid`` as number ``at``; returns what is sent
    then."""
    dm = bench.dms[cid]
    slot, ping = dm.sent[at]
    assert ping[0] == bhs.NOP_OUT | bhs.IMMEDIATE
    before = len(dm.sent)
    bench.receive(
        cid,
        pdu.NopIn(
            lun=bytes(8),
            itt=itt_of((slot, ping)),
            ttt=bhs.NO_TAG,
            stat_sn=100,
            exp_cmd_sn=exp_cmd_sn,
            max_cmd_sn=MOST,
        ),
    )
    return [sent for _, sent in dm.sent[before:]]


def opcodes(sent: list[bytes]) -> list[int]:
    return [each[0] & bhs.OPCODE_MASK for each in sent]


# shows: SYSTEM-41
def test_the_only_connection_is_reinstated(one: Bench) -> None:
    """What the target has acknowledged is reassigned, the rest is sent again as it was, and both
    only when a ping behind the login has shown which is which.

    proves: ISER-5.2.3.2-5, ISER-7.3.3-9, ISER-10.2.2-1
    """
    session = one.session
    read, write = one.submit(READ), one.submit(WRITE)
    tags = read.itt, write.itt
    old = one.dms[0]
    one.lose(0)
    assert old.terminated and state(one) is State.REINSTATING
    assert session.suspended is not None and one.calls == 1 and session.free_cid() == 0
    assert (read.state, write.state) == (SENT, SENT) and session.queue.take_control() is None
    later = one.submit()
    assert later.state == QUEUED and one.calls == 2
    dm = one.add(0)
    assert state(one) is State.LOGGED_IN and session.queue.connection.datamover is dm
    assert opcodes([sent for _, sent in dm.sent]) == [bhs.NOP_OUT, bhs.SCSI_COMMAND]
    assert cmd_sn_of(dm.sent[1]) == 3 and dm.sent[1][0] is later
    again, reassign = told(one, 2, at=0)
    assert opcodes([again, reassign]) == [bhs.SCSI_COMMAND, bhs.TASK_MANAGEMENT_REQUEST]
    assert (cmd_sn_of((write, again)), itt_of((write, again))) == (2, tags[1])
    request = pdu.TaskManagementRequest.unpack_from(reassign)
    assert (request.function, request.referenced_task_tag) == (pdu.TMF_TASK_REASSIGN, tags[0])
    assert dm.reassigned == [read]
    one.answered(0, reassign, pdu.TMF_COMPLETE)
    for slot in (read, write, later):
        one.receive(0, response(slot.itt, max_cmd_sn=MOST))
        assert slot.error is None
    assert not one.waiter.pending
    counts = session.counts
    assert (counts.recovered, counts.reassigned, counts.replayed) == (1, 1, 1)
    assert counts.reconnects == 0 and one.driver.changes == 1


def test_the_last_of_several_is_reinstated(benches: list[Bench]) -> None:
    """Its login logs out no other: these get Logout Requests, and no number is left out."""
    bench = made(benches, 3)
    slots = [bench.submit() for _ in range(3)]
    for dm in bench.dms:
        dm.inbox.append(ConnectionLost("gone"))
    bench.progress()
    assert state(bench) is State.REINSTATING and bench.session.free_cid() == 2
    dm = bench.add(2)
    asked = [each for _, each in dm.sent]
    assert opcodes(asked) == [bhs.LOGOUT_REQUEST, bhs.LOGOUT_REQUEST, bhs.NOP_OUT]
    cids = [pdu.LogoutRequest.unpack_from(each).cid for each in asked[:2]]
    assert cids == [0, 1]
    sent = told(bench, 4, 2)
    for request in asked[:2]:
        before = len(dm.sent)
        bench.logged_out(2, request, exp_cmd_sn=4)
        sent += [each for _, each in dm.sent[before:]]
    tags = {pdu.TaskManagementRequest.unpack_from(each).referenced_task_tag for each in sent}
    assert tags == {slot.itt for slot in slots}
    for each in sent:
        bench.answered(2, each, pdu.TMF_COMPLETE)
    assert (bench.session.counts.recovered, bench.session.counts.reassigned) == (3, 3)
    assert bench.session.missing == 2


def test_a_connection_that_has_just_joined_is_not_the_last(benches: list[Bench]) -> None:
    """It was offered, and not taken in yet: the other one is logged out on it."""
    bench = made(benches, 2)
    bench.lose(1)
    bench.submit()
    joined = Polled()
    memory = bench.memory_for(joined)
    connection = Connection(joined, memory, bench.session.parameters, "portal:3260", 5)
    bench.dms[0].inbox.append(ConnectionLost("gone"))
    progress = bench.dms[0].progress

    def meanwhile(now: float) -> int:
        bench.session.offer_connection(connection)
        return progress(now)

    bench.dms[0].progress = meanwhile  # type: ignore[method-assign]
    bench.progress()
    assert state(bench) is State.LOGGED_IN and bench.session.count == 1
    assert bench.session.queue.connection is connection
    assert joined.opcodes() == [bhs.LOGOUT_REQUEST] * 2


def test_lost_again_before_the_target_has_told(one: Bench) -> None:
    """The tasks of both connections go over to the third, and none is asked for twice."""
    slots = [one.submit()]
    one.lose(0)
    one.add(0)
    slots.append(one.submit())
    one.lose(0)
    assert state(one) is State.REINSTATING and one.session.free_cid() == 0
    dm = one.add(0)
    assert dm.opcodes() == [bhs.NOP_OUT, bhs.NOP_OUT]  # one for each of them
    sent = told(one, 3, at=0) + told(one, 3, at=1)
    tags = [pdu.TaskManagementRequest.unpack_from(each).referenced_task_tag for each in sent]
    assert sorted(tags) == sorted(slot.itt for slot in slots)
    for each in sent:
        one.answered(0, each, pdu.TMF_COMPLETE)
    assert one.session.counts.recovered == 2 and state(one) is State.LOGGED_IN


def test_lost_again_while_tasks_are_reassigned(one: Bench) -> None:
    slot = one.submit()
    one.lose(0)
    one.add(0)
    (first,) = told(one, 2)
    assert opcodes([first]) == [bhs.TASK_MANAGEMENT_REQUEST]
    one.lose(0)
    one.add(0)
    (second,) = told(one, 2)
    assert pdu.TaskManagementRequest.unpack_from(second).referenced_task_tag == slot.itt
    one.answered(0, second, pdu.TMF_COMPLETE)
    one.receive(0, response(slot.itt, max_cmd_sn=MOST))
    assert slot.error is None and not one.waiter.pending and one.session.counts.recovered == 2


def test_lost_again_before_the_ping_is_answered(one: Bench) -> None:
    """The ping behind the second login has as much time as the first."""
    slot = one.submit()
    one.lose(0)
    one.add(0)
    one.progress(ANSWER_S - 1)
    one.lose(0)
    one.add(0)
    one.progress(ANSWER_S - 1)
    assert state(one) is State.LOGGED_IN
    pings = len(one.dms[0].sent)  # for each of the two that were lost
    sent = [each for at in range(pings) for each in told(one, 2, at=at)]
    (reassign,) = sent
    assert pdu.TaskManagementRequest.unpack_from(reassign).referenced_task_tag == slot.itt
    one.answered(0, reassign, pdu.TMF_COMPLETE)
    one.receive(0, response(slot.itt, max_cmd_sn=MOST))
    assert slot.error is None and one.session.counts.recovered == 2


def test_a_bidirectional_command_is_reassigned(one: Bench) -> None:
    slot = one.submit(BIDIRECTIONAL)
    one.lose(0)
    one.add(0)
    (sent,) = told(one, 2)
    assert opcodes([sent]) == [bhs.TASK_MANAGEMENT_REQUEST] and slot.error is None


# -- the rung below: session reinstatement --------------------------------------------------------


@pytest.mark.parametrize(
    "parameters",
    [
        {"error_recovery_level": 1},
        {"default_time2retain": 0},
        {"default_time2wait": int(PATIENCE_S) + 1},
    ],
    ids=lambda parameters: next(iter(parameters)),
)
def test_what_login_did_not_agree_on(benches: list[Bench], parameters: dict[str, int]) -> None:
    bench = made(benches, **parameters)
    slot = bench.submit()
    bench.lose(0)
    assert state(bench) is State.SUSPENDED and slot.state == QUEUED


def test_a_session_that_is_to_be_left_is_not_kept(one: Bench) -> None:
    """``disconnect``: a LUN has lost its cache, a port refuses commands, an abort is not
    answered, … All that needs a fresh session."""
    slot = one.submit()
    one.session.disconnect()
    one.lose(0)
    assert state(one) is State.SUSPENDED and slot.state == QUEUED


def test_the_next_session_may_be_kept_again(one: Bench) -> None:
    one.session.disconnect()
    one.lose(0)
    fresh = Bench(1, error_recovery_level=2, default_time2wait=0)
    fresh.session.more = _more
    one.session.offer(fresh.session)
    one.progress()
    assert state(one) is State.LOGGED_IN
    one.dms[0] = fresh.dms[0]
    one.lose(0)
    assert state(one) is State.REINSTATING


def test_a_fresh_session_that_was_to_be_left_is_not_kept(one: Bench) -> None:
    one.session.disconnect()
    one.lose(0)
    fresh = Bench(1, error_recovery_level=2, default_time2wait=0)
    fresh.session.more = _more
    fresh.session.disconnect()
    one.session.offer(fresh.session)
    one.progress()
    one.dms[0] = fresh.dms[0]
    one.lose(0)
    assert state(one) is State.SUSPENDED


def test_a_session_that_leaves_is_not_kept(one: Bench) -> None:
    one.submit()
    assert one.session.log_out("elsewhere", 1.0)
    one.lose(0)
    assert state(one) is State.SUSPENDED


def test_without_a_reconnector_the_session_ends(one: Bench) -> None:
    slot = one.submit()
    one.driver.reconnect = None
    one.lose(0)
    assert isinstance(one.session.error, ConnectionLost) and slot.error is not None


def test_a_command_that_is_being_aborted_ends_first(one: Bench) -> None:
    """The login that would keep it at the target is no end for it."""
    late, other = one.submit(), one.submit()
    late.deadline = one.now - 1
    Ladder(one.session).tick(one.now)
    one.lose(0)
    assert state(one) is State.SUSPENDED
    assert isinstance(late.error, CommandTimeout) and other.state == QUEUED


def test_a_deadline_ends_the_reinstatement(one: Bench) -> None:
    """A command does not wait longer than it would for a fresh session."""
    late, other = one.submit(), one.submit()
    one.lose(0)
    late.deadline = one.now + 2
    ladder = Ladder(one.session)
    ladder.tick(one.now + 1)
    assert state(one) is State.REINSTATING
    ladder.tick(one.now + 2)
    assert state(one) is State.SUSPENDED and (late.state, other.state) == (QUEUED, QUEUED)
    one.session.suspended_at = one.now
    ladder.tick(one.now + 3)
    assert isinstance(late.error, CommandTimeout) and other.state == QUEUED


def test_a_command_is_cancelled(one: Bench) -> None:
    """Its buffer is free at once."""
    slot, other = one.submit(WRITE), one.submit()
    one.lose(0)
    waiting = one.submit()
    ladder = Ladder(one.session)
    ladder.cancel(waiting, one.now)
    assert waiting.error is not None and state(one) is State.REINSTATING
    ladder.cancel(slot, one.now)
    assert isinstance(slot.error, CommandTimeout) and other.state == QUEUED
    assert state(one) is State.SUSPENDED


def test_time2retain_ends_the_reinstatement(benches: list[Bench]) -> None:
    bench = made(benches, default_time2wait=2, default_time2retain=3)
    slot = bench.submit()
    bench.lose(0)
    bench.progress(4.9)
    assert state(bench) is State.REINSTATING
    bench.progress(0.1)
    assert state(bench) is State.SUSPENDED and slot.state == QUEUED
    assert "Time2Retain is over" in str(bench.session.suspended)
    late = bench.add(0)
    assert late.terminated


@pytest.mark.parametrize(("wait", "retain"), [(3, 4), (0, 4), (3, 0), (int(PATIENCE_S) + 1, 9)])
def test_a_drop_that_the_target_announces(one: Bench, wait: int, retain: int) -> None:
    """With the times that it has announced, not those of the login."""
    one.submit()
    before = one.now
    one.receive(
        0,
        pdu.AsyncMessage(
            lun=bytes(8),
            event=pdu.ASYNC_CONNECTION_DROP,
            parameter1=0,
            parameter2=wait,
            parameter3=retain,
            stat_sn=1,
            exp_cmd_sn=1,
            max_cmd_sn=MOST,
        ),
    )
    assert one.session.respite.reconnect_at >= before + wait and one.dms[0].terminated
    if retain == 0 or wait > PATIENCE_S:
        assert state(one) is State.SUSPENDED
        return
    assert state(one) is State.REINSTATING
    one.progress(wait + retain - 0.1)
    assert state(one) is State.REINSTATING
    one.progress(0.1)
    assert state(one) is State.SUSPENDED


def test_given_up_by_the_reconnector(one: Bench) -> None:
    """Its reason is what a command reports that cannot wait longer."""
    slots = [one.submit() for _ in range(2)]
    one.lose(0)
    slots.append(one.submit())
    one.session.still_absent(ConnectionLost("the session does not exist"))
    one.session.disconnect()
    one.progress()
    assert state(one) is State.SUSPENDED
    assert "not reinstated: the session does not exist" in str(one.session.suspended)
    assert one.session.queue.waiting.in_turn() == slots


def test_a_ping_that_is_not_answered(one: Bench) -> None:
    slot = one.submit()
    one.lose(0)
    one.add(0)
    one.progress(ANSWER_S)
    assert state(one) is State.SUSPENDED and slot.state == QUEUED


@pytest.mark.parametrize("code", [pdu.TMF_STILL_ALLEGIANT, pdu.TMF_REASSIGN_NOT_SUPPORTED, 77])
def test_a_refused_reassignment(one: Bench, code: int) -> None:
    slot = one.submit()
    one.lose(0)
    dm = one.add(0)
    (sent,) = told(one, 2)
    one.answered(0, sent, code)
    assert state(one) is State.SUSPENDED and dm.terminated and slot.state == QUEUED


def test_an_unanswered_reassignment(one: Bench) -> None:
    one.submit()
    one.lose(0)
    one.add(0)
    told(one, 2)
    one.progress(STEP_S)
    assert state(one) is State.SUSPENDED


def test_a_command_whose_answer_was_interrupted(one: Bench) -> None:
    slot = one.submit(READ)
    slot.data = None
    one.lose(0)
    one.add(0)
    assert not told(one, 2)
    assert state(one) is State.SUSPENDED and isinstance(slot.error, ConnectionLost)


def test_another_connection_is_not_taken(one: Bench) -> None:
    """Only the CID of the lost connection logs that one out."""
    one.lose(0)
    other = one.add(1)
    assert other.terminated and state(one) is State.REINSTATING


def test_closed_while_no_connection_is_left(one: Bench) -> None:
    slot = one.submit()
    one.lose(0)
    one.session.fail(ConnectionLost("closing"))
    assert isinstance(slot.error, ConnectionLost) and not one.waiter.pending
    assert one.add(0).terminated


@pytest.mark.parametrize("at", ["descriptors", "terminate", "called"])
def test_interrupted(one: Bench, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    """^C while the loss is dealt with: what the driver does then, ``disconnect``, ends in session
    reinstatement, and nothing is lost of what is queued."""
    slots = [one.submit() for _ in range(2)]
    todo = [KeyboardInterrupt]

    def interrupted(*_args: object) -> None:
        if todo:
            raise todo.pop()

    with monkeypatch.context() as patch:
        if at == "descriptors":
            patch.setattr(one.session.queue.descriptors, "remove", interrupted)
        elif at == "terminate":
            patch.setattr(one.dms[0], "connection_terminate", interrupted)
        else:
            patch.setattr(one.driver, "reconnect", interrupted)
        with pytest.raises(KeyboardInterrupt):
            one.lose(0)
    one.session.disconnect()
    one.progress()
    assert state(one) is State.SUSPENDED and one.dms[0].terminated
    assert [slot.state for slot in slots] == [QUEUED] * 2
    assert one.session.queue.waiting.in_turn() == slots


def test_a_logout_that_may_have_been_carried_out_is_not_taken_for_none(
    benches: list[Bench],
) -> None:
    """The target has kept the tasks then; to send them again might let an old one land late."""
    bench = made(benches, 3)
    slots = [bench.submit() for _ in range(3)]
    bench.lose(1)
    bench.lose(0)  # with the Logout Request for 1
    request = next(
        each
        for _, each in bench.dms[2].sent
        if each[0] & bhs.OPCODE_MASK == bhs.LOGOUT_REQUEST
        and pdu.LogoutRequest.unpack_from(each).cid == 1
    )
    bench.logged_out(2, request, pdu.LOGOUT_CID_NOT_FOUND, exp_cmd_sn=4)
    assert state(bench) is State.SUSPENDED
    assert bench.session.queue.waiting.in_turn() == slots


# -- flow control of immediate PDUs, over iSER ----------------------------------------------------


def test_the_ping_does_not_wait_behind_the_numbers_that_are_missing(benches: list[Bench]) -> None:
    """It is immediate, also where others are outstanding: the numbers are sent again only when it
    is answered. What the lost connections carried does not count."""
    bench = made(benches, 2, rdma_extensions=True, max_outstanding_unexpected_pdus=2)
    slots = [bench.submit() for _ in range(2)]
    for dm in bench.dms:
        dm.inbox.append(ConnectionLost("gone"))
    bench.progress()
    dm = bench.add(1)
    logout, ping = [sent for _, sent in dm.sent]
    assert opcodes([logout, ping]) == [bhs.LOGOUT_REQUEST, bhs.NOP_OUT]
    again = told(bench, 1, 1)
    assert [cmd_sn_of((slots[1], each)) for each in again] == [2]
    bench.logged_out(1, logout)
    assert state(bench) is State.LOGGED_IN and bench.session.counts.recovered == 2
    assert [slot.connection.cid for slot in slots] == [1, 1]


def test_reassignments_do_not_exceed_what_the_target_takes(benches: list[Bench]) -> None:
    """A PDU with a number retires those before it, when it is answered.

    proves: ISER-8.1.1.3-1, ISER-8.1.1.3-4
    """
    bench = made(benches, rdma_extensions=True, max_outstanding_unexpected_pdus=3)
    slots = [bench.submit() for _ in range(6)]
    bench.lose(0)
    dm = bench.add(0)
    sent = told(bench, 7)
    tags = []
    while sent:
        ping = [each for each in sent if each[0] & bhs.OPCODE_MASK == bhs.NOP_OUT]
        asked = [each for each in sent if each[0] & bhs.OPCODE_MASK != bhs.NOP_OUT]
        assert len(asked) <= 3
        before = len(dm.sent)
        for each in asked:
            tags.append(pdu.TaskManagementRequest.unpack_from(each).referenced_task_tag)
            bench.answered(0, each, pdu.TMF_COMPLETE)
        for each in ping:
            assert not each[0] & bhs.IMMEDIATE
            bench.receive(
                0,
                pdu.NopIn(
                    lun=bytes(8),
                    itt=itt_of((slots[0], each)),
                    ttt=bhs.NO_TAG,
                    stat_sn=100,
                    exp_cmd_sn=cmd_sn_of((slots[0], each)) + 1,
                    max_cmd_sn=MOST,
                ),
            )
        bench.progress()
        sent = [each for _, each in dm.sent[before:]]
    assert sorted(tags) == sorted(slot.itt for slot in slots)
    assert bench.session.counts.recovered == 1 and state(bench) is State.LOGGED_IN
