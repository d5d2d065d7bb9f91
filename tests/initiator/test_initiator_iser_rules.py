"""What RFC 7145 asks of an initiator, seen by a target: each message that leaves, and when STags
open and close."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import trio

from iserblk.commands.running import fill_read, fill_write
from iserblk.datamover.iser import CONTROL, MINIMUM_LENGTH, RSV, WSV, ControlHeader
from iserblk.datamover.iser_initiator import IserInitiator
from iserblk.errors import (
    CommandRejected,
    CommandTimeout,
    ConnectionLost,
    RemoteProtocolError,
    TransportError,
)
from iserblk.initiator.connecting.login import Login, over_rdma
from iserblk.initiator.connecting.send_targets import Discovery
from iserblk.initiator.session.deadlines import IDLE_S, Ladder
from iserblk.initiator.session.logout import fill_logout
from iserblk.initiator.session.sending import CONTROL_SLOTS
from iserblk.initiator.session.session import UNEXPECTED, Session
from iserblk.initiator.session.slots import TaskSlot
from iserblk.iscsi import bhs, pdu
from iserblk.iscsi.keys import SessionParameters
from iserblk.iscsi.text import encode
from iserblk.options import Options
from iserblk.rcap import seam
from iserblk.rcap.inprocess import READ_RESPONSE, MemoryQueuePair, Message, memory_pair
from iserblk.scsi.tasks import NO_DATA
from iserblk.url import parse_url
from tests.initiator.fake import CountingWaiter, FakeDriver, response
from tests.support import logs
from tests.target.iser_client import IQN, IserClient

pytestmark = [pytest.mark.logs(logs.DEADLINES), pytest.mark.usefixtures("clock")]

LUN = b"\0\1" + bytes(6)
DATA = bytes((7 * j + (j >> 8)) & 255 for j in range(65536))
HEAD = bytes((CONTROL,)) + bytes(27)
DEPTH = 4


@dataclass(frozen=True)
class Sent:
    """A PDU of the initiator. ``kind``: the work request's opcode."""

    kind: int
    header: ControlHeader
    bhs: bytes
    data: bytes

    def number(self, offset: int) -> int:
        return int.from_bytes(self.bhs[offset : offset + 4], "big")


class Link:
    """A session and its far end, a bare queue pair. ``sent``: every message of the session.
    ``windows``: our STags may be invalidated by the target; ``reply``: its private data."""

    def __init__(
        self, immediate: bool = False, windows: bool = True, reply: bytes = b"", **parameters: int
    ) -> None:
        ours, self.theirs = memory_pair(
            receive_size=MINIMUM_LENGTH + 8192, private_data=(b"", reply)
        )
        ours.can_receive_invalidate = windows
        self.sent: list[Message] = []
        ours.intercept = self._left
        self.datamover = IserInitiator(ours, 8192)
        self.slots = [TaskSlot(index) for index in range(DEPTH + CONTROL_SLOTS)]
        self.datamover.allocate_connection_resources(list(self.slots), UNEXPECTED)
        agreed = SessionParameters(immediate_data=immediate, **parameters)  # type: ignore[arg-type]
        self.session = Session(self.datamover, self.slots, agreed, "portal:3260", 30.0)
        self.session.start(1, 1, 64, 100)
        self.theirs.post_receive(1000)
        self.stat_sn = 99

    def _left(self, message: Message) -> bool:
        self.sent.append(message)
        return True

    @property
    def pdus(self) -> list[Sent]:
        return [
            Sent(
                each.kind,
                ControlHeader.unpack_from(each.data),
                each.data[28:MINIMUM_LENGTH],
                each.data[MINIMUM_LENGTH:],
            )
            for each in self.sent
            if each.kind <= seam.SEND_SE_INVALIDATE
        ]

    def take(self, waiter: CountingWaiter) -> TaskSlot:
        slot = self.session.queue.take_now()
        assert slot is not None
        slot.cdb[:] = bytes(16)
        slot.waiter = waiter
        waiter.pending += 1
        return slot

    def read(self, buffer: bytearray, waiter: CountingWaiter | None = None) -> TaskSlot:
        slot = self.take(waiter or CountingWaiter())
        fill_read(slot, LUN, memoryview(buffer))
        self.session.queue.submit(slot)
        return slot

    def write(self, data: bytes) -> TaskSlot:
        slot = self.take(CountingWaiter())
        fill_write(slot, LUN, memoryview(data))
        self.session.queue.submit(slot)
        return slot

    def post(self, opcode: int, data: bytes | bytearray, stag: int = 0, to: int = 0) -> None:
        request = seam.WorkRequest(opcode)
        request.data, request.stag, request.to = memoryview(data), stag, to
        self.theirs.post([request])

    def respond(
        self, itt: int, invalidate: int = 0, opcode: int | None = None, head: bytes = HEAD,
        **fields: int,
    ) -> None:  # fmt: skip
        self.stat_sn += 1
        if opcode is None:
            opcode = seam.SEND_SE_INVALIDATE if invalidate else seam.SEND_SE
        unit = response(itt, self.stat_sn, 64, **fields)  # type: ignore[arg-type]
        self.post(opcode, head + unit, invalidate)
        self.session.progress(1.0)

    def is_open(self, stag: int) -> bool:
        """Whether the target may use the STag. Closing a connection takes the memory away."""
        region = self.datamover.qp.stags.find(stag)  # type: ignore[attr-defined]
        return region is not None and region.length > 0


