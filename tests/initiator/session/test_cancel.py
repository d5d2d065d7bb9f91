"""Cancelled tasks: each is aborted, without harm to the next task in its slot."""

from __future__ import annotations

from iserblk.commands.command import SENT, TAKEN
from iserblk.errors import CommandTimeout, ConnectionLost, RemoteProtocolError
from iserblk.initiator.session.deadlines import SPARE_CONTROLS, Ladder
from iserblk.initiator.session.sending import CONTROL_SLOTS
from iserblk.iscsi import bhs, pdu
from tests.initiator.fake import CountingWaiter, FakeDatamover, command, itt_of, response, session

DEPTH = CONTROL_SLOTS + 4


def _aborts(dm: FakeDatamover) -> list[pdu.TaskManagementRequest]:
    return [
        pdu.TaskManagementRequest.unpack_from(header)
        for _, header in dm.sent
        if header[0] & bhs.OPCODE_MASK == bhs.TASK_MANAGEMENT_REQUEST
    ]


def _complete(request: pdu.TaskManagementRequest) -> bytes:
    return pdu.TaskManagementResponse(
        response=pdu.TMF_COMPLETE, itt=request.itt, stat_sn=100, exp_cmd_sn=1, max_cmd_sn=32
    ).pack()


def test_more_cancelled_tasks_than_control_slots() -> None:
    """The aborts take turns; the connection stays, and a control slot stays free for a ping."""
    made, dm = session(depth=DEPTH)
    waiters = [CountingWaiter() for _ in range(DEPTH)]
    slots = [command(made, waiter) for waiter in waiters]
    ladder = Ladder(made)
    for slot in slots:
        ladder.cancel(slot, 1.0)
    assert len(_aborts(dm)) == CONTROL_SLOTS - SPARE_CONTROLS
    answered = 0
    while answered < len(_aborts(dm)):
        dm.inbox.append(_complete(_aborts(dm)[answered]))
        answered += 1
        made.progress(2.0)
    assert answered == DEPTH
    assert not dm.disconnected and made.error is None
    assert all(waiter.woken == 1 for waiter in waiters)
    assert all(isinstance(slot.error, CommandTimeout) for slot in slots)


def test_a_task_that_ends_while_its_abort_waits_for_a_slot() -> None:
    made, dm = session(depth=DEPTH)
    waiter = CountingWaiter()
    slots = [command(made, waiter) for _ in range(DEPTH)]
    ladder = Ladder(made)
    for slot in slots:
        ladder.cancel(slot, 1.0)
    sent = _aborts(dm)
    last = slots[-1]
    assert last.itt not in {request.referenced_task_tag for request in sent}
    dm.inbox.append(response(last.itt))
    dm.inbox.extend(map(_complete, sent))
    made.progress(2.0)
    assert last.state == TAKEN and last.error is None
    assert last.itt not in {request.referenced_task_tag for request in _aborts(dm)}


def test_a_late_answer_does_not_end_the_slots_next_task() -> None:
    """A task ends by itself, its slot is used again, then the answer to its abort comes."""
    made, dm = session()
    first = CountingWaiter()
    slot = command(made, first)
    ladder = Ladder(made)
    ladder.cancel(slot, 1.0)
    dm.inbox.append(response(slot.itt))
    made.progress(2.0)
    assert first.woken == 1 and slot.error is None
    made.queue.release(slot)
    second = CountingWaiter()
    assert command(made, second) is slot
    dm.inbox.append(_complete(_aborts(dm)[0]))
    made.progress(3.0)
    assert slot.state == SENT and second.pending == 1
    dm.inbox.append(response(itt_of(dm.sent[-1])))
    made.progress(4.0)
    assert second.woken == 1 and slot.error is None and made.error is None


def test_each_task_gets_an_error_object_of_its_own() -> None:
    """The errors are raised in several threads at once, so tasks must not share an object."""
    for error in (ConnectionLost("gone"), RemoteProtocolError("DDP", "bad", (1, 2, 3))):
        made, dm = session()
        waiter = CountingWaiter()
        slots = [command(made, waiter) for _ in range(4)]
        dm.inbox.append(error)
        made.progress(1.0)
        errors = [slot.error for slot in slots]
        assert len({id(each) for each in (*errors, error)}) == 5
        for each in errors:
            assert type(each) is type(error) and str(each) == str(error)
            if isinstance(each, RemoteProtocolError):
                assert (each.layer, each.terminate) == ("DDP", (1, 2, 3))
