"""The command window of a session (RFC 7143 section 4.2.2.1), over a datamover that only writes
down what it is given."""

from __future__ import annotations

import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iserblk.commands.command import QUEUED, SENT, TAKEN
from iserblk.datamover.seam import InitiatorUser, PduSlot
from iserblk.errors import RemoteProtocolError
from iserblk.initiator.session.sending import CONTROL_SLOTS
from iserblk.initiator.session.session import Session
from iserblk.initiator.session.slots import TaskSlot
from iserblk.iscsi import bhs, pdu
from iserblk.iscsi.keys import SessionParameters
from iserblk.scsi.tasks import NO_DATA

MASK = 0xFFFFFFFF
DEPTH = 8


class Datamover:
    """The part of InitiatorDatamover that a session calls for commands. ``sent``: PDUs in order."""

    user: InitiatorUser

    def __init__(self) -> None:
        self.queued: list[object] = []
        self.sent: list[pdu.Pdu] = []

    def notice_key_values(self, parameters: object) -> None:
        assert isinstance(parameters, SessionParameters)

    def enable_datamover(self) -> Datamover:
        assert not self.sent
        return self

    def send_control(self, slot: PduSlot) -> None:
        kind = pdu.BY_OPCODE[slot.bhs[0] & bhs.OPCODE_MASK]
        self.sent.append(kind.unpack_from(slot.bhs))

    def deallocate_task_resources(self, slot: PduSlot, invalidated: int) -> None:
        assert invalidated == 0


class Waiter:
    def __init__(self) -> None:
        self.pending = 0

    def task_done(self) -> None:
        self.pending -= 1


class Ends:
    """A session, and methods that deliver PDUs of its target."""

    def __init__(self, cmd_sn: int, max_cmd_sn: int) -> None:
        self.dm = Datamover()
        slots = [TaskSlot(index) for index in range(DEPTH + CONTROL_SLOTS)]
        for slot in slots:
            slot.bhs = memoryview(bytearray(bhs.BHS_LENGTH))
            slot.inline = memoryview(bytearray(512))
        self.session = Session(self.dm, slots, SessionParameters(), "portal", 30.0)  # type: ignore[arg-type]
        self.session.start(cmd_sn, cmd_sn, max_cmd_sn, 50)
        self.waiter = Waiter()

    def submit(self, count: int = 1) -> list[TaskSlot]:
        slots = []
        for _ in range(count):
            slot = self.session.queue.take(self.waiter)
            assert slot is not None
            slot.direction = NO_DATA
            slot.waiter = self.waiter
            self.waiter.pending += 1
            self.session.queue.submit(slot)
            slots.append(slot)
        return slots

    def receive(self, message: pdu.Pdu) -> None:
        self.dm.user.control_notify(memoryview(message.pack()), 0, 0)

    def respond(self, slot: TaskSlot, exp_cmd_sn: int, max_cmd_sn: int, stat_sn: int = 50) -> None:
        self.receive(
            pdu.ScsiResponse(
                status=0,
                itt=slot.itt,
                stat_sn=stat_sn,
                exp_cmd_sn=exp_cmd_sn & MASK,
                max_cmd_sn=max_cmd_sn & MASK,
            )
        )

    def nop_in(self, exp_cmd_sn: int, max_cmd_sn: int, stat_sn: int = 50) -> None:
        self.receive(
            pdu.NopIn(
                itt=bhs.NO_TAG,
                stat_sn=stat_sn,
                exp_cmd_sn=exp_cmd_sn & MASK,
                max_cmd_sn=max_cmd_sn & MASK,
            )
        )

    @property
    def numbers(self) -> list[int]:
        """CmdSN of the commands that were sent."""
        return [command.cmd_sn for command in self.dm.sent if isinstance(command, pdu.ScsiCommand)]


STARTS = pytest.mark.parametrize("start", [1, 0x7FFFFFFE, 0x80000000, MASK - 2, MASK])


@STARTS
def test_numbers_go_up_by_one_and_wrap(start: int) -> None:
    ends = Ends(start, (start + 7) & MASK)
    ends.submit(8)
    assert ends.numbers == [(start + i) & MASK for i in range(8)]


@STARTS
def test_closed_until_the_target_opens_it(start: int) -> None:
    """tgtd begins with a closed window: commands wait in order, and go out when it opens."""
    ends = Ends(start, (start - 1) & MASK)
    slots = ends.submit(3)
    assert ends.numbers == [] and all(slot.state == QUEUED for slot in slots)
    ends.nop_in(start, start + 1)
    assert ends.numbers == [start, (start + 1) & MASK]
    assert [slot.state for slot in slots] == [SENT, SENT, QUEUED]


@STARTS
def test_window_of_one(start: int) -> None:
    """LIO begins with a window of one command, and opens it with the first response."""
    ends = Ends(start, start)
    first, second, third = ends.submit(3)
    assert ends.numbers == [start]
    ends.respond(first, start + 1, start + 64)
    assert first.state == TAKEN
    assert (second.state, third.state) == (SENT, SENT)
    assert ends.numbers == [(start + i) & MASK for i in range(3)]


@STARTS
def test_a_later_command_does_not_overtake_a_waiting_one(start: int) -> None:
    ends = Ends(start, start)
    first, second = ends.submit(2)
    ends.respond(first, start + 1, start + 1)
    (third,) = ends.submit()
    assert (second.state, third.state) == (SENT, QUEUED)
    assert [command.itt for command in ends.dm.sent if isinstance(command, pdu.ScsiCommand)] == [
        first.itt,
        second.itt,
    ]


