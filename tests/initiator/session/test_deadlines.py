"""Deadlines, rung by rung, with time as an argument."""

from __future__ import annotations

from typing import Any

import pytest

from iserblk.commands.command import ABORTING, ANYTHING, QUEUED, SENT, TAKEN, EndedByReset
from iserblk.errors import CommandTimeout, ConnectionLost, ScsiError
from iserblk.initiator.session.deadlines import IDLE_S, OVERTAKEN_S, STEP_S, Ladder
from iserblk.initiator.session.session import MOST_TOLD
from iserblk.iscsi import bhs, pdu
from iserblk.scsi import opcodes
from iserblk.scsi import status as sam
from iserblk.scsi.cdb import FUA
from iserblk.scsi.sense import RECOVERED_ERROR, UNIT_ATTENTION, encode_fixed
from tests.initiator.fake import (
    CountingWaiter,
    FakeDatamover,
    cmd_sn_of,
    command,
    driver_of,
    itt_of,
    response,
    session,
)
from tests.support import logs

pytestmark = pytest.mark.logs(
    logs.DEADLINES,
    logs.ASYNC_MESSAGE,
    logs.CARRIED_OUT,
    logs.RECONNECTED,
    "no answer to ABORT TASK",
)


def answer(dm: FakeDatamover, code: int) -> None:
    """The target answers the task management function that was sent last."""
    dm.inbox.append(
        pdu.TaskManagementResponse(
            response=code, itt=itt_of(dm.sent[-1]), stat_sn=100, exp_cmd_sn=2, max_cmd_sn=32
        ).pack()
    )


def late() -> tuple[Ladder, FakeDatamover, CountingWaiter, float]:
    """A command whose deadline has just passed."""
    made, dm = session()
    waiter = CountingWaiter()
    slot = command(made, waiter)
    ladder = Ladder(made)
    made.queue.connection.last_heard = slot.deadline + 1  # answers to other commands came
    ladder.tick(slot.deadline - 0.1)
    assert len(dm.sent) == 1
    ladder.tick(slot.deadline)
    assert slot.state == ABORTING
    return ladder, dm, waiter, slot.deadline


def test_first_rung_is_abort_task() -> None:
    _, dm, waiter, _ = late()
    request = pdu.TaskManagementRequest.unpack_from(dm.sent[1][1])
    assert request.function == pdu.TMF_ABORT_TASK
    assert request.referenced_task_tag == itt_of(dm.sent[0])
    assert request.ref_cmd_sn == 1 and request.opcode & bhs.IMMEDIATE
    assert waiter.pending == 1  # the target may use the buffer until it answers the abort


@pytest.mark.parametrize("code", [pdu.TMF_COMPLETE, pdu.TMF_TASK_DOES_NOT_EXIST])
def test_abort_answered(code: int) -> None:
    """The task ends without a response: its resources are given back. proves: ISER-8.3.2-1"""
    ladder, dm, waiter, now = late()
    slot = ladder.session.queue.tasks[0]
    answer(dm, code)
    ladder.session.progress(31.0)
    if code == pdu.TMF_TASK_DOES_NOT_EXIST:
        ladder.tick(now + OVERTAKEN_S - 0.1)
        assert waiter.pending == 1  # its response may be on the way
        ladder.tick(now + OVERTAKEN_S)
    assert waiter.woken == 1 and slot.state == TAKEN
    assert isinstance(slot.error, CommandTimeout) and "io-timeout" in str(slot.error)
    assert [ended[0] for ended in dm.ended] == [slot]


def test_response_wins_the_race() -> None:
    """The command ends normally while its abort is on the way."""
    ladder, dm, waiter, _ = late()
    dm.inbox.append(response(itt_of(dm.sent[0])))
    answer(dm, pdu.TMF_TASK_DOES_NOT_EXIST)
    ladder.session.progress(31.0)
    assert waiter.woken == 1 and waiter.pending == 0
    assert ladder.session.error is None


def test_response_that_was_overtaken() -> None:
    """LIO answers the abort with "task does not exist" and sends the task's response after that."""
    ladder, dm, waiter, now = late()
    slot = ladder.session.queue.tasks[0]
    answer(dm, pdu.TMF_TASK_DOES_NOT_EXIST)
    ladder.session.progress(31.0)
    dm.inbox.append(response(itt_of(dm.sent[0])))
    ladder.session.progress(31.1)
    assert waiter.woken == 1 and slot.error is None
    ladder.tick(now + OVERTAKEN_S)
    assert ladder.session.error is None and ladder.resets == 0