@pytest.fixture
def link() -> Link:
    return Link()


# -- commands ------------------------------------------------------------------------------------


def test_a_read(link: Link) -> None:
    """One Send with the Read STag; the target may write what the command asks for, no more.

    proves: ISER-2.4.1-3, ISER-7.1-5, ISER-7.3.1-1, ISER-7.3.1-10, ISER-7.3.1-11, ISER-7.3.1-12
    proves: ISER-7.3.1-14, ISER-9.2-1, ISER-9.2-5, ISER-9.2-6, ISER-9.2-8, ISER-7145-9.2-1
    proves: ISER-9.5.2-1, ISER-9.5.2-2, ISER-9.5.2-3, ISER-9.5.2-7
    """
    buffer = bytearray(4096)
    waiter = CountingWaiter()
    slot = link.read(buffer, waiter)
    (asked,) = link.pdus
    stag = asked.header.read_stag
    assert asked.kind == seam.SEND_SE
    assert asked.header == (CONTROL | RSV, 0, 0, stag, slot.base) and stag
    assert link.sent[0].data[1:16] == bytes(15)  # reserved, Write STag, Write Base Offset
    assert asked.bhs[0] == bhs.SCSI_COMMAND and asked.data == b""
    assert asked.number(20) == 4096  # Expected Data Transfer Length
    link.post(seam.RDMA_WRITE, DATA[:4096], stag, slot.base)
    link.session.progress(1.0)
    assert waiter.pending == 1 and buffer == DATA[:4096]
    link.respond(slot.itt, stag)
    assert waiter.woken == 1 and slot.error is None
    link.read(buffer)
    buffer[:] = bytes(4096)
    link.post(seam.RDMA_WRITE, b"xx", slot.stag, slot.base + 4095)
    link.session.progress(1.0)
    assert isinstance(link.session.error, RemoteProtocolError)
    assert not any(buffer)


def test_a_write(link: Link) -> None:
    """One Send with the Write STag; the target reads all of the buffer; no Data-Out follows.

    proves: ISER-7.3.1-1, ISER-7.3.1-2, ISER-7.3.1-4, ISER-7.3.1-7, ISER-7.3.1-9, ISER-7.3.4-6
    proves: ISER-7.3.6-21, ISER-9.2-1, ISER-9.2-4, ISER-9.2-7, ISER-9.2-8, ISER-7145-6.9-2
    proves: ISER-7145-9.2-2, ISER-9.5.1-1, ISER-9.5.1-3, ISER-9.5.1-9
    """
    slot = link.write(DATA)
    (asked,) = link.pdus
    stag = asked.header.write_stag
    assert asked.kind == seam.SEND_SE
    assert asked.header == (CONTROL | WSV, stag, slot.base, 0, 0) and stag
    assert link.sent[0].data[1:4] + link.sent[0].data[16:28] == bytes(15)
    assert asked.number(20) == len(DATA) and asked.data == b""
    sink = bytearray(len(DATA))
    link.post(seam.RDMA_READ, sink, stag, slot.base)
    link.session.progress(1.0)
    link.theirs.progress(0.0)
    assert sink == DATA
    link.respond(slot.itt, stag)
    assert slot.waiter.pending == 0 and slot.error is None
    assert [each.kind for each in link.sent] == [seam.SEND_SE, READ_RESPONSE]


