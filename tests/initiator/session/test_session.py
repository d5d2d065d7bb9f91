"""The session engine over a fake datamover; tests make the target's answers."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iserblk.commands.command import FREE, QUEUED, SENT, TAKEN
from iserblk.errors import CommandRejected, ConnectionLost, RemoteProtocolError
from iserblk.initiator.session.deadlines import Ladder
from iserblk.initiator.session.session import Session
from iserblk.initiator.session.slots import TaskSlot
from iserblk.iscsi import bhs, pdu
from tests.initiator.fake import (
    CountingWaiter,
    cmd_sn_of,
    command,
    driver_of,
    itt_of,
    response,
    session,
)
from tests.support import logs

pytestmark = pytest.mark.logs(logs.ASYNC_MESSAGE, logs.REJECTED)


def test_one_command_there_and_back() -> None:
    made, dm = session()
    waiter = CountingWaiter()
    slot = command(made, waiter)
    assert slot.state == SENT and cmd_sn_of(dm.sent[0]) == 1
    dm.inbox.append(response(itt_of(dm.sent[0]), status=2, sense=b"sense!", residual=0))
    made.progress(1.0)
    assert (slot.state, slot.status, slot.sense, waiter.woken) == (TAKEN, 2, b"sense!", 1)
    assert dm.ended == [(slot, 0)]
    made.queue.release(slot)
    assert slot.state == FREE


@pytest.mark.parametrize("first", [1, 0xFFFFFFFE, 0xFFFFFFFF, 0])
def test_window_is_kept_and_order_too(first: int) -> None:
    """CmdSN never passes MaxCmdSN; commands that wait are sent in order."""
    made, dm = session(depth=8, window=2, cmd_sn=first)
    waiter = CountingWaiter()
    slots = [command(made, waiter) for _ in range(6)]
    assert [slot.state for slot in slots] == [SENT] * 2 + [QUEUED] * 4
    top = (first + 1) & 0xFFFFFFFF
    for index in range(6):
        top = (top + 1) & 0xFFFFFFFF
        dm.inbox.append(
            response(
                itt_of(dm.sent[index]),
                max_cmd_sn=top,
                exp_cmd_sn=(first + index + 1) & 0xFFFFFFFF,
            )
        )
        made.progress(1.0)
        assert len(dm.sent) == min(6, index + 3)
    assert [sent[0] for sent in dm.sent] == slots
    assert [cmd_sn_of(sent) for sent in dm.sent] == [(first + i) & 0xFFFFFFFF for i in range(6)]
    assert waiter.woken == 1 and waiter.pending == 0


def test_closed_window_opens() -> None:
    """tgtd starts with a closed window, LIO with a window of one command."""
    made, dm = session(window=0)
    slot = command(made, CountingWaiter())
    assert slot.state == QUEUED and not dm.sent
    nop = pdu.NopIn(itt=bhs.NO_TAG, stat_sn=100, exp_cmd_sn=1, max_cmd_sn=1)
    dm.inbox.append(nop.pack())
    made.progress(1.0)
    assert slot.state == SENT and cmd_sn_of(dm.sent[0]) == 1


def test_window_never_goes_back() -> None:
    made, dm = session(window=4)
    nop = pdu.NopIn(itt=bhs.NO_TAG, stat_sn=100, exp_cmd_sn=1, max_cmd_sn=1)
    dm.inbox.append(nop.pack())
    nonsense = pdu.NopIn(itt=bhs.NO_TAG, stat_sn=100, exp_cmd_sn=50, max_cmd_sn=10)
    dm.inbox.append(nonsense.pack())
    made.progress(1.0)
    waiter = CountingWaiter()
    for _ in range(4):
        assert command(made, waiter).state == SENT


def test_slots_run_out_and_come_back() -> None:
    made, dm = session(depth=1)
    waiter, second = CountingWaiter(), CountingWaiter()
    slot = command(made, waiter)
    assert made.queue.take_now() is None
    assert made.queue.take(second) is None and second.pending == 1
    dm.inbox.append(response(itt_of(dm.sent[0])))
    made.progress(1.0)
    made.queue.release(slot)
    assert second.pending == 0 and made.queue.take(second) is slot


def test_who_waits_for_a_slot_is_passed_by_nobody() -> None:
    """Slots are given in the order of waiting: else requests that need many slots would keep out
    those that need one."""
    made, _ = session(depth=1)
    slot = made.queue.take(CountingWaiter())
    assert slot is not None
    first, second, third = CountingWaiter(), CountingWaiter(), CountingWaiter()
    assert made.queue.take(first) is None and made.queue.take(second) is None
    made.queue.release(slot)
    assert (first.pending, second.pending) == (0, 1)
    assert made.queue.take_now() is None  # kept for ``first``, which has not taken it yet
    assert made.queue.take(third) is None and third.pending == 1
    assert made.queue.take(first) is slot
    for waiter in (second, third):
        made.queue.release(slot)
        assert waiter.pending == 0 and made.queue.take(waiter) is slot


def promised() -> tuple[Session, list[TaskSlot], CountingWaiter]:
    """A session of two slots, both taken, of which the first was given back to a waiter."""
    made, _ = session(depth=2)
    slots = [slot for _ in range(2) if (slot := made.queue.take(CountingWaiter())) is not None]
    waiter = CountingWaiter()
    assert made.queue.take(waiter) is None
    made.queue.release(slots[0])
    return made, slots, waiter


def test_the_last_that_waits_is_passed_by_nobody() -> None:
    """A slot is kept for it though no caller is on the list any more. Else one that takes a slot
    for each that it gives back would keep it out for ever."""
    made, slots, first = promised()
    second = CountingWaiter()
    assert first.woken == 1 and made.queue.take_now() is None
    assert made.queue.take(second) is None
    made.queue.release(slots[1])
    assert second.woken == 1 and made.queue.take_now() is None
    assert made.queue.take(first) is not None and made.queue.take(second) is not None
    made.queue.release(slots[1])
    assert made.queue.take_now() is slots[1]


def test_who_finds_the_slot_gone_waits_in_front() -> None:
    made, slots, first = promised()
    second = CountingWaiter()
    made.queue.shrink()  # the target is full
    assert made.queue.take(second) is None
    assert made.queue.take(first) is None
    made.queue.release(slots[1])
    assert (first.pending, second.pending) == (0, 1)


def test_a_promise_to_a_caller_that_does_not_come() -> None:
    """The slot goes to the next that waits: at once where the caller says so, else (its thread was
    interrupted) within a second."""
    made, _ = session(depth=1)
    slot = made.queue.take(CountingWaiter())
    assert slot is not None
    first, second, third = CountingWaiter(), CountingWaiter(), CountingWaiter()
    for waiter in (first, second, third):
        assert made.queue.take(waiter) is None
    made.queue.release(slot)
    made.queue.forget(first)
    assert (first.pending, second.pending, third.pending) == (0, 0, 1)
    assert made.queue.take_now() is None
    Ladder(made).tick(1.0)
    assert third.pending == 0 and made.queue.take(third) is slot


class Client(CountingWaiter):
    """A waiter of a client."""

    def __init__(self, owner: object) -> None:
        super().__init__()
        self.owner = owner


def test_clients_take_turns_where_they_wait_for_slots() -> None:
    """One that has a thousand requests does not make the others wait for all of them."""
    made, _ = session(depth=2)
    held = deque(made.queue.take_now() for _ in range(2))
    crowd = deque(Client("flood") for _ in range(1000))
    for waiter in crowd:
        assert made.queue.take(waiter) is None

    def give_back() -> None:
        slot = held.popleft()
        assert slot is not None
        made.queue.release(slot)
        came = crowd.popleft() if not crowd[0].pending else single
        held.append(made.queue.take(came))
        assert held[-1] is not None

    single = Client("single")
    for _ in range(100):  # each time it has one request, as soon as the last one has ended
        assert made.queue.take(single) is None
        give_back()
        give_back()
        assert single.pending == 0
    assert single.woken == 100 and len(crowd) == 900
    Ladder(made).tick(1.0)  # they all look whether their time is over
    for waiter in crowd:
        assert made.queue.take(waiter) is None
    assert made.queue.take(single) is None
    give_back()
    give_back()
    assert single.woken == 101


def test_clients_take_turns_where_they_wait_for_the_window() -> None:
    made, dm = session(window=1, depth=128)
    flood = [command(made, Client("flood")) for _ in range(120)]
    assert flood[0].state == SENT and flood[1].state == QUEUED
    single = command(made, Client("single"))
    for number in range(3):
        dm.inbox.append(response(itt_of(dm.sent[number]), max_cmd_sn=number + 2))
        made.progress(1.0)
    assert [slot for slot, _ in dm.sent] == [flood[0], flood[1], single, flood[2]]


def test_a_full_target_keeps_slots_back_and_gives_them_back() -> None:
    """Each refusal takes one slot out of use, down to one; each second gives one back and wakes a
    waiter for it."""
    made, _ = session(depth=3)
    slots = [made.queue.take_now() for _ in range(3)]
    made.queue.shrink()  # no slot is free at the moment
    for slot in slots:
        assert slot is not None
        made.queue.release(slot)
    assert made.queue.busy == 0
    for _ in range(5):
        made.queue.shrink()
    assert made.queue.busy == 0
    only = made.queue.take_now()
    assert only is not None and made.queue.take_now() is None and made.queue.busy == 1
    waiter = CountingWaiter()
    assert made.queue.take(waiter) is None and waiter.pending == 1
    ladder = Ladder(made)
    ladder.tick(1.0)
    assert waiter.woken == 1 and made.queue.take(waiter) is not None
    assert made.queue.take_now() is None
    ladder.tick(2.0)
    ladder.tick(3.0)
    assert (
        made.queue.take_now() is not None and made.queue.take_now() is None and made.queue.busy == 3
    )


def test_forgotten_taker_takes_nothing() -> None:
    made, _ = session(depth=1)
    slot = made.queue.take(CountingWaiter())
    assert slot is not None
    waiter = CountingWaiter()
    assert made.queue.take(waiter) is None
    made.queue.forget(waiter)
    assert waiter.pending == 0
    made.queue.release(slot)
    assert made.queue.take_now() is slot


def test_response_to_an_earlier_task_is_refused() -> None:
    """A tag names one task, not the next task in the same slot."""
    made, dm = session(depth=1)
    waiter = CountingWaiter()
    slot = command(made, waiter)
    old = itt_of(dm.sent[0])
    dm.inbox.append(response(old))
    made.progress(1.0)
    made.queue.release(slot)
    command(made, waiter)
    dm.inbox.append(response(old, stat_sn=101))
    made.progress(1.0)
    assert isinstance(made.error, RemoteProtocolError)


@given(st.binary(min_size=48, max_size=120))
def test_any_pdu_from_the_target(data: bytes) -> None:
    """Any PDU raises the documented error or nothing; the command in flight ends exactly once."""
    made, dm = session(depth=2)
    waiter = CountingWaiter()
    command(made, waiter)
    dm.inbox.append(data)
    made.progress(1.0)
    assert made.error is None or isinstance(made.error, RemoteProtocolError | ConnectionLost)
    if made.error is None:
        made.fail(ConnectionLost("end of test"))
    assert waiter.pending == 0


def test_failure_ends_everything_once() -> None:
    made, dm = session(depth=4, window=2)
    waiter, taker = CountingWaiter(), CountingWaiter()
    slots = [command(made, waiter) for _ in range(4)]
    assert made.queue.take(taker) is None
    dm.inbox.append(ConnectionLost("gone"))
    made.progress(1.0)
    assert dm.terminated and waiter.woken == 1 and taker.woken == 1
    assert all(isinstance(slot.error, ConnectionLost) for slot in slots)
    with pytest.raises(ConnectionLost, match="gone"):
        made.queue.take(CountingWaiter())
    assert made.queue.take_now() is None
    late = slots[0]
    late.waiter = waiter
    waiter.pending = 1
    made.queue.submit(late)
    assert waiter.pending == 0 and isinstance(late.error, ConnectionLost)


def test_reject_ends_the_command() -> None:
    made, dm = session()
    waiter = CountingWaiter()
    slot = command(made, waiter)
    reject = pdu.Reject(reason=4, data_length=48, stat_sn=100, exp_cmd_sn=2, max_cmd_sn=32)
    dm.inbox.append(reject.pack() + dm.sent[0][1])
    made.progress(1.0)
    assert isinstance(slot.error, CommandRejected) and "protocol error" in str(slot.error)
    assert waiter.woken == 1 and made.error is None


def test_ping_is_answered_with_its_tag() -> None:
    """The session answers a NOP-In that asks for an answer with a NOP-Out."""
    made, dm = session()
    nop = pdu.NopIn(
        itt=bhs.NO_TAG, ttt=77, lun=b"\0\5" + bytes(6), stat_sn=9, exp_cmd_sn=1, max_cmd_sn=32
    )
    dm.inbox.append(nop.pack())
    made.progress(1.0)
    answer = pdu.NopOut.unpack_from(dm.sent[0][1])
    assert (answer.ttt, answer.itt, answer.lun) == (77, bhs.NO_TAG, b"\0\5" + bytes(6))
    assert answer.opcode == bhs.NOP_OUT | bhs.IMMEDIATE and answer.cmd_sn == 1


def test_announced_drop_ends_the_session() -> None:
    made, dm = session()
    message = pdu.AsyncMessage(
        event=pdu.ASYNC_CONNECTION_DROP, stat_sn=100, exp_cmd_sn=1, max_cmd_sn=32
    )
    dm.inbox.append(message.pack())
    made.progress(1.0)
    assert isinstance(made.error, ConnectionLost) and "drop this connection" in str(made.error)


@pytest.mark.parametrize(
    ("flags", "count", "residual"), [(0x80, 0, 0), (0x82, 512, 512), (0x84, 5, -5)]
)
def test_residuals(flags: int, count: int, residual: int) -> None:
    made, dm = session()
    slot = command(made, CountingWaiter())
    dm.inbox.append(response(itt_of(dm.sent[0]), flags=flags, residual=count))
    made.progress(1.0)
    assert slot.residual == residual


def test_commands_of_a_batch_leave_together() -> None:
    made, dm = session()
    made.queue.batch = True
    waiter = CountingWaiter()
    for _ in range(3):
        command(made, waiter)
    assert not dm.sent
    made.queue.batch = False
    made.queue.flush()
    assert [cmd_sn_of(sent) for sent in dm.sent] == [1, 2, 3]


def test_full_socket_is_told_to_the_driver() -> None:
    made, dm = session()
    command(made, CountingWaiter())
    assert not driver_of(made).blocks
    dm.full = True
    command(made, CountingWaiter())
    assert driver_of(made).blocks