def test_next_rungs() -> None:
    """An abort without an answer is followed by LOGICAL UNIT RESET, a reset without an answer by
    the end of the connection. The command is never sent again.

    proves: ISER-10.2.1-1
    """
    ladder, dm, waiter, now = late()
    ladder.tick(now + STEP_S - 0.1)
    assert len(dm.sent) == 2
    ladder.tick(now + STEP_S)
    request = pdu.TaskManagementRequest.unpack_from(dm.sent[2][1])
    assert request.function == pdu.TMF_LOGICAL_UNIT_RESET
    assert not dm.disconnected
    ladder.tick(now + 2 * STEP_S)
    assert dm.disconnected and waiter.pending == 1
    opcodes = [header[0] & bhs.OPCODE_MASK for _, header in dm.sent]
    assert opcodes == [bhs.SCSI_COMMAND] + [bhs.TASK_MANAGEMENT_REQUEST] * 2


def test_reset_ends_the_others_of_the_lun() -> None:
    """Other commands of the LUN get no response: they end as aborted, to be sent again. Commands of
    other LUNs go on."""
    made, dm = session()
    late_one, others = CountingWaiter(), CountingWaiter()
    first = command(made, late_one)
    same = command(made, others)
    other = command(made, others)
    other.lun = b"\0\1" + bytes(6)
    same.deadline = other.deadline = first.deadline + 1000
    ladder = Ladder(made)
    now = first.deadline
    ladder.tick(now)
    ladder.tick(now + STEP_S)
    answer(dm, pdu.TMF_COMPLETE)
    behind = command(made, others)  # sent after the reset, so the target carries it out
    made.progress(now + STEP_S)
    assert behind.state == SENT
    assert isinstance(first.error, CommandTimeout) and late_one.woken == 1
    assert isinstance(same.error, EndedByReset) and same.error.status == sam.TASK_ABORTED
    assert other.state == SENT and others.pending == 2


def test_refused_abort_climbs() -> None:
    ladder, dm, _, now = late()
    answer(dm, pdu.TMF_NOT_SUPPORTED)
    ladder.session.progress(now)
    ladder.tick(now + 0.1)
    request = pdu.TaskManagementRequest.unpack_from(dm.sent[-1][1])
    assert request.function == pdu.TMF_LOGICAL_UNIT_RESET


def test_queued_command_just_ends() -> None:
    """A command that waits for the window was never sent, so it ends without an abort."""
    made, dm = session(window=0)
    waiter = CountingWaiter()
    slot = command(made, waiter)
    Ladder(made).tick(slot.deadline)
    assert waiter.woken == 1 and isinstance(slot.error, CommandTimeout)
    assert all(sent[0] is not slot for sent in dm.sent)


def test_idle_session_is_pinged() -> None:
    made, dm = session()
    ladder = Ladder(made)
    start = made.last_heard
    ladder.tick(start + IDLE_S - 1)
    assert not dm.sent
    ladder.tick(start + IDLE_S)
    ping = pdu.NopOut.unpack_from(dm.sent[0][1])
    assert ping.itt != bhs.NO_TAG and ping.ttt == bhs.NO_TAG
    ladder.tick(start + IDLE_S + 1)
    assert len(dm.sent) == 1
    dm.inbox.append(pdu.NopIn(itt=ping.itt, stat_sn=100, exp_cmd_sn=1, max_cmd_sn=32).pack())
    made.progress(start + IDLE_S + 2)
    ladder.tick(start + IDLE_S + STEP_S + 1)
    assert not dm.disconnected and made.error is None


def test_no_sign_of_life() -> None:
    made, dm = session()
    ladder = Ladder(made)
    ladder.tick(made.last_heard + IDLE_S)
    ladder.tick(made.last_heard + IDLE_S + STEP_S)
    assert dm.disconnected