@pytest.mark.parametrize("limit", ["first_burst_length", "target_recv_data_segment_length"])
@pytest.mark.parametrize("size", [512, 1024, 1536])
def test_immediate_data(size: int, limit: str) -> None:
    """Immediate data travels with its command, and then nothing is advertised. No PDU is longer
    than the target takes.

    proves: ISER-2.4.1-2, ISER-6.2-3, ISER-6.4-3, ISER-7.3.1-3, ISER-7.3.1-5, ISER-7.3.1-6
    proves: ISER-9.5.1-2
    """
    link = Link(immediate=True, **{limit: 1024})  # type: ignore[arg-type]
    slot = link.write(DATA[:size])
    (asked,) = link.pdus
    whole = size <= 1024
    assert asked.data == (DATA[:size] if whole else b"")
    assert asked.number(4) == len(asked.data)  # DataSegmentLength
    assert asked.header.flags == (CONTROL if whole else CONTROL | WSV)
    assert bool(slot.stag) is not whole


def test_a_command_without_data_advertises_nothing(link: Link) -> None:
    """proves: ISER-9.2-6, ISER-9.2-7, ISER-7145-9.2-1, ISER-7145-9.2-2"""
    slot = link.take(CountingWaiter())
    slot.length, slot.direction = 0, NO_DATA
    link.session.queue.submit(slot)
    assert link.sent[0].data[:28] == HEAD


def test_only_the_target_moves_data(link: Link) -> None:
    """Neither RDMA Write nor RDMA Read comes from an initiator.

    proves: ISER-2.3-3, ISER-2.4.3-1, ISER-2.4.4-1
    """
    reading, writing = link.read(bytearray(8192)), link.write(DATA)
    link.post(seam.RDMA_WRITE, DATA[:8192], reading.stag, reading.base)
    link.post(seam.RDMA_READ, bytearray(len(DATA)), writing.stag, writing.base)
    for slot in (reading, writing):
        link.respond(slot.itt, slot.stag)
        assert slot.error is None
    assert {each.kind for each in link.sent} == {seam.SEND_SE, READ_RESPONSE}


def test_control_pdus_are_sends(link: Link) -> None:
    """Each control PDU is a Send with Solicited Event, without STags.

    proves: ISER-5.2.1-1, ISER-5.2.1-2, ISER-7.3.3-1, ISER-7.3.10-1, ISER-7.3.13-1, ISER-7.3.13-2
    """
    Ladder(link.session).tick(link.session.last_heard + IDLE_S)
    slot = link.read(bytearray(512))
    Ladder(link.session).abort(slot, 1.0)
    control = link.session.queue.take_control()
    assert control is not None
    fill_logout(control)
    waiter = CountingWaiter()
    waiter.pending = 1
    link.session.queue.send_immediate(control, waiter)
    ping, _, abort, logout = link.pdus
    assert ping.bhs[0] & bhs.OPCODE_MASK == bhs.NOP_OUT
    assert abort.bhs[0] & bhs.OPCODE_MASK == bhs.TASK_MANAGEMENT_REQUEST
    assert logout.bhs[0] & bhs.OPCODE_MASK == bhs.LOGOUT_REQUEST
    for each in (ping, abort, logout):
        assert (each.kind, each.header) == (seam.SEND_SE, (CONTROL, 0, 0, 0, 0))
    answer = pdu.LogoutResponse(
        response=0, itt=logout.number(16), stat_sn=100, exp_cmd_sn=2, max_cmd_sn=64
    )
    link.post(seam.SEND_SE, HEAD + answer.pack())
    link.session.progress(1.0)
    assert waiter.woken == 1


def test_no_ping_carries_data() -> None:
    """Neither our own NOP-Out nor the answer to a ping that brings data has ping data, so none is
    longer than InitiatorRecvDataSegmentLength allows.

    proves: ISER-7145-6.2-2
    """
    link = Link(initiator_recv_data_segment_length=512)
    Ladder(link.session).tick(link.session.last_heard + IDLE_S)
    asked = pdu.NopIn(
        itt=bhs.NO_TAG, ttt=7, stat_sn=100, exp_cmd_sn=1, max_cmd_sn=64, data_length=4096
    )
    link.post(seam.SEND_SE, HEAD + asked.pack() + DATA[:4096])
    link.session.progress(1.0)
    ping, pong = link.pdus
    for each in (ping, pong):
        assert each.bhs[0] & bhs.OPCODE_MASK == bhs.NOP_OUT
        assert each.number(4) == 0 and each.data == b""  # no data segment
    assert ping.number(16) != bhs.NO_TAG and pong.number(20) == 7


