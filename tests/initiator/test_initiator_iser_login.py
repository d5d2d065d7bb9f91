"""What RFC 7145 asks of an initiator before and at the end of login: which primitives it calls, in
which order, and what travels."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest
import trio

from iserblk.commands.running import fill_read, fill_write
from iserblk.datamover.iser import CONTROL, HEADER_LENGTH
from iserblk.datamover.iser_initiator import IserInitiator
from iserblk.errors import ConnectionLost
from iserblk.initiator.connecting.login import Login, LoginConnection, over_rdma
from iserblk.initiator.session.deadlines import Ladder
from iserblk.initiator.session.logout import fill_logout
from iserblk.initiator.session.session import Session
from iserblk.initiator.session.slots import TaskSlot
from iserblk.iscsi import bhs, pdu
from iserblk.iscsi.keys import SessionParameters
from iserblk.options import Options
from iserblk.rcap import seam
from iserblk.rcap.inprocess import Message
from iserblk.scsi.tasks import NO_DATA
from iserblk.url import parse_url
from tests.initiator.fake import CountingWaiter
from tests.support import logs
from tests.target.iser_client import IserClient, Traced

pytestmark = [pytest.mark.logs(logs.DEADLINES), pytest.mark.usefixtures("clock")]

URL = parse_url("iser://10.0.0.1/iqn.2026-11.example:disk/0")
LUN = bytes(8)


async def log_in(connection: LoginConnection, client: IserClient) -> Session:
    async def far_end() -> None:
        while True:
            await trio.lowlevel.wait_readable(client.target_pair.fileno())
            client.connection.progress(0.0)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(far_end)
        session = await Login(connection, URL, Options(queue_depth=8), "portal:3260").run()
        nursery.cancel_scope.cancel()
    return session


def read_of(session: Session, buffer: bytearray) -> TaskSlot:
    """A READ of the first blocks, on its way."""
    slot = session.queue.take_now()
    assert slot is not None
    slot.cdb[:] = bytes((0x28, *bytes(7), len(buffer) // 512, *bytes(7)))
    slot.waiter = CountingWaiter()
    slot.waiter.pending = 1
    slot.deadline = 0
    fill_read(slot, LUN, memoryview(buffer))
    session.queue.submit(slot)
    return slot


async def test_the_primitives_are_called_in_order() -> None:
    """Allocate_Connection_Resources has succeeded before the Login Request leaves that asks for
    full feature phase. When its response has come, and not earlier, the key values are noticed and
    the datamover is enabled, once each.

    proves: ISER-5.1.1-12, ISER-5.1.1-13, ISER-3.1.8-1
    """
    client = IserClient()
    connection = over_rdma(client.ours)
    datamover = Traced(cast(IserInitiator, connection.datamover))
    calls = datamover.calls

    def left(message: Message) -> bool:
        if message.data[29:30] == b"\x87":  # T, operational stage, full feature phase
            calls.append(("request", ()))
        return True

    client.ours.intercept = left
    client.on_send = lambda message: calls.append(("response", (message,)))
    session = await log_in(replace(connection, datamover=datamover), client)
    order = (
        "allocate_connection_resources",
        "request",
        "response",
        "notice_key_values",
        "enable_datamover",
    )
    assert [name for name, _ in calls if name in order] == list(order)
    ((parameters,),) = [given for name, given in calls if name == "notice_key_values"]
    assert isinstance(parameters, SessionParameters) and parameters is session.parameters
    assert parameters.rdma_extensions and parameters.error_recovery_level == 0
    session.fail(ConnectionLost("end of test"))


# shows: SYSTEM-4
async def test_the_usage_rules_of_iscsi() -> None:
    """Our two ends, with RDMAExtensions=Yes: keys have answers, the status of a read comes in a
    SCSI Response of its own, and an initiator that loses a response sends no SNACK and reassigns no
    task: ExpDataSN is 0 in all that it says of tasks.

    proves: ISER-3.3-4
    """
    client = IserClient()
    session = await log_in(over_rdma(client.ours), client)
    assert b"NotUnderstood" not in b"".join(each.data for each in client.sent)
    said: list[bytes] = []

    def left(message: Message) -> bool:
        if message.kind <= seam.SEND_SE_INVALIDATE:
            said.append(message.data[HEADER_LENGTH:])
        return True

    client.ours.intercept = left
    buffer = bytearray(b"\xff" * 4096)
    ladder = Ladder(session)
    for turn in range(2):  # the first has the unit attention of every session
        del client.sent[:]
        slot = read_of(session, buffer)
        client.connection.progress(0.0)
        if turn:
            client.ours.inbox.pop()  # the response is lost
        session.progress(1.0)
    opcodes = [each.data[HEADER_LENGTH] for each in client.sent if each.kind != seam.RDMA_WRITE]
    assert opcodes == [bhs.SCSI_RESPONSE] and not any(buffer)
    now = slot.deadline
    for _ in range(3):  # ABORT TASK, LOGICAL UNIT RESET, the end of the connection
        ladder.tick(now)
        now += 60
    requests = [each for each in said if each[0] & bhs.OPCODE_MASK != bhs.SCSI_COMMAND]
    assert {each[0] & bhs.OPCODE_MASK for each in requests} == {bhs.TASK_MANAGEMENT_REQUEST}
    asked = [pdu.TaskManagementRequest.unpack_from(each) for each in requests]
    assert [each.function for each in asked] == [pdu.TMF_ABORT_TASK, pdu.TMF_LOGICAL_UNIT_RESET]
    assert {each.exp_data_sn for each in asked} == {0}
    session.fail(ConnectionLost("end of test"))


async def test_a_conversation_without_hello() -> None:
    """Neither end says Hello where nobody asked for it: every Send, from the login to the logout,
    is a control-type PDU. proves: ISER-RC-9"""
    client = IserClient()
    said: list[Message] = []
    heard: list[Message] = []

    def left(message: Message) -> bool:
        said.append(message)
        return True

    client.ours.intercept = left
    client.on_send = heard.append
    session = await log_in(over_rdma(client.ours), client)
    queue = session.queue
    waiter = CountingWaiter()
    buffer, data = bytearray(4096), b"x" * 65536
    for number in range(4):  # a unit attention, then one of each kind
        slot = queue.take_now()
        assert slot is not None
        slot.cdb[:] = bytes(16)
        slot.waiter = waiter
        waiter.pending += 1
        if number == 2:
            fill_read(slot, LUN, memoryview(buffer))
            slot.cdb[:10] = bytes((0x28, 0, 0, 0, 0, 0, 0, 0, 8, 0))
        elif number == 3:
            fill_write(slot, LUN, memoryview(data))
            slot.cdb[:10] = bytes((0x2A, 0, 0, 0, 0, 0, 0, 0, 128, 0))
        else:
            slot.length, slot.direction = 0, NO_DATA
        queue.submit(slot)
        for _ in range(3):
            client.connection.progress(0.0)
            session.progress(1.0)
        assert not waiter.pending and slot.status == (0 if number else 2)
    control = queue.take_control()
    assert control is not None
    fill_logout(control)
    waiter.pending = 1
    queue.send_immediate(control, waiter)
    client.connection.progress(0.0)
    session.progress(1.0)
    assert not waiter.pending
    assert client.store.content[: len(data)] == data
    for messages, opcodes in (
        (said, {bhs.LOGIN_REQUEST, bhs.SCSI_COMMAND, bhs.LOGOUT_REQUEST}),
        (heard, {bhs.LOGIN_RESPONSE, bhs.SCSI_RESPONSE, bhs.LOGOUT_RESPONSE}),
    ):
        sends = [each.data for each in messages if each.kind <= seam.SEND_SE_INVALIDATE]
        assert {each[0] & 0xF0 for each in sends} == {CONTROL}
        assert {each[28] & bhs.OPCODE_MASK for each in sends} == opcodes
    assert {seam.RDMA_WRITE, seam.RDMA_READ} <= {each.kind for each in heard}
    session.fail(ConnectionLost("end of test"))