def test_a_sign_of_life_is_as_good_as_the_answer() -> None:
    """A ping that was not answered means nothing once an answer to a command has come."""
    made, dm = session()
    ladder = Ladder(made)
    start = made.last_heard
    ladder.tick(start + IDLE_S)
    made.queue.connection.last_heard = start + IDLE_S + 1
    ladder.tick(start + IDLE_S + 1)
    ladder.tick(start + IDLE_S + STEP_S + 1)
    assert len(dm.sent) == 1
    ladder.tick(start + 2 * IDLE_S + 1)
    assert [sent[0] & bhs.OPCODE_MASK for _, sent in dm.sent] == [bhs.NOP_OUT] * 2
    assert not dm.disconnected
    ladder.tick(start + 2 * IDLE_S + STEP_S + 1)
    assert dm.disconnected


def test_busy_session_is_not_pinged() -> None:
    """A target that answers commands is known to live: a ping would only add load."""
    made, dm = session()
    slot = command(made, CountingWaiter())
    slot.deadline = made.last_heard + 10 * IDLE_S
    ladder = Ladder(made)
    for _ in range(3):
        now = made.last_heard + IDLE_S - 1
        ladder.tick(now)
        made.queue.connection.last_heard = now
    assert len(dm.sent) == 1 and slot.state == SENT


def test_black_hole_is_found_before_the_deadline() -> None:
    """Commands are in flight and the target is silent: the ping decides, before their deadline."""
    made, dm = session()
    slot = command(made, CountingWaiter())
    slot.deadline = made.last_heard + 10 * IDLE_S
    ladder = Ladder(made)
    ladder.tick(made.last_heard + IDLE_S)
    assert dm.sent[1][1][0] & bhs.OPCODE_MASK == bhs.NOP_OUT and slot.state == SENT
    ladder.tick(made.last_heard + IDLE_S + STEP_S)
    assert dm.disconnected


LIMITED: dict[str, Any] = {"rdma_extensions": True, "max_outstanding_unexpected_pdus": 2}


def control_pdus(dm: FakeDatamover) -> list[tuple[int, int]]:
    """(whether the I bit is set, CmdSN) of each PDU that is no command."""
    return [
        (bytes_sent[0] >> 6, cmd_sn_of((slot, bytes_sent)))
        for slot, bytes_sent in dm.sent
        if bytes_sent[0] & bhs.OPCODE_MASK != bhs.SCSI_COMMAND
    ]


def overdue(window: int, **parameters: Any) -> tuple[Ladder, FakeDatamover, float]:
    """Three commands whose deadlines have passed: each is to be aborted, at once."""
    made, dm = session(window=window, **parameters)
    slots = [command(made, CountingWaiter()) for _ in range(3)]
    now = max(slot.deadline for slot in slots)
    made.queue.connection.last_heard = now
    ladder = Ladder(made)
    ladder.tick(now)
    return ladder, dm, now


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"max_outstanding_unexpected_pdus": 2},  # has no meaning in Traditional iSCSI
        {"rdma_extensions": True},
        {"rdma_extensions": True, "max_outstanding_unexpected_pdus": 3},
    ],
)
def test_aborts_are_immediate_where_the_target_takes_them(parameters: dict[str, Any]) -> None:
    _, dm, _ = overdue(32, **parameters)
    assert control_pdus(dm) == [(1, 4)] * 3


# shows: SYSTEM-34
def test_no_more_immediate_pdus_than_the_target_takes() -> None:
    """The third abort goes through the command window, and its answer, with an ExpCmdSN behind it,
    retires the others.

    proves: ISER-3.3-10, ISER-8.1.1-1, ISER-8.1.1.3-1, ISER-8.1.1.3-3, ISER-8.1.1.3-4
    """
    ladder, dm, now = overdue(32, **LIMITED)
    assert control_pdus(dm) == [(1, 4), (1, 4), (0, 4)]
    for sent, exp_cmd_sn in zip(dm.sent[3:], (4, 4, 5), strict=True):
        dm.inbox.append(
            pdu.TaskManagementResponse(
                response=pdu.TMF_NOT_SUPPORTED,
                itt=itt_of(sent),
                stat_sn=100,
                exp_cmd_sn=exp_cmd_sn,
                max_cmd_sn=36,
            ).pack()
        )
    ladder.session.progress(now)
    ladder.tick(now)  # the next rungs
    assert control_pdus(dm)[3:] == [(1, 5), (1, 5), (0, 5)]