@pytest.mark.parametrize("write", [False, True])
def test_a_ping_tells_a_target_that_moves_data_of_the_numbers(link: Link, write: bool) -> None:
    """While a task is in flight and nothing but RDMA comes, a NOP-Out asks for ExpCmdSN and
    MaxCmdSN; the task goes on.

    proves: ISER-7.3.5-22, ISER-7.3.6-19
    """
    buffer = bytearray(DATA)
    slot = link.write(DATA) if write else link.read(buffer)
    slot.deadline = link.session.last_heard + 10 * IDLE_S
    if write:
        link.post(seam.RDMA_READ, bytearray(512), slot.stag, slot.base)
    else:
        link.post(seam.RDMA_WRITE, DATA[:512], slot.stag, slot.base)
    link.session.progress(1.0)
    Ladder(link.session).tick(link.session.last_heard + IDLE_S)
    ping = link.pdus[-1]
    assert ping.bhs[0] & bhs.OPCODE_MASK == bhs.NOP_OUT and ping.number(16) != bhs.NO_TAG
    answer = pdu.NopIn(itt=ping.number(16), stat_sn=100, exp_cmd_sn=2, max_cmd_sn=4711)
    link.post(seam.SEND_SE, HEAD + answer.pack())
    link.session.progress(2.0)
    assert link.session.queue.max_cmd_sn == 4711
    assert slot.waiter.pending == 1 and link.is_open(slot.stag)
    link.respond(slot.itt)
    assert slot.waiter.pending == 0 and slot.error is None


@pytest.mark.logs(logs.ASYNC_MESSAGE)
@pytest.mark.parametrize("event", [pdu.ASYNC_LOGOUT_REQUEST, pdu.ASYNC_NEGOTIATE])
def test_no_login_follows_on_the_same_connection(link: Link, event: int) -> None:
    """A target that wants to negotiate anew gets a Logout, not a Login PDU.

    proves: ISER-7.3.9-2
    """
    driver = FakeDriver(link.session)
    driver.reconnect = lambda: None
    link.session.drive(driver)
    asked = pdu.AsyncMessage(event=event, stat_sn=100, exp_cmd_sn=1, max_cmd_sn=64, parameter3=20)
    link.post(seam.SEND_SE, HEAD + asked.pack())
    link.session.progress(1.0)
    link.session.progress(2.0)
    assert [each.bhs[0] & bhs.OPCODE_MASK for each in link.pdus] == [bhs.LOGOUT_REQUEST]