@STARTS
def test_max_cmd_sn_never_goes_back(start: int) -> None:
    ends = Ends(start, (start + 3) & MASK)
    ends.nop_in(start, start + 1)
    ends.submit(4)
    assert len(ends.numbers) == 4


@STARTS
def test_a_window_that_is_none_is_ignored(start: int) -> None:
    """MaxCmdSN below ExpCmdSN - 1: the session ignores both numbers."""
    ends = Ends(start, start)
    slots = ends.submit(2)
    ends.nop_in(start + 20, start + 5)
    assert slots[1].state == QUEUED
    ends.nop_in(start + 2, start + 1)  # the target is full: valid
    assert slots[1].state == SENT  # MaxCmdSN has reached the second command's number


@STARTS
@pytest.mark.parametrize("step", [1, 3])
def test_what_the_target_has_taken(start: int, step: int) -> None:
    """ExpCmdSN acknowledges the numbers before it, across 2^32, and never goes back."""
    ends = Ends(start, start + 7)
    ends.submit(8)
    queue = ends.session.queue
    for taken in range(0, 9, step):
        ends.nop_in(start + taken, start + 7)
        acknowledged = [queue.acknowledged(number) for number in ends.numbers]
        assert acknowledged == [index < taken for index in range(8)]
    ends.nop_in(start + 8, start + 7)
    ends.nop_in(start + 2, start + 7)  # older: it was overtaken
    assert all(queue.acknowledged(number) for number in ends.numbers)


@STARTS
def test_immediate_commands_use_no_number_and_pass_a_closed_window(start: int) -> None:
    ends = Ends(start, start)
    ends.submit(2)
    control = ends.session.queue.take_control()
    assert control is not None
    pdu.NopOut(itt=0, cmd_sn=0, exp_stat_sn=0).pack_into(control.bhs)
    ends.waiter.pending += 1
    ends.session.queue.send_immediate(control, ends.waiter)
    ping = ends.dm.sent[-1]
    assert isinstance(ping, pdu.NopOut)
    # It carries the next command's CmdSN and does not use it up.
    assert (ping.cmd_sn, ping.exp_stat_sn) == ((start + 1) & MASK, 50)
    ends.nop_in(start + 1, start + 1)
    assert ends.numbers == [start, (start + 1) & MASK]


def test_status_is_acknowledged() -> None:
    """ExpStatSN follows every PDU that has a StatSN of its own, across the wrap."""
    ends = Ends(1, 64)
    (first,) = ends.submit()
    ends.respond(first, 2, 64, stat_sn=MASK)
    ends.nop_in(2, 64, stat_sn=777)  # not the PDU's own StatSN, as its ITT is reserved
    ends.submit()
    assert isinstance(ends.dm.sent[-1], pdu.ScsiCommand)
    assert ends.dm.sent[-1].exp_stat_sn == 0


@pytest.mark.parametrize("itt", [0, 0x00002001, 0xFFFFFFFE, bhs.NO_TAG])
def test_response_to_no_task(itt: int) -> None:
    ends = Ends(1, 64)
    ends.submit()
    with pytest.raises(RemoteProtocolError, match="no such task"):
        ends.receive(pdu.ScsiResponse(status=0, itt=itt, stat_sn=50, exp_cmd_sn=2, max_cmd_sn=64))


def test_response_comes_once() -> None:
    ends = Ends(1, 64)
    (slot,) = ends.submit()
    ends.respond(slot, 2, 64)
    with pytest.raises(RemoteProtocolError, match="no such task"):
        ends.respond(slot, 2, 64)


@given(
    st.integers(0, MASK),
    st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 6)), max_size=30),
)
def test_never_beyond_the_window(start: int, script: list[tuple[int, int]]) -> None:
    """Whatever numbers the target sends: no command goes out above the highest MaxCmdSN it ever
    sent, or out of order, and none waits that may go out."""
    ends = Ends(start, (start - 1) & MASK)
    highest, submitted, done = -1, 0, 0  # as distances from ``start``
    waiting: list[TaskSlot] = []
    for exp, opening in script:
        if len(waiting) < DEPTH:
            waiting += ends.submit()
            submitted += 1
        elif waiting[0].state == SENT:
            slot = waiting.pop(0)
            done += 1
            ends.respond(slot, start + done, start + max(highest, done - 1))
            highest = max(highest, done - 1)
            ends.session.queue.release(slot)
        exp_cmd_sn = max(0, len(ends.numbers) + exp)
        limit = exp_cmd_sn + opening - 2
        ends.nop_in(start + exp_cmd_sn, start + limit)
        if limit >= exp_cmd_sn - 1:
            highest = max(highest, limit)
        count = len(ends.numbers)
        assert ends.numbers == [(start + i) & MASK for i in range(count)]
        assert count == min(submitted, highest + 1)


def test_a_slot_that_is_given_back_keeps_nothing_of_its_caller() -> None:
    """A waiter may have the buffers of its request; the next command of the slot may be far off."""
    ends = Ends(1, 8)
    slot = ends.submit()[0]
    ends.respond(slot, 2, 9)
    waiter = weakref.ref(ends.waiter)
    ends.waiter = Waiter()
    assert waiter() is not None
    ends.session.queue.release(slot)
    assert waiter() is None