def test_an_immediate_pdu_waits_until_it_may_be_sent() -> None:
    """The window is closed as well: the abort waits for an answer that opens it.

    proves: ISER-8.1.1.3-1, ISER-8.1.1.3-4
    """
    ladder, dm, now = overdue(3, **LIMITED)
    assert control_pdus(dm) == [(1, 4), (1, 4)] and ladder.session.queue.held_back
    ladder.tick(now + 1)
    assert len(control_pdus(dm)) == 2
    dm.inbox.append(response(itt_of(dm.sent[0]), exp_cmd_sn=4, max_cmd_sn=4))
    ladder.session.progress(now + 1)
    ladder.tick(now + 1)
    assert control_pdus(dm)[2:] == [(0, 4)]
    assert not dm.disconnected


@pytest.mark.parametrize("stopped", [0, 100])
def test_a_target_that_takes_no_abort_is_left(stopped: int) -> None:
    """Its answers neither open the window nor retire what it has. (The time in which this process
    was stopped does not count.)"""
    ladder, dm, now = overdue(3, **LIMITED)
    for sent in dm.sent[3:]:
        dm.inbox.append(
            pdu.TaskManagementResponse(
                response=pdu.TMF_COMPLETE,
                itt=itt_of(sent),
                stat_sn=100,
                exp_cmd_sn=4,
                max_cmd_sn=3,
            ).pack()
        )
    ladder.session.progress(now)
    if stopped:
        now += stopped
        ladder.stalled(stopped, now)
    ladder.tick(now + STEP_S - 1)
    assert not dm.disconnected and len(control_pdus(dm)) == 2
    ladder.tick(now + STEP_S)
    assert dm.disconnected


def test_pings_of_an_idle_session_retire_each_other() -> None:
    """Every second one goes through the window, so that they never add up to the limit.

    proves: ISER-8.1.1.3-1, ISER-8.1.1.3-3
    """
    made, dm = session(**LIMITED)
    ladder = Ladder(made)
    now = made.last_heard
    for turn in range(6):
        now += IDLE_S
        ladder.tick(now)
        assert len(dm.sent) == turn + 1
        dm.inbox.append(
            pdu.NopIn(
                itt=itt_of(dm.sent[-1]),
                stat_sn=100,
                exp_cmd_sn=1 + (turn + 1) // 2,
                max_cmd_sn=32 + (turn + 1) // 2,
            ).pack()
        )
        made.progress(now)
        ladder.tick(now)
    assert control_pdus(dm) == [(1, 1), (0, 1), (1, 2), (0, 2), (1, 3), (0, 3)]
    assert not dm.disconnected


def test_a_silent_target_that_takes_no_ping_is_left() -> None:
    made, dm = session(window=0, **LIMITED)
    for _ in range(2):
        control = made.queue.take_control()
        assert control is not None
        pdu.NopOut(itt=0, cmd_sn=0, exp_stat_sn=0).pack_into(control.bhs)
        waiter = CountingWaiter()
        waiter.pending = 1
        made.queue.send_immediate(control, waiter)
    assert made.queue.held_back and made.queue.take_control() is None
    ladder = Ladder(made)
    ladder.tick(made.last_heard + IDLE_S)
    assert not dm.disconnected
    ladder.tick(made.last_heard + IDLE_S + STEP_S)
    assert dm.disconnected


def test_the_target_s_pings_are_answered_at_the_limit() -> None:
    """The target expects the answers: they do not count. proves: ISER-8.1.1-1, ISER-8.1.1.2-1"""
    _ladder, dm, now = overdue(3, **LIMITED)
    made = _ladder.session
    assert made.queue.held_back
    for ttt in (7, 8, 9):
        dm.inbox.append(
            pdu.NopIn(itt=bhs.NO_TAG, ttt=ttt, stat_sn=100, exp_cmd_sn=4, max_cmd_sn=3).pack()
        )
    made.progress(now)
    assert [pdu.NopOut.unpack_from(sent).ttt for _, sent in dm.sent[-3:]] == [7, 8, 9]
    assert made.error is None


def test_slow_command_on_a_target_that_lives() -> None:
    made, dm = session()
    slot = command(made, CountingWaiter())
    slot.deadline = made.last_heard + 10 * IDLE_S
    ladder = Ladder(made)
    now = made.last_heard + IDLE_S
    ladder.tick(now)
    ping = pdu.NopOut.unpack_from(dm.sent[1][1])
    dm.inbox.append(pdu.NopIn(itt=ping.itt, stat_sn=100, exp_cmd_sn=1, max_cmd_sn=32).pack())
    made.progress(now + 1)
    ladder.tick(now + STEP_S)
    assert not dm.disconnected and slot.state == SENT and made.error is None