@pytest.mark.logs(logs.REJECTED)
@pytest.mark.parametrize("too_many", [False, True])
def test_each_answer_finds_a_receive(link: Link, too_many: bool) -> None:
    """One receive for the answer to each request that may be in flight (command and response, or
    Reject; task management, logout and ping, with theirs), and for the unexpected PDUs besides; not
    one more.

    proves: ISER-8.1.1.1-2
    """
    queue = link.session.queue
    slots = [link.read(bytearray(512)) for _ in range(DEPTH)]
    control = CountingWaiter()
    requests: list[pdu.Pdu] = []
    while (slot := queue.take_control()) is not None:
        kind = len(requests) % 3
        if kind == 0:
            request: pdu.Pdu = pdu.TaskManagementRequest(
                function=pdu.TMF_ABORT_TASK, lun=LUN, itt=0, cmd_sn=0, exp_stat_sn=0
            )
        elif kind == 1:
            request = pdu.NopOut(lun=bytes(8), itt=0, cmd_sn=0, exp_stat_sn=0)
        else:
            request = pdu.LogoutRequest(reason=0, itt=0, cmd_sn=0, exp_stat_sn=0)
        request.pack_into(slot.bhs)
        requests.append(request)
        control.pending += 1
        queue.send_immediate(slot, control)
    assert len(requests) == CONTROL_SLOTS >= 3
    numbers: dict[str, Any] = {"stat_sn": 100, "exp_cmd_sn": 1, "max_cmd_sn": 64}
    answers: list[pdu.Pdu] = [
        pdu.NopIn(itt=bhs.NO_TAG, **numbers) for _ in range(UNEXPECTED + too_many)
    ]
    for sent in link.pdus[DEPTH:]:
        opcode, itt = sent.bhs[0] & bhs.OPCODE_MASK, sent.number(16)
        if opcode == bhs.NOP_OUT:
            answers.append(pdu.NopIn(itt=itt, **numbers))
        elif opcode == bhs.LOGOUT_REQUEST:
            answers.append(pdu.LogoutResponse(response=0, itt=itt, **numbers))
        else:
            answers.append(pdu.TaskManagementResponse(response=0, itt=itt, **numbers))
    *answered, rejected = slots
    answers += [pdu.ScsiResponse(itt=slot.itt, status=0, **numbers) for slot in answered]
    for answer in answers:
        link.post(seam.SEND_SE, HEAD + answer.pack())
    reject = pdu.Reject(reason=pdu.REJECT_PROTOCOL_ERROR, data_length=48, **numbers)
    link.post(seam.SEND_SE, HEAD + reject.pack() + link.pdus[DEPTH - 1].bhs)
    link.session.progress(1.0)
    link.session.progress(1.0)  # an error comes behind what was good
    if too_many:
        assert isinstance(link.session.error, RemoteProtocolError)
        return
    assert link.session.error is None and control.pending == 0
    assert [slot.error for slot in answered] == [None] * (DEPTH - 1)
    assert isinstance(rejected.error, CommandRejected)


def test_an_abort_keeps_the_stag_until_it_is_answered(link: Link) -> None:
    """Data that is on its way while its task is aborted still lands, and costs no connection."""
    buffer = bytearray(512)
    slot = link.read(buffer)
    stag = slot.stag
    Ladder(link.session).abort(slot, 1.0)
    abort = link.pdus[-1]
    link.post(seam.RDMA_WRITE, DATA[:512], stag, slot.base)
    link.session.progress(1.0)
    assert buffer == DATA[:512] and link.is_open(stag)
    answer = pdu.TaskManagementResponse(
        response=pdu.TMF_COMPLETE, itt=abort.number(16), stat_sn=100, exp_cmd_sn=2, max_cmd_sn=64
    )
    link.post(seam.SEND_SE, HEAD + answer.pack())
    link.session.progress(1.0)
    assert link.session.error is None and not link.is_open(stag)
    assert slot.waiter.pending == 0 and isinstance(slot.error, CommandTimeout)


# shows: SYSTEM-33
@pytest.mark.parametrize("opcode", [seam.SEND, seam.SEND_SE])
def test_any_kind_of_response_is_taken(link: Link, opcode: int) -> None:
    """A response may come with a solicited event or without, and with any bits in its iSER header
    beside the opcode.

    proves: ISER-7145-1.5.2-6, ISER-9.2-2, ISER-9.2-3, ISER-9.2-9, ISER-7145-9.2-1
    proves: ISER-7145-9.2-2
    """
    slot = link.read(bytearray(512))
    link.respond(slot.itt, opcode=opcode, head=b"\x13" + b"\xff" * 27)
    assert slot.waiter.pending == 0 and link.session.error is None


# -- STags ---------------------------------------------------------------------------------------


class _Looker(CountingWaiter):
    """A waiter that looks at ``link`` when the task ends."""

    def __init__(self, link: Link) -> None:
        super().__init__()
        self.link = link
        self.open: list[bool] = []
        self.stag = 0

    def task_done(self) -> None:
        super().task_done()
        self.open.append(self.link.is_open(self.stag))


