"""A command that the target leaves unanswered on a living connection, while its request has time
left: it is aborted, and those that sent it may send it again. Time is an argument."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest

from iserblk.commands.command import ABORTING, ANYTHING, QUEUED, SENT, TAKEN, Unanswered
from iserblk.errors import CommandTimeout, ConnectionLost
from iserblk.initiator.session.deadlines import OVERTAKEN_S, STEP_S, WAITS_S, Ladder
from iserblk.initiator.session.ending import ANSWERS_S
from iserblk.initiator.session.session import Session
from iserblk.initiator.session.slots import TaskSlot
from iserblk.iscsi import bhs, pdu
from iserblk.scsi import opcodes
from iserblk.scsi.status import BUSY
from iserblk.scsi.tasks import NO_DATA
from tests.initiator.fake import (
    CountingWaiter,
    FakeDriver,
    driver_of,
    itt_of,
    response,
    session,
)
from tests.initiator.peer import BLOCK, Heard, Peer, disk_of, linked
from tests.initiator.tcp_peer import linked_tcp
from tests.support import logs
from tests.support.clocks import given

pytestmark = pytest.mark.logs(logs.DEADLINES, logs.RECONNECTED)

LIMIT_S = 30.0
REQUEST_S = 180.0


class Bench:
    """A session whose target answers what the test says, and is heard all the time."""

    def __init__(self, request_s: float = REQUEST_S, limit_s: float = LIMIT_S) -> None:
        self.session, self.dm = session()
        self.session.io_timeout = request_s
        self.session.command_timeout = limit_s
        self.ladder = Ladder(self.session)
        self.waiter = CountingWaiter()
        self.clock = given()

    @property
    def now(self) -> float:
        return self.clock.now

    def send(self, cdb0: int = opcodes.READ_16, first: int = 0, last: int = -1) -> TaskSlot:
        slot = self.session.queue.take_now()
        assert slot is not None
        slot.cdb[:] = bytes((cdb0,)) + bytes(15)
        slot.direction = NO_DATA
        slot.first, slot.last = first, last
        slot.deadline = self.now + self.session.io_timeout
        slot.waiter = self.waiter
        self.waiter.pending += 1
        self.session.queue.submit(slot)
        return slot

    def pass_time(self, seconds: float) -> None:
        """Second by second, while answers to others come."""
        end = self.now + seconds
        while self.now < end:
            self.clock.now = min(end, self.now + 1)
            self.session.queue.connection.last_heard = self.now
            self.ladder.tick(self.now)

    def requests(self) -> list[pdu.TaskManagementRequest]:
        return [
            pdu.TaskManagementRequest.unpack_from(sent)
            for _, sent in self.dm.sent
            if sent[0] & bhs.OPCODE_MASK == bhs.TASK_MANAGEMENT_REQUEST
        ]

    def answer(self, code: int = pdu.TMF_COMPLETE) -> None:
        """To the last request."""
        self.dm.inbox.append(
            pdu.TaskManagementResponse(
                response=code, itt=itt_of(self.dm.sent[-1]), stat_sn=100, exp_cmd_sn=2,
                max_cmd_sn=32,
            ).pack()
        )  # fmt: skip
        self.session.progress(self.now)


def test_it_is_aborted_and_may_be_sent_again() -> None:
    """Its waiter is told when the target has confirmed that, and not before: until then the target
    may use the buffer."""
    bench = Bench()
    slot = bench.send()
    bench.pass_time(LIMIT_S)
    assert bench.requests() == []
    bench.pass_time(1)  # it was seen in flight at the first tick
    (request,) = bench.requests()
    assert request.function == pdu.TMF_ABORT_TASK
    assert request.referenced_task_tag == slot.itt
    assert slot.state == ABORTING and bench.waiter.pending == 1 and not bench.dm.ended
    bench.answer()
    assert slot.state == TAKEN and bench.waiter.woken == 1
    assert isinstance(slot.error, Unanswered) and slot.error.logged
    assert "not answered within 30 s, and was aborted" in str(slot.error)
    assert [ended[0] for ended in bench.dm.ended] == [slot]


@pytest.mark.parametrize("limit_s", [REQUEST_S, math.inf])
def test_the_same_limit_for_both(limit_s: float) -> None:
    """As where a user has said how long a request may take: nothing happens before that; then the
    request fails."""
    bench = Bench(limit_s=limit_s)
    slot = bench.send()
    bench.pass_time(REQUEST_S - 1)
    assert bench.requests() == [] and slot.state == SENT
    bench.pass_time(1)
    bench.answer()
    assert isinstance(slot.error, CommandTimeout) and not isinstance(slot.error, Unanswered)


def test_the_request_has_no_time_left_when_its_command_is_aborted() -> None:
    bench = Bench(request_s=REQUEST_S)
    slot = bench.send()
    slot.deadline = bench.now + 5
    bench.pass_time(5)
    bench.answer()
    assert isinstance(slot.error, CommandTimeout) and not isinstance(slot.error, Unanswered)


def test_each_command_of_a_slot_has_its_own_time() -> None:
    bench = Bench()
    for _ in range(3):
        slot = bench.send()
        bench.pass_time(LIMIT_S - 5)
        bench.dm.inbox.append(response(slot.itt))
        bench.session.progress(bench.now)
        bench.session.queue.release(slot)
    assert bench.requests() == []


@pytest.mark.parametrize(
    "cdb0", [opcodes.SYNCHRONIZE_CACHE_10, opcodes.SYNCHRONIZE_CACHE_16, opcodes.UNMAP]
)
def test_what_takes_long_has_twice_as_much(cdb0: int) -> None:
    bench = Bench()
    bench.send(cdb0)
    bench.pass_time(2 * LIMIT_S)
    assert bench.requests() == []
    bench.pass_time(1)
    assert len(bench.requests()) == 1


def test_a_target_that_needs_longer_has_it_where_requests_have_no_limit() -> None:
    """Else it would never finish one. When all is well again, so is the limit."""
    bench = Bench(request_s=math.inf)
    for limit in (30, 60, 120, 240, 240):
        slots = [bench.send(), bench.send()]
        bench.pass_time(limit)
        assert all(slot.state == SENT for slot in slots)
        bench.pass_time(1)
        assert all(slot.state == ABORTING for slot in slots)
        for slot in slots:
            bench.dm.inbox.append(response(slot.itt))
        bench.session.progress(bench.now)
        for slot in slots:
            bench.session.queue.release(slot)
    bench.pass_time(480)
    slot = bench.send()
    bench.pass_time(LIMIT_S + 1)
    assert slot.state == ABORTING


@pytest.mark.parametrize("request_s", [REQUEST_S, math.inf])
def test_the_end_of_the_use_takes_no_time_from_a_last_flush(request_s: float) -> None:
    """A target that answers may need minutes for a large cache."""
    bench = Bench(request_s=request_s)
    slot = bench.send(opcodes.SYNCHRONIZE_CACHE_16)
    bench.session.ending.ask(bench.now)
    bench.pass_time(2 * LIMIT_S)
    assert slot.state == SENT
    bench.pass_time(1)
    bench.answer()
    assert isinstance(slot.error, Unanswered)


@pytest.mark.parametrize("cdb0", [opcodes.WRITE_16, opcodes.SYNCHRONIZE_CACHE_16])
@pytest.mark.parametrize("before", [0, 10])
def test_the_end_of_the_use_is_not_kept_up_for_ever(cdb0: int, before: int) -> None:
    """Some minutes after it was asked for, a command is sent no more when its limit is over; also
    where that has grown before."""
    bench = Bench(request_s=math.inf)
    asked = math.inf
    for count in itertools.count():
        slot = bench.send(cdb0)
        if count == before:
            asked = bench.now
            bench.session.ending.ask(asked)
        while slot.state == SENT:
            bench.pass_time(1)
        bench.answer()
        if not isinstance(slot.error, Unanswered):
            break
        bench.session.queue.release(slot)
    assert isinstance(slot.error, CommandTimeout)
    assert ANSWERS_S <= bench.now - asked <= ANSWERS_S + LIMIT_S + 2


@pytest.mark.parametrize("deadline", [REQUEST_S, math.inf])
def test_what_must_not_be_carried_out_twice(deadline: float) -> None:
    """It has all the time that its caller gives it; and where that is for ever, it ends as it would
    after its time, and is not sent again."""
    bench = Bench(request_s=deadline)
    slot = bench.send(opcodes.COMPARE_AND_WRITE, 0, ANYTHING)
    bench.pass_time(LIMIT_S + 1)
    assert bool(bench.requests()) is (deadline == math.inf)
    if deadline < math.inf:
        bench.pass_time(REQUEST_S - LIMIT_S - 1)
    bench.answer()
    assert isinstance(slot.error, CommandTimeout) and not isinstance(slot.error, Unanswered)


def test_time_in_which_this_process_did_not_run_does_not_count() -> None:
    bench = Bench()
    bench.send()
    bench.pass_time(20)
    bench.clock.now += 100
    bench.ladder.stalled(100.0, bench.now)
    bench.pass_time(LIMIT_S - 21)
    assert bench.requests() == []
    bench.pass_time(3)
    assert len(bench.requests()) == 1


def test_time_without_a_connection_does_not_count() -> None:
    """It is sent again on the next one, and has its time from then on."""
    bench = Bench()
    driver_of(bench.session).reconnect = lambda: None
    slot = bench.send()
    bench.pass_time(20)
    bench.dm.inbox.append(ConnectionLost("reset"))
    bench.session.progress(bench.now)
    bench.pass_time(20)
    assert slot.state == QUEUED
    fresh, dm = session()
    bench.session.offer(fresh)
    bench.dm = dm
    bench.session.progress(bench.now)
    bench.pass_time(LIMIT_S)
    assert slot.state == SENT and bench.requests() == []
    bench.pass_time(1)
    assert len(bench.requests()) == 1


def test_its_answer_may_come_before_that_to_the_abort() -> None:
    bench = Bench()
    slot = bench.send()
    bench.pass_time(LIMIT_S + 1)
    bench.dm.inbox.append(response(slot.itt))
    bench.session.progress(bench.now)
    assert slot.error is None and bench.waiter.woken == 1
    bench.answer(pdu.TMF_TASK_DOES_NOT_EXIST)
    bench.pass_time(OVERTAKEN_S)
    assert bench.waiter.woken == 1 and bench.session.error is None


def test_a_target_that_says_that_it_does_not_exist() -> None:
    """Its answer may be under way still: it is waited for."""
    bench = Bench()
    slot = bench.send()
    bench.pass_time(LIMIT_S + 1)
    bench.answer(pdu.TMF_TASK_DOES_NOT_EXIST)
    assert bench.waiter.pending == 1
    bench.pass_time(OVERTAKEN_S)
    assert isinstance(slot.error, Unanswered)


@pytest.mark.logs("no answer to ABORT TASK")
def test_a_target_that_does_not_answer_the_abort() -> None:
    """It gets a reset of the LUN; then the connection is cut, and the next login ends the command
    at the target."""
    bench = Bench()
    driver_of(bench.session).reconnect = lambda: None
    slot = bench.send()
    other = bench.send()
    bench.pass_time(LIMIT_S + 1 + 2 * STEP_S)
    functions = [request.function for request in bench.requests()]
    assert functions[:2] == [pdu.TMF_ABORT_TASK] * 2
    assert set(functions[2:]) == {pdu.TMF_LOGICAL_UNIT_RESET}
    assert bench.dm.disconnected and bench.waiter.pending == 2
    bench.dm.inbox.append(ConnectionLost("cut"))
    bench.session.progress(bench.now)
    assert bench.dm.terminated
    for each in (slot, other):
        assert isinstance(each.error, Unanswered) and "nor was its abort" in str(each.error)


def test_a_command_that_is_not_wanted_any_more() -> None:
    bench = Bench()
    slot = bench.send()
    bench.pass_time(LIMIT_S + 1)
    assert slot.state == ABORTING
    bench.ladder.cancel(slot, bench.now)
    bench.answer()
    assert bench.waiter.woken == 1


def test_the_log_tells_once(caplog: pytest.LogCaptureFixture) -> None:
    """When it begins, and when it ends, with the number of commands."""
    bench = Bench()
    for _ in range(3):
        bench.send()
    bench.pass_time(LIMIT_S + 1)
    for sent in bench.dm.sent[3:]:
        bench.dm.inbox.append(
            pdu.TaskManagementResponse(
                response=pdu.TMF_COMPLETE, itt=itt_of(sent), stat_sn=100, exp_cmd_sn=4,
                max_cmd_sn=32,
            ).pack()
        )  # fmt: skip
    bench.session.progress(bench.now)
    bench.pass_time(1)
    texts = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert len(texts) == 2
    assert texts[0].endswith("is unanswered for 30 s; sending ABORT TASK")
    assert "answers again" in texts[1] and texts[1].endswith("; 3 commands were aborted")
    assert bench.ladder.aborted == 3


@pytest.mark.parametrize(("request_s", "limit"), [(180, "180 s at most"), (math.inf, "as long")])
def test_the_log_tells_once_that_requests_wait(
    request_s: float, limit: str, caplog: pytest.LogCaptureFixture
) -> None:
    """For each loss of the connection that lasts, and not for each request."""
    bench = Bench(request_s=request_s)
    driver_of(bench.session).reconnect = lambda: None
    for told in ("6 s: no route", "5 s: gone"):  # the second time requests wait from its begin on
        caplog.clear()
        bench.dm.inbox.append(ConnectionLost("gone"))
        bench.session.progress(bench.now)
        bench.pass_time(WAITS_S)  # no request waits
        bench.send()
        bench.send()
        bench.session.still_absent(ConnectionLost("no route"))
        bench.pass_time(20)
        texts = [each.getMessage() for each in caplog.records if "requests wait" in each.msg]
        assert len(texts) == 1 and f"not connected for {told}; requests wait" in texts[0]
        assert f"each for {limit}" in texts[0]
        fresh, bench.dm = session()
        bench.session.offer(fresh)
        bench.session.progress(bench.now)


# --- with a wire, and a disk: what happens to the buffer ------------------------------------------

LENGTH = 16 * BLOCK  # more than goes along with a command
TRANSFERS = (opcodes.READ_16, opcodes.WRITE_16)


class Wire:
    """A disk of 1 MiB whose target the test plays, over one of the two datamovers."""

    def __init__(self, made: Session, peer: Peer) -> None:
        self.session, self.peer = made, peer
        made.command_timeout = LIMIT_S
        made.drive(FakeDriver(made))
        driver_of(made).reconnect = lambda: None
        self.core = disk_of(made)
        self.ladder = Ladder(made)
        self.waiter = CountingWaiter()
        self.clock = given()
        self.looked = 0  # at PDUs that were heard

    def commands(self) -> list[Heard]:
        self.peer.poll()
        return [
            each
            for each in self.peer.heard
            if each.opcode == bhs.SCSI_COMMAND and each.operation in TRANSFERS
        ]

    def unanswered(self, slot: TaskSlot) -> Heard:
        """The target has left the command unanswered for too long. Returns the request to abort
        it."""
        while slot.state == SENT:
            self.clock.now += 1
            self.session.queue.connection.last_heard = self.clock.now
            self.ladder.tick(self.clock.now)
            self.peer.poll()
            for each in self.peer.heard[self.looked :]:
                self.looked += 1
                if each.opcode == bhs.SCSI_COMMAND and each.operation not in TRANSFERS:
                    self.peer.respond(each, status=BUSY)  # a look at the LUN, which comes again
                    self.settle()
        (asked,) = [
            each
            for each in self.peer.heard
            if each.opcode == bhs.TASK_MANAGEMENT_REQUEST
            and int.from_bytes(each.bhs[20:24], "big") == slot.itt
        ]
        return asked

    def settle(self) -> None:
        while self.session.progress(self.clock.now):
            pass


@pytest.fixture(params=["iser", "iwarp", "tcp"])
def wire(request: pytest.FixtureRequest) -> Iterator[Wire]:
    pair = {"iser": "memory"}.get(request.param, request.param)
    made, peer = (
        linked_tcp(depth=8, io_timeout=REQUEST_S)
        if pair == "tcp"
        else linked(pair, depth=8, io_timeout=REQUEST_S)
    )
    yield Wire(made, peer)
    made.fail(ConnectionLost("closing"))
    peer.close()


def tag_of(heard: Heard) -> int:
    """By which the target addresses the buffer of a READ."""
    return heard.head.read_stag or heard.itt  # over TCP there is no STag


def test_a_read_is_sent_again_into_the_same_buffer(wire: Wire) -> None:
    """Once the abort is confirmed. What the target does for the first command after that reaches
    the buffer no more, and costs the connection."""
    buffer = bytearray(LENGTH)
    slot = wire.core.begin_read(memoryview(buffer), 0, wire.waiter)
    assert isinstance(slot, TaskSlot)
    (first,) = wire.commands()
    asked = wire.unanswered(slot)
    wire.peer.write(tag_of(first), 0, b"\1" * BLOCK)
    wire.settle()
    assert wire.waiter.pending == 1 and slot.state == ABORTING  # the buffer is not free yet
    wire.peer.complete(asked)
    wire.settle()
    assert wire.waiter.woken == 1
    rest = wire.core.ended(slot)
    assert rest is not None and wire.core.metrics.retries == 1
    reading = wire.core.read(memoryview(buffer), 0, rest.deadline)
    next(reading)
    second = wire.commands()[1]
    assert second.bhs[bhs.CDB_OFFSET :] == first.bhs[bhs.CDB_OFFSET :]
    assert tag_of(second) != tag_of(first) and second.cmd_sn != first.cmd_sn
    wire.peer.write(tag_of(second), 0, b"\2" * LENGTH)
    wire.peer.respond(second)
    wire.settle()
    with pytest.raises(StopIteration):
        next(reading)
    assert buffer == b"\2" * LENGTH
    wire.peer.write(tag_of(first), 0, b"\3" * BLOCK)
    wire.settle()
    assert buffer == b"\2" * LENGTH and wire.session.suspended is not None


def test_a_write_is_sent_again_from_the_same_buffer(wire: Wire) -> None:
    """The target cannot read from the buffer for the first command any more: it may have other
    data by then."""
    buffer = bytearray(b"\1" * LENGTH)
    slot = wire.core.begin_write(memoryview(buffer), 0, wire.waiter)
    assert isinstance(slot, TaskSlot)
    (first,) = wire.commands()
    asked = wire.unanswered(slot)
    assert wire.waiter.pending == 1
    wire.peer.complete(asked)
    wire.settle()
    rest = wire.core.ended_write(slot)
    assert rest is not None
    writing = wire.core.write(memoryview(buffer), 0, deadline=rest.deadline)
    next(writing)
    second = wire.commands()[1]
    assert second.bhs[bhs.CDB_OFFSET :] == first.bhs[bhs.CDB_OFFSET :]
    wire.peer.respond(second)
    wire.settle()
    with pytest.raises(StopIteration):
        next(writing)
    buffer[:] = b"\2" * LENGTH  # it is the caller's again
    sink = bytearray(LENGTH)
    wire.peer.read(first.head.write_stag, 0, sink)
    wire.settle()
    wire.peer.poll()
    assert b"\2" not in sink and b"\2" not in getattr(wire.peer, "sent", b"")
    assert wire.session.suspended is not None


def test_a_request_that_is_unanswered_again_and_again_fails_in_the_end(wire: Wire) -> None:
    """After io-timeout, however often its command was sent."""
    buffer = memoryview(bytearray(LENGTH))
    reading = wire.core.read(buffer, 0)
    next(reading)
    begun = wire.clock.now
    count = 0
    with pytest.raises(CommandTimeout) as raised:
        while True:
            (slot,) = [each for each in wire.session.queue.tasks if each.cdb[0] == opcodes.READ_16
                       and each.state == SENT]  # fmt: skip
            wire.peer.complete(wire.unanswered(slot))
            wire.settle()
            count += 1
            next(reading)
    assert REQUEST_S <= wire.clock.now - begun <= REQUEST_S + 2
    assert count == len(wire.commands()) == 6
    assert "did not end within 180 s" in str(raised.value)