# -- commands that may have ended without a status ---------------------------------------------

TASKS_ENDED = [
    encode_fixed(UNIT_ATTENTION, asc, ascq)
    for asc, ascq in [
        (0x29, 0x00), (0x29, 0x03), (0x29, 0x04), (0x29, 0x07), (0x2F, 0x00), (0x2F, 0x01),
        (0x2F, 0x02), (0x47, 0x7F),
    ]
]  # fmt: skip
RESET = encode_fixed(UNIT_ATTENTION, 0x29, 0x03)


class Ended:
    """Four commands; the first has brought ``sense``, which says that the others may have ended."""

    def __init__(self, sense: bytes = RESET, *, at_once: bool = True, cmd_sn: int = 1) -> None:
        self.made, self.dm = session(depth=8, window=32, cmd_sn=cmd_sn)
        self.driver = driver_of(self.made)
        self.waiter = CountingWaiter()
        self.slots = [command(self.made, self.waiter) for _ in range(4)]
        self.tags = [slot.itt for slot in self.slots]
        self.ladder = Ladder(self.made)
        self.now = 1.0
        self.max_cmd_sn = (cmd_sn + 63) & 0xFFFFFFFF
        self.receive(response(self.slots[0].itt, status=2, sense=sense, max_cmd_sn=self.max_cmd_sn))
        if at_once:
            self.tick()

    def receive(self, message: bytes) -> None:
        self.dm.inbox.append(message)
        self.made.progress(self.now)

    def tick(self, after: float = 0.0) -> None:
        self.now += after
        self.made.queue.connection.last_heard = self.now
        self.ladder.tick(self.now)

    @property
    def aborts(self) -> list[bytes]:
        return [
            sent
            for _, sent in self.dm.sent
            if sent[0] & bhs.OPCODE_MASK == bhs.TASK_MANAGEMENT_REQUEST
        ]

    @property
    def commands(self) -> list[int]:
        """The slots of the commands that were sent, by their index."""
        return [slot.index for slot, sent in self.dm.sent if not sent[0] & 0x3F ^ bhs.SCSI_COMMAND]

    def answer(self, number: int, code: int) -> None:
        (itt,) = bhs.ITT.unpack_from(self.aborts[number], bhs.ITT_OFFSET)
        answered = pdu.TaskManagementResponse(
            response=code, itt=itt, stat_sn=100, exp_cmd_sn=1, max_cmd_sn=self.max_cmd_sn
        )
        self.receive(answered.pack())


@pytest.mark.parametrize("sense", TASKS_ENDED)
def test_commands_that_may_have_ended_without_a_status_are_aborted(sense: bytes) -> None:
    ended = Ended(sense)
    requests = [pdu.TaskManagementRequest.unpack_from(sent) for sent in ended.aborts]
    assert [request.function for request in requests] == [pdu.TMF_ABORT_TASK] * 3
    assert [request.referenced_task_tag for request in requests] == ended.tags[1:]
    assert not ended.ladder.aborted  # none has missed its deadline


@pytest.mark.parametrize("cmd_sn", [1, 0xFFFFFFFD])
def test_they_are_sent_again_in_order_when_all_are_known_to_be_gone(cmd_sn: int) -> None:
    ended = Ended(cmd_sn=cmd_sn)
    first = ended.commands
    ended.answer(2, pdu.TMF_COMPLETE)
    ended.answer(0, pdu.TMF_TASK_DOES_NOT_EXIST)  # perhaps its status is on its way
    ended.answer(1, pdu.TMF_COMPLETE)
    assert ended.commands == first
    ended.tick(OVERTAKEN_S)
    assert ended.commands[len(first) :] == first[1:]
    assert ended.waiter.pending == 3 and ended.made.counts.replayed == 3
    assert [slot.itt != tag for slot, tag in zip(ended.slots, ended.tags, strict=True)] == [
        False, True, True, True,
    ]  # fmt: skip
    for slot in ended.slots[1:]:
        ended.receive(response(slot.itt, max_cmd_sn=64))
        assert slot.error is None and slot.state == TAKEN
    assert not ended.waiter.pending and not ended.made.queue.connection.in_flight