@pytest.mark.parametrize("status", [0, 2, 8])
@pytest.mark.parametrize("remote", [True, False])
def test_stags_are_closed_before_anybody_hears_of_the_end(
    link: Link, remote: bool, status: int
) -> None:
    """The response invalidates the STag, or else the initiator does, whatever the status.

    proves: ISER-3.1.9-2, ISER-7.3.2-12, ISER-7.3.2-13, ISER-7.3.2-14, ISER-7145-1.5.1-1
    proves: ISER-7145-1.5.1-3, ISER-7145-1.5.1-4, ISER-7145-7.3.2-1, ISER-7145-11-2
    proves: ISER-7145-11-3, ISER-7145-11-4
    """
    waiter = _Looker(link)
    buffer = bytearray(512)
    slot = link.read(buffer, waiter)
    waiter.stag = stag = slot.stag
    assert link.is_open(stag)
    link.respond(slot.itt, stag if remote else 0, status=status)
    assert waiter.open == [False] and slot.status == status
    link.post(seam.RDMA_WRITE, b"late", stag, slot.base)
    link.session.progress(1.0)
    assert isinstance(link.session.error, RemoteProtocolError)
    assert not any(buffer)


def test_each_task_has_stags_of_its_own(link: Link) -> None:
    """A response closes the STags of its Initiator Task Tag alone, in any order of responses.

    proves: ISER-7.3.1-8, ISER-7.3.1-13
    """
    slots = [link.read(bytearray(512)), link.write(DATA), link.read(bytearray(512))]
    stags = [slot.stag for slot in slots]
    closed: set[int] = set()
    for index in (1, 2, 0):
        link.respond(slots[index].itt)
        closed.add(stags[index])
        assert [link.is_open(stag) for stag in stags] == [stag not in closed for stag in stags]


def test_a_response_that_invalidates_the_wrong_stag(link: Link) -> None:
    """The automatic invalidation is looked at. proves: ISER-2.4.1-4, ISER-7.3.2-10,
    ISER-10.1.4.1-1, ISER-RC-6"""
    first, second = link.read(bytearray(512)), link.read(bytearray(512))
    link.respond(first.itt, second.stag)
    assert isinstance(link.session.error, RemoteProtocolError)
    assert "not its task's" in str(link.session.error)
    assert isinstance(first.error, RemoteProtocolError) and first.waiter.pending == 0
    link.theirs.progress(0.0)
    with pytest.raises(ConnectionLost):
        link.theirs.progress(0.0)


@pytest.mark.parametrize(
    ("windows", "reply", "agreed"),
    [
        (True, b"", True),
        (True, b"\x80\0\0\0", True),
        (True, b"\xc0\0\0\0", False),
        (False, b"\x80\0\0\0", False),
        (False, b"\xc0\0\0\0", False),
    ],
)
def test_remote_invalidation_has_to_be_agreed_on(windows: bool, reply: bytes, agreed: bool) -> None:
    """By the flags of both ends; else a Send with Invalidate ends the connection, though it names
    an STag of its task. proves: ISER-RC-6"""
    link = Link(windows=windows, reply=reply)
    buffer = bytearray(512)
    slot = link.read(buffer)
    stag = slot.stag
    link.respond(slot.itt, stag)
    assert not link.is_open(stag) and slot.waiter.pending == 0
    buffer.clear()  # BufferError while a view of it exists
    if agreed:
        assert link.session.error is None and slot.error is None
        return
    assert isinstance(link.session.error, RemoteProtocolError)
    assert "not agreed on" in str(link.session.error)
    assert isinstance(slot.error, RemoteProtocolError)
    plain = Link(windows=windows, reply=reply)  # a response that invalidates nothing is welcome
    slot = plain.read(bytearray(512))
    plain.respond(slot.itt)
    assert plain.session.error is None and slot.error is None


def _peer_closes(link: Link) -> None:
    link.theirs.close()


def _peer_closes_after_the_logout(link: Link) -> None:
    control = link.session.queue.take_control()
    assert control is not None
    fill_logout(control)
    waiter = CountingWaiter()
    waiter.pending = 1
    link.session.queue.send_immediate(control, waiter)
    answer = pdu.LogoutResponse(
        response=0, itt=link.pdus[-1].number(16), stat_sn=100, exp_cmd_sn=2, max_cmd_sn=64
    )
    link.post(seam.SEND_SE, HEAD + answer.pack())
    link.theirs.close()
    link.session.progress(1.0)
    assert waiter.woken == 1


def _peer_breaks_rdma(link: Link) -> None:
    link.post(seam.RDMA_WRITE, b"x", 0x7777, 0)  # our end finds the error, and sends a Terminate


def _peer_terminates(link: Link) -> None:
    link.theirs.posted = link.theirs.consumed  # without a receive, the far end finds the error
    link.read(bytearray(512))
    with pytest.raises(RemoteProtocolError):
        while True:
            link.theirs.progress(0.0)


