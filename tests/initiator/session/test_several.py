"""Several connections of one session: where commands go, and what follows the loss of one."""

from __future__ import annotations

import gc
import weakref

import pytest

from iserblk.commands.command import QUEUED, SENT, Command
from iserblk.commands.listeners import LunListener
from iserblk.datamover.seam import INLINE, PduSlot
from iserblk.errors import CommandTimeout, ConnectionLost
from iserblk.initiator.session.deadlines import IDLE_S, STEP_S, Ladder
from iserblk.initiator.session.life import State
from iserblk.initiator.session.logout import ANSWER_S
from iserblk.initiator.session.recovery import PATIENCE_S
from iserblk.initiator.session.sending import CONTROL_SLOTS, TOGETHER
from iserblk.initiator.session.slots import TaskSlot
from iserblk.iscsi import bhs, pdu
from iserblk.scsi import opcodes
from iserblk.scsi.tasks import BIDIRECTIONAL, NO_DATA, READ, WRITE
from tests.initiator.fake import CountingWaiter, cmd_sn_of, itt_of, response
from tests.initiator.several import MOST, Bench, announced, logout_of, patient
from tests.support import logs

pytestmark = pytest.mark.logs(
    logs.ONE_OF_SEVERAL, logs.RECONNECTED, logs.DEADLINES, logs.ASYNC_MESSAGE, logs.REJECTED
)


# -- where PDUs go -----------------------------------------------------------------------------


# shows: SYSTEM-30
def test_commands_go_where_the_fewest_are_in_flight(two: Bench) -> None:
    """And CmdSN is one sequence over all connections."""
    slots = [two.submit() for _ in range(4)]
    assert [len(dm.sent) for dm in two.dms] == [2, 2]
    assert sorted(cmd_sn_of(sent) for dm in two.dms for sent in dm.sent) == [1, 2, 3, 4]
    for slot in slots:
        cid = slot.connection.cid
        two.receive(cid, response(slot.itt, max_cmd_sn=MOST))
    assert two.waiter.woken == 1
    for slot in slots:
        two.session.queue.release(slot)
    for _ in range(4):
        two.submit()
    assert [len(dm.sent) for dm in two.dms] == [4, 4]


def submit_together(bench: Bench, count: int, direction: int = READ, size: int = 4096) -> list[int]:
    """The CIDs that ``count`` commands of one turn go to."""
    queue = bench.session.queue
    queue.batch = True
    cids = [bench.submit(direction, size).connection.cid for _ in range(count)]
    queue.batch = False
    queue.flush()
    return cids


def test_what_leaves_together_goes_over_one_connection(benches: list[Bench]) -> None:
    """One send for all commands of a turn, and one receive at the target. The next turn goes where
    the fewest are in flight."""
    benches.append(bench := Bench(2, depth=64))
    assert submit_together(bench, 8) == [0] * 8
    assert submit_together(bench, 3, NO_DATA) == [1] * 3
    assert submit_together(bench, 4) == [1] * 4
    assert submit_together(bench, 2) == [1] * 2  # 7 of 8
    assert submit_together(bench, 2) == [0] * 2
    assert submit_together(bench, 0) == []
    assert [len(dm.sent) for dm in bench.dms] == [10, 9]