def test_one_that_is_answered_all_the_same_is_not_sent_again() -> None:
    ended = Ended()
    ended.receive(response(ended.tags[2], max_cmd_sn=64))
    assert ended.waiter.pending == 2
    first = ended.commands
    for number, code in enumerate([pdu.TMF_COMPLETE, pdu.TMF_TASK_DOES_NOT_EXIST, 0]):
        ended.answer(number, code)
    assert ended.commands[len(first) :] == [ended.slots[1].index, ended.slots[3].index]


def test_status_that_comes_behind_the_answer_counts() -> None:
    ended = Ended()
    ended.answer(0, pdu.TMF_TASK_DOES_NOT_EXIST)
    ended.receive(response(ended.tags[1], max_cmd_sn=64))
    assert ended.waiter.pending == 2 and ended.slots[1].state == TAKEN
    first = ended.commands
    ended.answer(1, pdu.TMF_COMPLETE)
    ended.answer(2, pdu.TMF_COMPLETE)
    ended.tick(OVERTAKEN_S)
    assert ended.commands[len(first) :] == [ended.slots[2].index, ended.slots[3].index]


def test_commands_that_ended_before_it_was_asked_are_left_alone() -> None:
    ended = Ended(at_once=False)
    ended.receive(response(ended.tags[1], max_cmd_sn=64))
    ended.made.queue.release(ended.slots[1])
    other = command(ended.made, ended.waiter)
    assert other is ended.slots[1]
    ended.tick()
    assert len(ended.aborts) == 2


@pytest.mark.parametrize("how", ["silent", "refused"])
def test_target_that_aborts_nothing_is_left(how: str) -> None:
    """Session reinstatement ends at the target what is left of the commands."""
    ended = Ended()
    if how == "refused":
        ended.answer(0, pdu.TMF_NOT_SUPPORTED)
    ended.tick(STEP_S)
    assert ended.dm.disconnected and ended.waiter.pending == 3


def test_command_that_must_not_be_carried_out_twice_ends() -> None:
    ended = Ended(at_once=False)
    ended.slots[2].last = ANYTHING
    ended.tick()
    for number in range(3):
        ended.answer(number, pdu.TMF_COMPLETE)
    assert isinstance(ended.slots[2].error, ScsiError) and ended.waiter.pending == 2
    assert "may have been carried out" in str(ended.slots[2].error)


@pytest.mark.parametrize("flags", [None, 0, FUA])
def test_command_that_waits_for_the_medium_is_its_callers_to_send_again(flags: int | None) -> None:
    """It may have been told what the medium could not keep. None: a flush; else a WRITE."""
    ended = Ended(at_once=False)
    slot = ended.slots[2]
    slot.cdb[0] = opcodes.SYNCHRONIZE_CACHE_16 if flags is None else opcodes.WRITE_16
    slot.cdb[1] = flags or 0
    first = ended.commands
    ended.tick()
    for number in range(3):
        ended.answer(number, pdu.TMF_COMPLETE)
    again = ended.commands[len(first) :]
    if flags == 0:
        assert again == first[1:]
        return
    assert again == [first[1], first[3]] and slot.state == TAKEN
    assert isinstance(slot.error, ScsiError) and slot.error.status == sam.TASK_ABORTED


def test_command_without_time_left_ends() -> None:
    ended = Ended(at_once=False)
    ended.slots[2].deadline = 5.0
    ended.tick()
    ended.answer(0, pdu.TMF_TASK_DOES_NOT_EXIST)
    ended.answer(1, pdu.TMF_COMPLETE)
    ended.answer(2, pdu.TMF_COMPLETE)
    ended.tick(5.0)
    assert ended.slots[2].state == ABORTING and ended.waiter.pending == 3


def test_loss_of_the_connection_comes_first() -> None:
    """Then all are sent again on the next."""
    ended = Ended()
    ended.driver.reconnect = lambda: None
    ended.answer(0, pdu.TMF_COMPLETE)
    ended.dm.inbox.append(ConnectionLost("gone"))
    ended.made.progress(ended.now)
    ended.tick()
    assert [slot.state for slot in ended.slots[1:]] == [QUEUED] * 3