def _peer_breaks_iser(link: Link) -> None:
    link.post(seam.SEND_SE, b"\x40" + bytes(75))


@pytest.mark.parametrize(
    "end",
    [
        _peer_closes,
        _peer_closes_after_the_logout,
        _peer_breaks_rdma,
        _peer_terminates,
        _peer_breaks_iser,
    ],
)
def test_a_connection_that_ends_takes_its_stags_along(
    link: Link, end: Callable[[Link], None]
) -> None:
    """Waiters are told when no STag is open any more; the buffers are the callers' again. So it is
    with each way to end: by the peer, after a logout, by an error that either end's RCaP finds, and
    by a format error of iSER.

    proves: ISER-3.2.4-1, ISER-5.2.1-3, ISER-5.2.3.1-2, ISER-5.2.3.1-4, ISER-5.2.3.2-3
    proves: ISER-10.1.1.2-2, ISER-10.1.2.1-3, ISER-10.1.2.2-2
    proves: ISER-10.1.3.3-2, ISER-10.1.3.3-5, ISER-10.1.3.3-6
    """
    waiters = [_Looker(link), _Looker(link)]
    buffers = [bytearray(512), bytearray(512)]
    for waiter, buffer in zip(waiters, buffers, strict=True):
        waiter.stag = link.read(buffer, waiter).stag
        assert link.is_open(waiter.stag)
    end(link)
    link.session.progress(1.0)
    assert isinstance(link.session.error, TransportError)
    link.theirs.close()
    assert link.session.fileno() == -1
    assert [waiter.open for waiter in waiters] == [[False], [False]]
    for buffer in buffers:
        buffer.clear()  # BufferError while a view of it exists


def test_an_end_of_our_own_is_told_once(link: Link) -> None:
    """What the caller ends has ended for the caller's reason: no notice of the datamover follows.

    proves: ISER-3.2.4-2
    """
    slot = link.read(bytearray(512))
    link.post(seam.SEND_SE, HEAD + bytes(47))  # it would end the connection, if it were looked at
    reason = ConnectionLost("the caller's")
    link.session.fail(reason)
    assert link.session.progress(1.0) == 0
    assert link.session.error is reason and slot.waiter.pending == 0
    assert slot.waiter.woken == 1  # type: ignore[attr-defined]


# -- what a target must not send -----------------------------------------------------------------


@pytest.mark.parametrize("opcode", [bhs.DATA_IN, bhs.R2T, bhs.LOGIN_RESPONSE, bhs.SNACK_REQUEST])
def test_pdus_that_do_not_exist_here(link: Link, opcode: int) -> None:
    """Data-type PDUs and login PDUs in full feature phase. proves: ISER-7.1-1, ISER-7.3.9-3"""
    slot = link.read(bytearray(512))
    link.post(seam.SEND_SE, HEAD + bytes((opcode, 0x80)) + bytes(46))
    link.session.progress(1.0)
    assert isinstance(link.session.error, RemoteProtocolError)
    assert isinstance(slot.error, RemoteProtocolError)


# shows: SYSTEM-44
@pytest.mark.parametrize(
    "message",
    [
        b"\x20" + HEAD[1:] + bytes(48),
        HEAD + bytes(47),
        HEAD + b"\x21" + bytes(6) + b"\1" + bytes(40),
    ],
    ids=["a Hello", "short", "without its data"],
)
def test_a_format_error_ends_the_connection(link: Link, message: bytes) -> None:
    """proves: ISER-10.1.3.3-3, ISER-10.1.3.3-4"""
    slot = link.read(bytearray(512))
    link.post(seam.SEND_SE, message)
    link.session.progress(1.0)
    assert isinstance(slot.error, RemoteProtocolError) and slot.error.layer == "iSER"
    link.theirs.progress(0.0)
    with pytest.raises(ConnectionLost):
        link.theirs.progress(0.0)


# shows: SYSTEM-38
def test_a_gap_of_stat_sn_is_no_reason_for_snack(link: Link) -> None:
    """proves: ISER-3.3-11, ISER-7.3.11-1"""
    slots = [link.read(bytearray(512)) for _ in range(3)]
    link.respond(slots[0].itt)
    link.stat_sn += 5
    link.respond(slots[1].itt)
    link.session.queue.connection.last_heard = slots[2].deadline - 2
    Ladder(link.session).tick(slots[2].deadline - 1)
    assert {each.bhs[0] & bhs.OPCODE_MASK for each in link.pdus} == {bhs.SCSI_COMMAND}