def test_much_data_goes_over_all_connections(benches: list[Bench]) -> None:
    """In one turn, too."""
    benches.append(bench := Bench(2, depth=64))
    cids = submit_together(bench, 8, READ, TOGETHER // 4)
    assert cids == [0] * 4 + [1] * 4
    assert submit_together(bench, 6, READ, TOGETHER) == [0, 1] * 3
    assert submit_together(bench, 4, WRITE, TOGETHER + 1) == [0, 1] * 2


@pytest.mark.parametrize("how", ["lost", "logging out"])
def test_a_turn_goes_on_without_the_connection_that_it_had_begun_with(two: Bench, how: str) -> None:
    two.session.queue.batch = True
    assert two.submit(READ).connection.cid == 0
    if how == "lost":
        two.lose(0)
    else:
        two.session.queue.begin_logout(two.session.queue.connections[0])
    assert [two.submit(READ).connection.cid for _ in range(3)] == [1] * 3
    two.session.queue.batch = False
    two.session.queue.flush()
    assert [len(dm.sent) for dm in two.dms] == [0 if how == "lost" else 1, 3]


def test_no_connection_that_is_over_is_kept(two: Bench) -> None:
    """Its memory goes."""
    gone = weakref.ref(two.dms[1])
    two.submit()
    slot = two.submit()
    assert slot.connection.cid == 1
    two.receive(1, response(slot.itt, max_cmd_sn=MOST))
    two.session.queue.release(slot)
    two.session.queue.batch = True
    assert two.submit().connection.cid == 1
    two.lose(1)
    patient(two)
    two.session.queue.batch = False
    two.logged_out(0, logout_of(two.dms[0]), exp_cmd_sn=4)
    two.dms.pop()
    gc.collect()
    assert gone() is None


def test_a_slow_connection_gets_fewer_commands(two: Bench) -> None:
    for _ in range(6):
        slot = two.submit()
        if slot.connection.cid == 1:
            two.receive(1, response(slot.itt, max_cmd_sn=MOST))
            two.session.queue.release(slot)
    assert len(two.dms[0].sent) < len(two.dms[1].sent)


# shows: SYSTEM-30
def test_each_connection_has_an_exp_stat_sn_of_its_own(two: Bench) -> None:
    first, second = two.submit(), two.submit()
    two.receive(1, response(second.itt, stat_sn=700, max_cmd_sn=MOST))
    two.receive(0, response(first.itt, stat_sn=300, max_cmd_sn=MOST))
    numbers = [connection.exp_stat_sn for connection in two.session.queue.connections]
    assert numbers == [301, 701]


def test_an_answer_on_another_connection_is_an_error(two: Bench) -> None:
    slot = two.submit()
    two.receive(1, response(slot.itt, max_cmd_sn=MOST))
    assert two.dms[1].terminated and not two.dms[0].terminated
    assert slot.state == SENT


def test_abort_goes_where_its_task_is(two: Bench) -> None:
    ladder = Ladder(two.session)
    first, second = two.submit(), two.submit()
    first.deadline = second.deadline = two.now - 1
    ladder.tick(two.now)
    for dm, slot in zip(two.dms, (first, second), strict=True):
        request = pdu.TaskManagementRequest.unpack_from(dm.sent[-1][1])
        assert (request.function, request.referenced_task_tag) == (1, slot.itt)
        assert request.ref_cmd_sn == slot.cmd_sn


def test_each_silent_connection_is_pinged(two: Bench) -> None:
    """One that does not answer is cut, and the other goes on."""
    ladder = Ladder(two.session)
    quiet, heard = two.session.queue.connections
    now = max(quiet.last_heard, heard.last_heard) + IDLE_S
    ladder.tick(now)
    assert [dm.opcodes() for dm in two.dms] == [[bhs.NOP_OUT], [bhs.NOP_OUT]]
    heard.last_heard = now
    ladder.tick(now + STEP_S)
    assert two.dms[0].disconnected and not two.dms[1].disconnected


def test_a_ping_does_not_wait_for_what_is_lost_elsewhere(benches: list[Bench]) -> None:
    """It is immediate, though an answer is missing on the other connection: with a CmdSN it would
    be behind the commands that are lost there, and good connections would pass for dead."""
    bench = Bench(3, rdma_extensions=True, max_outstanding_unexpected_pdus=3)
    benches.append(bench)
    heard = max(connection.last_heard for connection in bench.session.queue.connections)
    Ladder(bench.session).tick(heard + IDLE_S)
    pings = [dm.sent[-1][1] for dm in bench.dms]
    assert [ping[0] for ping in pings] == [bhs.NOP_OUT | bhs.IMMEDIATE] * 3


def test_pings_of_the_target_are_answered_where_they_came(two: Bench) -> None:
    ping = pdu.NopIn(lun=bytes(8), itt=bhs.NO_TAG, ttt=5, stat_sn=1, exp_cmd_sn=1, max_cmd_sn=MOST)
    two.receive(1, ping)
    assert [dm.opcodes() for dm in two.dms] == [[], [bhs.NOP_OUT]]


def test_a_full_socket_is_watched(two: Bench) -> None:
    """The driver polls one descriptor, which watches for room by itself."""
    assert not two.session.wants_write()
    two.dms[1].full = True
    descriptors = two.session.queue.descriptors
    assert descriptors is not None
    before = two.session.fileno()
    two.progress()
    assert two.session.fileno() == before and not two.session.wants_write()
    two.dms[1].full = False
    two.progress()


# -- levels 0 and 1 ----------------------------------------------------------------------------


def test_commands_of_a_lost_connection_wait_for_its_logout(two: Bench) -> None:
    """What the target has acknowledged has ended there; the rest it discards."""
    slots = [two.submit() for _ in range(4)]
    stranded = [slot for slot in slots if slot.connection.cid == 1]
    assert [slot.cmd_sn for slot in stranded] == [2, 4]
    tags = [slot.itt for slot in stranded]
    before = len(two.dms[0].sent)
    two.lose(1)
    assert two.dms[1].terminated and len(two.dms[0].sent) == before  # Time2Wait
    patient(two)
    assert two.dms[0].opcodes()[before:] == [bhs.LOGOUT_REQUEST]
    request = pdu.LogoutRequest.unpack_from(logout_of(two.dms[0]))
    assert (request.reason, request.cid) == (pdu.LOGOUT_CLOSE_CONNECTION, 1)
    two.progress(ANSWER_S - 0.1)
    assert len(two.dms[0].sent) == before + 1
    two.logged_out(0, logout_of(two.dms[0]), exp_cmd_sn=3)
    again = two.dms[0].sent[before + 1 :]
    assert sorted(cmd_sn_of(sent) for sent in again) == [4, 5]
    retried = next(sent for sent in again if cmd_sn_of(sent) == 4)
    assert retried[0] is stranded[1] and itt_of(retried) == tags[1]
    anew = next(sent for sent in again if cmd_sn_of(sent) == 5)
    assert anew[0] is stranded[0] and itt_of(anew) != tags[0]
    assert (two.session.counts.recovered, two.session.counts.replayed) == (1, 2)
    for slot in slots:
        two.receive(0, response(slot.itt, max_cmd_sn=MOST))
    assert not two.waiter.pending and all(slot.error is None for slot in slots)


class Unflushed(LunListener):
    """Follows a LUN with unflushed writes."""

    def hear(self, slot: Command) -> None:
        """Nothing comes."""

    def unflushed(self) -> bool:
        return True


@pytest.mark.parametrize("acknowledged", [True, False])
def test_status_that_was_lost_may_have_told_of_a_loss(two: Bench, acknowledged: bool) -> None:
    """The target had taken in the command, and may have ended it with the one report that its cache
    is lost. So where something is not flushed, the session is reinstated."""
    two.reconnectable()
    two.session.listeners.add(bytes(8), Unflushed())
    slots = [two.submit() for _ in range(2)]
    (stranded,) = [slot for slot in slots if slot.connection.cid == 1]
    two.lose(1)
    patient(two)
    two.logged_out(0, logout_of(two.dms[0]), exp_cmd_sn=3 if acknowledged else 2)
    suspended = two.session.suspended
    assert (suspended is not None) is acknowledged
    assert stranded.state == (QUEUED if acknowledged else SENT)
    if suspended is not None:
        assert "may have told of a loss" in str(suspended)


def test_nothing_is_sent_once_more_to_a_lun_that_is_doubted(two: Bench) -> None:
    """The target has not taken in a command of the lost connection; another LUN may have the number
    meanwhile. A ping takes its CmdSN, and the command is held back."""
    slots = [two.submit() for _ in range(2)]
    (stranded,) = [slot for slot in slots if slot.connection.cid == 1]
    stranded.cdb[0] = opcodes.WRITE_16
    two.lose(1)
    patient(two)
    two.session.queue.refuse(two.session.queue.doubt(bytes(8)))
    before = len(two.dms[0].sent)
    two.logged_out(0, logout_of(two.dms[0]), exp_cmd_sn=2)
    sent = [raw[0] & bhs.OPCODE_MASK for _, raw in two.dms[0].sent[before:]]
    assert bhs.SCSI_COMMAND not in sent and bhs.NOP_OUT in sent
    assert stranded.state != SENT


def test_status_of_another_lun_tells_nothing_of_it(two: Bench) -> None:
    two.reconnectable()
    two.session.listeners.add(bytes((0, 1)) + bytes(6), Unflushed())
    for _ in range(2):
        two.submit()
    two.lose(1)
    patient(two)
    two.logged_out(0, logout_of(two.dms[0]), exp_cmd_sn=3)
    assert two.session.suspended is None and two.session.counts.recovered == 1


def test_new_commands_go_on_meanwhile(two: Bench) -> None:
    two.submit()
    two.submit()
    two.lose(1)
    slot = two.submit()
    assert slot.connection.cid == 0 and slot.state == SENT


def test_data_is_sent_again_whole(benches: list[Bench]) -> None:
    """A write whose data went with its command goes as the next connection wants it."""
    bench = Bench(2, immediate_data=True, default_time2wait=0)
    benches.append(bench)
    first = bench.submit(WRITE)
    write = bench.submit(WRITE)
    assert write.direction == INLINE and write.connection.cid == 1 and first is not write
    bench.lose(1)
    bench.session.queue.connection.immediate_limit = 0
    bench.logged_out(0, logout_of(bench.dms[0]), exp_cmd_sn=3)
    assert write.direction == WRITE and write.connection.cid == 0 and write.state == SENT
    assert write.data is not None and len(write.data) == 512


@pytest.mark.parametrize("acknowledged", [True, False])
def test_a_bidirectional_command_may_be_sent_again_if_it_was_not_begun(
    benches: list[Bench], acknowledged: bool
) -> None:
    bench = Bench(2, default_time2wait=0)
    benches.append(bench)
    bench.submit()
    slot = bench.submit(BIDIRECTIONAL)
    bench.lose(1)
    assert slot.state == SENT
    bench.logged_out(0, logout_of(bench.dms[0]), exp_cmd_sn=3 if acknowledged else 2)
    if acknowledged:
        assert isinstance(slot.error, ConnectionLost) and "may have been carried out" in str(
            slot.error
        )
    else:
        assert slot.error is None and slot.connection.cid == 0 and slot.cmd_sn == 2


@pytest.mark.parametrize("acknowledged", [True, False])
def test_a_command_that_was_being_aborted_ends(two: Bench, acknowledged: bool) -> None:
    """Its number is taken by a ping, if the target has not got it."""
    two.submit()
    slot = two.submit()
    slot.deadline = two.now - 1
    Ladder(two.session).tick(two.now)
    two.lose(1)
    patient(two)
    assert slot.error is None
    before = len(two.dms[0].sent)
    two.logged_out(0, logout_of(two.dms[0]), exp_cmd_sn=3 if acknowledged else 2)
    assert isinstance(slot.error, CommandTimeout)
    sent = two.dms[0].sent[before:]
    assert [(pdu_[0], cmd_sn_of((slot, pdu_))) for _, pdu_ in sent] == (
        [] if acknowledged else [(bhs.NOP_OUT, 2)]
    )


def test_the_number_of_a_lost_ping_is_taken_by_another(benches: list[Bench]) -> None:
    """A PDU that is not immediate, and is no command, leaves a hole, too."""
    bench = Bench(2, default_time2wait=0, rdma_extensions=True, max_outstanding_unexpected_pdus=1)
    benches.append(bench)
    connection = bench.session.queue.connections[1]
    for _ in range(2):
        control = bench.session.queue.take_control(connection)
        assert control is not None
        pdu.NopOut(lun=bytes(8), itt=0, cmd_sn=0, exp_stat_sn=0).pack_into(control.bhs)
        bench.session.queue.send_immediate(control, CountingWaiter())
    assert [sent[0] & bhs.IMMEDIATE for _, sent in bench.dms[1].sent] == [bhs.IMMEDIATE, 0]
    bench.lose(1)
    request = logout_of(bench.dms[0])
    before = len(bench.dms[0].sent)
    bench.logged_out(0, request)
    assert [(sent[0], cmd_sn_of((slot, sent))) for slot, sent in bench.dms[0].sent[before:]] == [
        (bhs.NOP_OUT, 1)
    ]


def with_a_numbered_ping(bench: Bench) -> tuple[TaskSlot, bytes]:
    """Connection 1 of three was lost with a PDU that is not sent again. The ping that has its
    CmdSN, which is 2, on connection 0."""
    slots = [bench.submit() for _ in range(3)]
    slots[1].deadline = bench.now - 1
    Ladder(bench.session).tick(bench.now)
    bench.lose(1)
    bench.logged_out(0, logout_of(bench.dms[0]), exp_cmd_sn=2)
    slot, sent = bench.dms[0].sent[-1]
    assert isinstance(slot, TaskSlot)
    assert (sent[0], cmd_sn_of((slot, sent))) == (bhs.NOP_OUT, 2)
    return slot, sent


@pytest.fixture
def level1(benches: list[Bench]) -> Bench:
    benches.append(Bench(3, error_recovery_level=1, default_time2wait=0))
    return benches[0]


def test_a_numbered_ping_that_is_lost_is_sent_again(level1: Bench) -> None:
    """No command behind it would begin at the target. What an answer on another connection shows
    to be missing may be under way: the ping's own connection is asked."""
    ping, sent = with_a_numbered_ping(level1)
    Ladder(level1.session).tick(level1.now + IDLE_S)
    before = len(level1.dms[0].sent)
    asked = level1.dms[2].sent[-1]

    def answer(cid: int, request: bytes, exp_cmd_sn: int) -> list[tuple[int, int]]:
        """Opcode with I bit, and CmdSN, of what is sent on connection 0 then."""
        (itt,) = bhs.ITT.unpack_from(request, bhs.ITT_OFFSET)
        level1.receive(
            cid,
            pdu.NopIn(itt=itt, stat_sn=100, exp_cmd_sn=exp_cmd_sn, max_cmd_sn=MOST),
        )
        return [(raw[0], cmd_sn_of((ping, raw))) for _, raw in level1.dms[0].sent[before:]]

    question = (bhs.NOP_OUT | bhs.IMMEDIATE, 4)
    assert answer(2, asked[1], 2) == [question]
    assert answer(0, level1.dms[0].sent[-1][1], 2) == [question, (bhs.NOP_OUT, 2), question]
    again = level1.dms[0].sent[-2][1]
    assert again[:28] == sent[:28]  # with its tag
    assert len(answer(0, again, 4)) == 3  # nothing is missing any more
    assert level1.session.queue.free_controls == CONTROL_SLOTS - 2  # two questions are open


def test_a_numbered_ping_that_is_discarded_is_sent_again(level1: Bench) -> None:
    _, sent = with_a_numbered_ping(level1)
    reject = pdu.Reject(
        reason=pdu.REJECT_DATA_DIGEST_ERROR,
        data_length=48,
        stat_sn=101,
        exp_cmd_sn=2,
        max_cmd_sn=MOST,
    )
    level1.receive(0, reject.pack() + sent)
    assert level1.dms[0].sent[-1][1][:28] == sent[:28]


@pytest.mark.parametrize("code", [pdu.LOGOUT_NO_RECOVERY, pdu.LOGOUT_CLEANUP_FAILED, 9])
def test_a_logout_that_fails_ends_in_session_reinstatement(two: Bench, code: int) -> None:
    two.reconnectable()
    slots = [two.submit() for _ in range(2)]
    two.lose(1)
    patient(two)
    two.logged_out(0, logout_of(two.dms[0]), code)
    assert two.session.life.state is State.SUSPENDED and two.dms[0].terminated
    assert [slot.state for slot in slots] == [QUEUED, QUEUED]
    assert two.session.queue.waiting.in_turn() == slots


def test_a_logout_that_is_not_answered_ends_in_session_reinstatement(two: Bench) -> None:
    two.reconnectable()
    slot = two.submit()
    two.submit()
    two.lose(1)
    patient(two).progress(ANSWER_S)
    assert two.session.life.state is State.SUSPENDED
    assert "its logout is not answered" in str(two.session.suspended)
    assert slot.state == QUEUED and slot.error is None


def test_without_a_reconnector_the_session_ends(two: Bench) -> None:
    slot = two.submit()
    two.submit()
    two.lose(1)
    patient(two).progress(ANSWER_S)
    assert isinstance(two.session.error, ConnectionLost)
    assert isinstance(slot.error, ConnectionLost) and not two.waiter.pending


def test_a_connection_that_the_target_does_not_know_has_nothing_there(two: Bench) -> None:
    two.submit()
    slot = two.submit()
    two.lose(1)
    patient(two)
    two.logged_out(0, logout_of(two.dms[0]), pdu.LOGOUT_CID_NOT_FOUND, exp_cmd_sn=3)
    assert slot.connection.cid == 0 and slot.state == SENT and two.session.counts.recovered == 1


def test_a_long_time2wait_is_not_waited_for(benches: list[Bench]) -> None:
    bench = Bench(2, default_time2wait=int(PATIENCE_S) + 1)
    benches.append(bench)
    bench.reconnectable()
    bench.lose(1)
    assert bench.session.life.state is State.SUSPENDED


def test_the_logout_goes_by_a_third_connection(benches: list[Bench]) -> None:
    """The one that carried the request is lost before the answer: each is logged out then."""
    bench = Bench(3, default_time2wait=0)
    benches.append(bench)
    slots = [bench.submit() for _ in range(3)]
    bench.lose(0)
    assert bench.dms[1].opcodes()[-1] == bhs.LOGOUT_REQUEST
    bench.lose(1)
    asked = [
        pdu.LogoutRequest.unpack_from(sent)
        for _, sent in bench.dms[2].sent
        if sent[0] & bhs.OPCODE_MASK == bhs.LOGOUT_REQUEST
    ]
    assert sorted(request.cid for request in asked) == [0, 1]
    requests = [sent for _, sent in bench.dms[2].sent[-2:]]
    for request in requests:
        bench.logged_out(2, request, exp_cmd_sn=4)
    assert [slot.connection.cid for slot in slots] == [2, 2, 2]
    assert bench.session.counts.recovered == 2


def test_all_connections_lost_suspends_the_session(two: Bench) -> None:
    two.reconnectable()
    slots = [two.submit() for _ in range(4)]
    two.session.disconnect()
    assert all(dm.disconnected for dm in two.dms)
    for dm in two.dms:
        dm.inbox.append(ConnectionLost("gone"))
    two.progress()
    assert two.session.life.state is State.SUSPENDED
    assert all(dm.terminated for dm in two.dms)
    assert two.session.queue.waiting.in_turn() == slots and two.session.fileno() == -1


def test_a_lost_connection_can_be_replaced(two: Bench) -> None:
    """Its CID is free again when its recovery is over."""
    two.reconnectable()
    two.lose(1)
    assert two.calls == 1 and two.session.missing == 1 and two.session.free_cid() == 2
    patient(two)
    two.logged_out(0, logout_of(two.dms[0]))
    assert two.session.free_cid() == 1
    two.add(1)
    assert two.session.missing == 0
    two.submit()
    assert two.submit().connection.cid == 1


def test_a_session_that_is_suspended_takes_no_connection(two: Bench) -> None:
    two.reconnectable()
    two.session.disconnect()
    for dm in two.dms:
        dm.inbox.append(ConnectionLost("gone"))
    two.progress()
    late = two.add(2)
    assert late.terminated and two.session.missing == 0


@pytest.mark.parametrize("before", [True, False])
def test_a_connection_that_joins_keeps_no_session_whose_end_is_wanted(
    two: Bench, before: bool
) -> None:
    """It is offered while a report of a lost cache comes in: the journal waits for a fresh
    session."""
    two.reconnectable()
    if before:
        two.offer(2)
    two.session.disconnect()
    if not before:
        two.offer(2)
    for dm in two.dms[:2]:
        dm.inbox.append(ConnectionLost("gone"))
    two.progress()
    assert two.session.life.state is State.SUSPENDED
    assert all(dm.terminated for dm in two.dms)


def test_the_target_announces_that_another_connection_is_dropped(two: Bench) -> None:
    two.receive(0, announced(pdu.ASYNC_CONNECTION_DROP, parameter1=1))
    assert [dm.disconnected for dm in two.dms] == [False, True]


def test_the_target_announces_the_end_of_the_session(two: Bench) -> None:
    two.reconnectable()
    two.receive(0, announced(pdu.ASYNC_SESSION_DROP))
    assert two.session.life.state is State.SUSPENDED and all(dm.terminated for dm in two.dms)


# -- level 2 -----------------------------------------------------------------------------------


def reassigning(bench: Bench, slots: int = 2, **answer: int) -> list[tuple[PduSlot, bytes]]:
    """Lose connection 1 and log it out; returns the TASK REASSIGNs."""
    bench.lose(1)
    request = logout_of(bench.dms[0])
    assert pdu.LogoutRequest.unpack_from(request).reason == pdu.LOGOUT_FOR_RECOVERY
    before = len(bench.dms[0].sent)
    bench.logged_out(0, request, **{"exp_cmd_sn": slots + 1, **answer})
    return bench.dms[0].sent[before:]


# shows: SYSTEM-41
def test_tasks_are_reassigned(level2: Bench) -> None:
    """Each gets a TASK REASSIGN of its own, immediate, with ExpDataSN 0.

    proves: ISER-3.3-5, ISER-7.3.3-9, ISER-10.2.2-1
    """
    level2.submit(READ)
    slot = level2.submit(READ)
    itt = slot.itt
    ((_, sent),) = reassigning(level2)
    request = pdu.TaskManagementRequest.unpack_from(sent)
    assert (request.function, request.referenced_task_tag) == (pdu.TMF_TASK_REASSIGN, itt)
    assert request.opcode & bhs.IMMEDIATE and request.exp_data_sn == 0
    assert level2.dms[0].reassigned == [slot]
    assert slot.connection.cid == 0 and slot.itt == itt and slot.data is not None
    level2.answered(0, sent, pdu.TMF_COMPLETE)
    assert (level2.session.counts.recovered, level2.session.counts.reassigned) == (1, 1)
    level2.receive(0, response(itt, max_cmd_sn=MOST))
    assert slot.error is None and level2.waiter.pending == 1


def test_what_was_not_acknowledged_is_retried_and_not_reassigned(level2: Bench) -> None:
    level2.submit()
    slot = level2.submit()
    ((_, sent),) = reassigning(level2, 1)
    assert sent[0] & bhs.OPCODE_MASK == bhs.SCSI_COMMAND
    assert cmd_sn_of((slot, sent)) == 2 and itt_of((slot, sent)) == slot.itt
    assert level2.session.counts.recovered == 1


def test_time2wait_of_the_logout_is_obeyed(level2: Bench) -> None:
    """For the reassignment; the holes of CmdSN are filled at once."""
    for _ in range(4):
        level2.submit()
    sent = reassigning(level2, 2, wait=3)
    assert [each[0] & bhs.OPCODE_MASK for _, each in sent] == [bhs.SCSI_COMMAND]
    before = len(level2.dms[0].sent)
    level2.progress(2.9)
    assert len(level2.dms[0].sent) == before
    level2.progress(0.2)
    assert level2.dms[0].opcodes()[before:] == [bhs.TASK_MANAGEMENT_REQUEST]


def test_a_target_that_retains_nothing_has_ended_the_tasks(level2: Bench) -> None:
    level2.submit()
    slot = level2.submit()
    ((_, sent),) = reassigning(level2, retain=0)
    assert sent[0] & bhs.OPCODE_MASK == bhs.SCSI_COMMAND and cmd_sn_of((slot, sent)) == 3


def test_a_target_without_recovery_is_asked_to_close(level2: Bench) -> None:
    level2.submit()
    slot = level2.submit()
    ((_, sent),) = reassigning(level2, code=pdu.LOGOUT_NO_RECOVERY)
    request = pdu.LogoutRequest.unpack_from(sent)
    assert (request.reason, request.cid) == (pdu.LOGOUT_CLOSE_CONNECTION, 1)
    level2.logged_out(0, sent, exp_cmd_sn=3)
    assert slot.connection.cid == 0 and slot.cmd_sn == 3


def test_a_task_that_the_target_does_not_know_is_sent_again(level2: Bench) -> None:
    """It may have been carried out, and its status lost."""
    level2.submit()
    slot = level2.submit(WRITE)
    ((_, sent),) = reassigning(level2)
    level2.answered(0, sent, pdu.TMF_TASK_DOES_NOT_EXIST)
    assert slot.state == SENT and slot.cmd_sn == 3 and slot.data is not None
    assert level2.dms[0].ended[-1][0] is slot  # its new STag is retired
    assert level2.session.counts.replayed == 1


def test_a_task_that_is_not_known_may_have_told_of_a_loss(level2: Bench) -> None:
    level2.reconnectable()
    level2.session.listeners.add(bytes(8), Unflushed())
    level2.submit()
    slot = level2.submit(WRITE)
    ((_, sent),) = reassigning(level2)
    level2.answered(0, sent, pdu.TMF_TASK_DOES_NOT_EXIST)
    assert slot.state == QUEUED and "may have told of a loss" in str(level2.session.suspended)


def test_a_bidirectional_task_that_is_not_known_ends(level2: Bench) -> None:
    level2.submit()
    slot = level2.submit(BIDIRECTIONAL)
    ((_, sent),) = reassigning(level2)
    level2.answered(0, sent, pdu.TMF_TASK_DOES_NOT_EXIST)
    assert isinstance(slot.error, ConnectionLost)


@pytest.mark.parametrize(
    "code", [pdu.TMF_STILL_ALLEGIANT, pdu.TMF_REASSIGN_NOT_SUPPORTED, pdu.TMF_REJECTED, 77]
)
def test_a_refused_reassignment_ends_in_session_reinstatement(level2: Bench, code: int) -> None:
    slots = [level2.submit(), level2.submit()]
    ((_, sent),) = reassigning(level2)
    level2.answered(0, sent, code)
    assert level2.session.life.state is State.SUSPENDED and level2.dms[0].terminated
    assert level2.session.queue.waiting.in_turn() == slots


def test_an_unanswered_reassignment_ends_in_session_reinstatement(level2: Bench) -> None:
    level2.submit()
    level2.submit()
    reassigning(level2)
    level2.progress(STEP_S)
    assert level2.session.life.state is State.SUSPENDED


def test_the_new_connection_is_lost_during_reassignment(benches: list[Bench]) -> None:
    """Its tasks, the reassigned one among them, go over to a third."""
    bench = Bench(3, error_recovery_level=2, default_time2wait=0)
    benches.append(bench)
    slots = [bench.submit() for _ in range(3)]
    bench.lose(1)
    bench.logged_out(0, logout_of(bench.dms[0]), exp_cmd_sn=4)
    assert slots[1].connection.cid == 0
    bench.lose(0)
    before = len(bench.dms[2].sent)
    bench.logged_out(2, logout_of(bench.dms[2]), exp_cmd_sn=4)
    sent = bench.dms[2].sent[before:]
    tags = {pdu.TaskManagementRequest.unpack_from(each).referenced_task_tag for _, each in sent}
    assert tags == {slots[0].itt, slots[1].itt}
    for _, each in sent:
        bench.answered(2, each, pdu.TMF_COMPLETE)
    assert bench.session.counts.reassigned == 2 and bench.session.life.state is State.LOGGED_IN


def test_more_tasks_than_control_slots(benches: list[Bench]) -> None:
    bench = Bench(2, depth=64, error_recovery_level=2, default_time2wait=0)
    benches.append(bench)
    for _ in range(64):
        bench.submit()
    sent = reassigning(bench, 64)
    done = 0
    while sent:
        before = len(bench.dms[0].sent)
        for _, each in sent:
            bench.answered(0, each, pdu.TMF_COMPLETE)
            done += 1
        sent = bench.dms[0].sent[before:]
    counts = bench.session.counts
    assert (done, counts.reassigned, counts.recovered) == (32, 32, 1)


def test_a_task_that_was_being_aborted_is_aborted_again(level2: Bench) -> None:
    level2.submit()
    slot = level2.submit()
    ladder = Ladder(level2.session)
    slot.deadline = level2.now - 1
    ladder.tick(level2.now)
    ((_, sent),) = reassigning(level2)
    level2.answered(0, sent, pdu.TMF_COMPLETE)
    ladder.tick(level2.now)
    request = pdu.TaskManagementRequest.unpack_from(level2.dms[0].sent[-1][1])
    assert (request.function, request.referenced_task_tag) == (pdu.TMF_ABORT_TASK, slot.itt)


def test_a_command_whose_answer_was_interrupted_is_not_reassigned(level2: Bench) -> None:
    """Its buffer has been given up: session reinstatement ends it."""
    level2.submit()
    slot = level2.submit(READ)
    slot.data = None
    level2.lose(1)
    level2.logged_out(0, logout_of(level2.dms[0]), exp_cmd_sn=3)
    assert level2.session.life.state is State.SUSPENDED
    assert isinstance(slot.error, ConnectionLost)


# -- another number of connections ----------------------------------------------------------------


def lose_all(bench: Bench) -> None:
    bench.session.disconnect()
    for dm in bench.dms:
        dm.inbox.append(ConnectionLost("gone"))
    bench.progress()
    assert bench.session.life.state is State.SUSPENDED


def test_a_session_of_one_connection_goes_on_with_several(benches: list[Bench]) -> None:
    """A connection that joins, and its recovery, are those of the session that goes on."""
    one, fresh = Bench(1), Bench(2)
    benches += [one, fresh]
    one.reconnectable()
    slot = one.submit()
    lose_all(one)
    fresh.lose(1)  # while its LUNs were looked at
    one.session.offer(fresh.session)
    one.progress()
    assert one.session.count == 1 and one.session.missing == 1
    assert slot.connection.cid == 0 and slot.state == SENT
    one.dms = [fresh.dms[0]]
    one.add(1)
    assert one.session.cids == {0, 1} and one.submit().connection.cid == 1
    one.lose(1)
    assert one.session.count == 1 and one.session.free_cid() == 2
    patient(one)
    one.logged_out(0, logout_of(one.dms[0]))
    assert one.session.counts.recovered == 1 and one.session.free_cid() == 1
    assert fresh.session.counts.recovered == 0


def test_a_session_of_several_connections_goes_on_with_one(benches: list[Bench]) -> None:
    two, fresh = Bench(2), Bench(1)
    benches += [two, fresh]
    two.reconnectable()
    slot = two.submit()
    lose_all(two)
    two.session.offer(fresh.session)
    two.progress()
    assert two.session.fileno() == fresh.dms[0].fileno() and two.session.missing == 0
    assert slot.state == SENT and slot.connection.cid == 0
    late = two.add(1)
    assert late.terminated and not two.session.offered and two.session.count == 1
    fresh.dms[0].inbox.append(ConnectionLost("gone"))
    two.progress()
    assert two.session.life.state is State.SUSPENDED and slot.state == QUEUED