def test_other_luns_are_not_concerned_but_by_the_loss_of_the_nexus() -> None:
    for sense, count in ((RESET, 2), (encode_fixed(UNIT_ATTENTION, 0x29, 0x07), 3)):
        ended = Ended(b"", at_once=False)
        ended.slots[3].lun = bytes((0, 1)) + bytes(6)
        fifth = command(ended.made, ended.waiter)
        ended.receive(response(fifth.itt, status=2, sense=sense, max_cmd_sn=64))
        ended.tick()
        assert len(ended.aborts) == count


def scsi_event(sense: bytes, lun: bytes = bytes(8)) -> bytes:
    """An Asynchronous Message with sense data."""
    data = len(sense).to_bytes(2, "big") + sense
    event = pdu.AsyncMessage(
        data_length=len(data), lun=lun, event=pdu.ASYNC_SCSI, stat_sn=1, exp_cmd_sn=1, max_cmd_sn=32
    )
    return event.pack() + data


def test_scsi_event_is_heard_as_sense_data() -> None:
    ended = Ended(b"", at_once=False)
    ended.receive(scsi_event(RESET))
    ended.tick()
    assert len(ended.aborts) == 3


def test_reports_without_end_ask_about_each_command_once() -> None:
    """What a target reports between two looks, and while it is asked, takes no memory."""
    ended = Ended()
    for _ in range(3):
        for _ in range(100):
            ended.receive(scsi_event(RESET))
        assert len(ended.made.perhaps_ended) == 3
        ended.tick()
    assert len(ended.aborts) == 3


def test_kinds_of_success_with_sense_that_are_remembered_have_a_bound(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each is a warning once, and a target may name any LUN."""
    made, dm = session()
    recovered = encode_fixed(RECOVERED_ERROR, 0x17, 0x01)
    for number in range(2 * MOST_TOLD):
        dm.inbox.append(scsi_event(recovered, number.to_bytes(8, "big")))
    made.progress(0.0)
    told = [each for each in caplog.records if "was carried out" in each.getMessage()]
    assert made.error is None and len(told) == MOST_TOLD


# -- a process that does not run -------------------------------------------------------------------


def test_a_stopped_process_is_no_slow_target() -> None:
    """A command, its abort and a ping have as much time after the stop as they had before."""
    made, dm = session()
    slot = command(made, CountingWaiter())
    ladder = Ladder(made)
    start = made.last_heard
    ladder.tick(start + IDLE_S)
    ladder.stalled(100, start + IDLE_S + 101)
    now = start + IDLE_S + 101
    ladder.tick(now)
    assert slot.state == SENT and not dm.disconnected and slot.deadline == start + 130
    ladder.tick(now + STEP_S - 2)
    assert not dm.disconnected
    ladder.tick(now + STEP_S - 1)
    assert dm.disconnected


def test_a_step_of_the_ladder_is_no_shorter_for_a_stop() -> None:
    ladder, dm, waiter, now = late()
    ladder.stalled(100, now + 101)
    ladder.tick(now + 101)
    assert len(dm.sent) == 2 and waiter.pending == 1
    answer(dm, pdu.TMF_COMPLETE)
    ladder.session.progress(now + 101)
    assert waiter.woken == 1 and not ladder.resets


def test_a_response_that_was_overtaken_is_waited_for_behind_a_stop() -> None:
    """What comes behind "no such task" was sent after the stop, too."""
    ladder, dm, waiter, now = late()
    now += 101
    ladder.stalled(100, now)
    answer(dm, pdu.TMF_TASK_DOES_NOT_EXIST)
    ladder.session.progress(now)
    ladder.tick(now)
    assert waiter.pending == 1
    dm.inbox.append(response(itt_of(dm.sent[0])))
    ladder.session.progress(now + 1)
    assert waiter.woken == 1 and ladder.session.error is None


def test_a_command_that_was_sent_behind_the_stop_gets_no_more_time() -> None:
    """The stop is noticed a moment later."""
    made, _ = session()
    before = command(made, CountingWaiter())
    before.deadline = 31.0
    behind = command(made, CountingWaiter())
    behind.deadline = 130.5
    Ladder(made).stalled(100, 101.0)
    assert (before.deadline, behind.deadline) == (131.0, 131.0)
    patient = command(made, CountingWaiter())
    patient.deadline = 500.0
    Ladder(made).stalled(100, 201.0)
    assert patient.deadline == 500.0