# -- login ---------------------------------------------------------------------------------------


@asynccontextmanager
async def _answering(client: IserClient) -> AsyncIterator[None]:
    """The target of ``client`` answers, until its session has ended."""

    async def far_end() -> None:
        while not client.connection.done:
            await trio.lowlevel.wait_readable(client.target_pair.fileno())
            client.connection.progress(0.0)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(far_end)
        yield
        nursery.cancel_scope.cancel()


async def _log_in(ours: MemoryQueuePair, client: IserClient, options: Options) -> Session:
    url = parse_url("iser://10.0.0.1/iqn.2026-11.example:disk/0")
    async with _answering(client):
        return await Login(over_rdma(ours), url, options, "portal:3260").run()


async def test_text_travels_in_sends() -> None:
    """A discovery session: the Text Request has its text behind its BHS, in one Send.

    proves: ISER-7.3.8-1, ISER-7.3.8-2
    """
    client = IserClient()
    left: list[Message] = []

    def watch(message: Message) -> bool:
        left.append(message)
        return True

    client.ours.intercept = watch
    url = replace(parse_url("iser://10.0.0.1/iqn.2026-11.example:disk/0"), iqn="", lun=None)
    async with _answering(client):
        pairs = await Discovery(over_rdma(client.ours), url, Options(), "portal:3260").ask("All")
    assert pairs == [("TargetName", IQN), ("TargetAddress", "10.0.0.1:3260,1")]
    (request,) = (each for each in left if each.data[28:29] == bytes((bhs.TEXT_REQUEST | 0x40,)))
    assert request.kind == seam.SEND_SE and request.data[:28] == HEAD
    text = encode([("SendTargets", "All")])
    assert request.data[33:36] == len(text).to_bytes(3, "big")  # DataSegmentLength
    assert request.data[MINIMUM_LENGTH:] == text


async def test_login() -> None:
    """Login PDUs are Sends behind headers of 28 bytes; there is no Hello; every receive is posted
    before the target may use it.

    proves: ISER-5.1.1-1, ISER-8.1-1, ISER-8.1.1.1-1, ISER-8.1.1.3-2, ISER-9.1-1
    proves: ISER-7145-5.1.3-1, ISER-7145-5.1.3-4, ISER-7145-6.10-3, ISER-7145-9.1-1
    proves: ISER-GEN-8.1.6-1, ISER-GEN-8.1.6.1-1, ISER-IB00-3.1.6-2, ISER-IB00-3.1.6.1-1
    proves: ISER-RC-2, ISER-RC-18
    """
    client = IserClient()
    ours = client.ours
    ours.posted = 0  # the login under test posts its own receives
    left: list[tuple[Message, int]] = []

    def watch(message: Message) -> bool:
        left.append((message, ours.posted - ours.consumed))
        return True

    ours.intercept = watch
    options = Options(queue_depth=8)
    session = await _log_in(ours, client, options)
    ((request, receives),) = left
    assert request.kind == seam.SEND_SE
    assert request.data[:29] == HEAD + bytes((bhs.LOGIN_REQUEST | bhs.IMMEDIATE,))
    assert request.data[29] == 0x87  # T, operational stage, full feature phase
    assert receives == 8 + CONTROL_SLOTS + UNEXPECTED
    assert session.parameters.max_outstanding_unexpected_pdus
    for message in client.sent:
        assert message.data[:1] == b"\x10" and len(message.data) >= MINIMUM_LENGTH
    # The first PDU of full feature phase is a command, not a Hello; used receives are posted again.
    slot = session.queue.take_now()
    assert slot is not None
    slot.cdb[:] = bytes(16)
    slot.waiter = waiter = CountingWaiter()
    waiter.pending = 1
    slot.direction = 0
    session.queue.submit(slot)
    message, _ = left[-1]
    assert message.data[:29] == HEAD + bytes((bhs.SCSI_COMMAND,))
    client.connection.progress(0.0)
    session.progress(1.0)
    assert waiter.woken == 1 and slot.status == 2
    assert ours.posted - ours.consumed == receives
    session.fail(ConnectionLost("end of test"))
