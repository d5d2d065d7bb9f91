"""The datamover contract over iSER alone: STags, and what a violation leads to."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Iterator

import pytest

from iserblk.datamover.seam import INLINE, UNSOLICITED, InitiatorDatamover, TargetDatamover
from iserblk.errors import ConnectionLost, RemoteProtocolError, TransportError
from iserblk.iscsi import bhs, pdu
from iserblk.rcap.inprocess import Message, memory_pair
from iserblk.rcap.seam import SEND, SEND_INVALIDATE, SEND_SE, SEND_SE_INVALIDATE
from iserblk.scsi.tasks import NO_DATA, READ, WRITE
from tests.contract.datamovers import (
    INLINE_SIZE,
    ISER,
    ISER_WAYS,
    RECEIVE_SIZE,
    RECEIVES,
    Ends,
    Way,
    drive,
    iwarp_pair,
    over_rdma,
)


@pytest.fixture(params=list(ISER_WAYS))
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    both = Ends(ISER_WAYS[request.param])
    yield both
    both.close()


PLAIN_SENDS = {
    "memory": Way(
        lambda: over_rdma(memory_pair(receive_size=RECEIVE_SIZE), send_invalidate=False), ISER
    ),
    "iwarp-crc": Way(lambda: over_rdma(iwarp_pair(True), send_invalidate=False), ISER),
    "iwarp-nocrc": Way(lambda: over_rdma(iwarp_pair(False), send_invalidate=False), ISER),
}


# shows: SYSTEM-18
@pytest.mark.parametrize("name", list(PLAIN_SENDS))
def test_without_remote_invalidation(name: str) -> None:
    """Plain Sends only: the initiator invalidates by itself.

    proves: ISER-7145-1.5.1-3, ISER-7145-1.5.1-4, ISER-7145-7.3.2-1, ISER-7145-11-2
    proves: ISER-7145-11-3
    """
    ends = Ends(PLAIN_SENDS[name])
    try:
        buffer = bytearray(8)
        answer = ends.commanded(0, READ, memoryview(buffer))
        ends.respond(0)
        ends.until(lambda: bool(ends.up.pdus))
        assert ends.up.pdus[0][2] == 0
        ends.initiator.deallocate_task_resources(ends.slots[0], 0)
        # Now a late RDMA Write must not find the buffer any more.
        ends.target.put_data(answer, memoryview(b"late"), 0)
        ends.target.flush()
        with pytest.raises(TransportError):
            ends.until(lambda: False)
        assert bytes(buffer) == bytes(8)
    finally:
        ends.close()


# shows: SYSTEM-33
@pytest.mark.parametrize("allowed", [True, False])
@pytest.mark.parametrize("solicits", [True, False])
def test_which_sends_are_used(solicits: bool, allowed: bool) -> None:
    """A solicited event is asked for only where the RCaP obliges every receiver to take it, and a
    Send with Invalidate is used only where the initiator allows it. Both ends take all of them.

    proves: ISER-7145-1.5.2-2, ISER-7145-1.5.2-3, ISER-7145-1.5.2-4, ISER-7145-1.5.2-5
    """
    pair = memory_pair(receive_size=RECEIVE_SIZE, solicits=solicits)
    sends: tuple[list[int], list[int]] = ([], [])

    def watch(end: int) -> Callable[[Message], bool]:
        def left(message: Message) -> bool:
            if message.kind <= SEND_SE_INVALIDATE:
                sends[end].append(message.kind)
            return True

        return left

    for end in (0, 1):
        pair[end].intercept = watch(end)
    ends = Ends(Way(lambda: over_rdma(pair, allowed), ISER))
    sends[1].clear()  # the final Login Response
    try:
        ends.commanded(0, READ, memoryview(bytearray(8)))
        ends.respond(0)
        ends.until(lambda: bool(ends.up.pdus))
        ends.target.send_control(ends.answers[7])  # not a SCSI Response: no STag goes with it
        ends.until(lambda: len(ends.up.pdus) == 2)
    finally:
        ends.close()
    send, with_invalidate = (SEND_SE, SEND_SE_INVALIDATE) if solicits else (SEND, SEND_INVALIDATE)
    assert sends == ([send], [with_invalidate if allowed else send, send])


# shows: SYSTEM-2
def test_a_response_takes_its_stag_along(ends: Ends) -> None:
    slot = ends.slots[0]
    ends.commanded(0, READ, memoryview(bytearray(8)))
    assert slot.stag
    ends.respond(0)
    ends.until(lambda: bool(ends.up.pdus))
    assert ends.up.pdus[0][2] == slot.stag


def test_stag_of_another_task_is_refused(ends: Ends) -> None:
    """A response that invalidates what is not its task's breaks the connection.

    proves: ISER-7.3.2-10
    """
    for index in range(2):
        ends.commanded(index, READ, memoryview(bytearray(8)))
    ends.respond(1)
    ends.until(lambda: bool(ends.up.pdus))
    with pytest.raises(RemoteProtocolError, match="not its task's"):
        ends.initiator.deallocate_task_resources(ends.slots[0], ends.up.pdus[0][2])
    assert ends.slots[0].stag == 0


def test_each_unsolicited_data_out_is_notified(ends: Ends) -> None:
    """Control_Notify comes for every Data-Out, with its own data, in the order in which they left;
    the rest of the data comes by Get_Data, without a PDU.

    proves: ISER-9.5.1-6
    """
    source, sink = bytearray(i * 11 & 255 for i in range(8192)), bytearray(8192)
    answer = ends.commanded(0, WRITE, memoryview(source))
    for number in range(4):
        slot = ends.slots[1 + number]
        slot.direction, slot.inline_length = INLINE, 1024
        at = number * 1024
        slot.inline[:1024] = source[at : at + 1024]
        slot.bhs[:] = pdu.DataOut(
            flags=bhs.FLAG_FINAL if number == 3 else 0,
            data_length=1024,
            lun=bytes(8),
            itt=0,
            exp_stat_sn=1,
            data_sn=number,
            buffer_offset=at,
        ).pack()
        ends.initiator.send_control(slot)
    ends.until(lambda: len(ends.down.pdus) == 5)
    outs = [(pdu.DataOut.unpack_from(head), data) for head, data, _ in ends.down.pdus[1:]]
    assert [each.data_sn for each, _ in outs] == [0, 1, 2, 3]
    for each, data in outs:
        assert data == source[each.buffer_offset : each.buffer_offset + 1024]
    ends.target.get_data(answer, memoryview(sink)[4096:], 4096)
    ends.until(lambda: bool(ends.down.filled))
    assert sink[4096:] == source[4096:] and len(ends.down.pdus) == 5


def test_an_unsolicited_pdu_tells_when_it_has_left(ends: Ends) -> None:
    """sent_notify comes once for each PDU of ``allocate_data_outs``, in order, and for no other;
    then its memory may be filled anew, and what had left is not changed."""
    outs = ends.initiator.allocate_data_outs(2, INLINE_SIZE)
    for turn in range(3):
        for number, slot in enumerate(outs):
            data = bytes((turn * 2 + number + 1,)) * len(slot.inline)
            slot.direction, slot.inline_length = UNSOLICITED, len(data)
            slot.inline[:] = data
            slot.bhs[:] = pdu.DataOut(
                flags=bhs.FLAG_FINAL * number,
                data_length=len(data),
                lun=bytes(8),
                itt=9,
                exp_stat_sn=1,
                data_sn=number,
                buffer_offset=number * len(data),
            ).pack()
            ends.initiator.send_control(slot)
        assert len(ends.up.sent) == 2 * turn
        ends.until(lambda: len(ends.up.sent) == 2 * (turn + 1))  # noqa: B023
        assert ends.up.sent[-2:] == outs
    ends.command(0, WRITE, memoryview(b"x"))
    ends.until(lambda: len(ends.down.pdus) == 7)
    assert [data[:1] for _, data, _ in ends.down.pdus[:6]] == [bytes((n,)) for n in range(1, 7)]
    assert len(ends.up.sent) == 6


def test_read_without_a_read_stag_is_refused(ends: Ends) -> None:
    answer = ends.commanded(0, NO_DATA, memoryview(b""))
    with pytest.raises(RemoteProtocolError, match="no Read STag"):
        ends.target.put_data(answer, memoryview(b"x"), 0)
    with pytest.raises(RemoteProtocolError, match="no Write STag"):
        ends.target.get_data(answer, memoryview(bytearray(1)), 0)


def test_a_task_that_ended_advertises_nothing(ends: Ends) -> None:
    """Deallocate_Task_Resources forgets what the command had advertised. proves: ISER-3.1.9-1"""
    answer = ends.commanded(0, WRITE, memoryview(bytes(8)))
    ends.target.deallocate_task_resources(answer)
    with pytest.raises(RemoteProtocolError, match="no Write STag"):
        ends.target.get_data(answer, memoryview(bytearray(8)), 0)


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("closer", [0, 1])
def test_a_close_of_tcp_is_told_when_it_has_come(closer: int, reset: bool) -> None:
    """A FIN, or an RST, ends the connection of the end that stays; until it has come, and while a
    task is in flight, nothing is told.

    proves: ISER-5.2.3.2-4
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        left = socket.create_connection(server.getsockname())
        right = server.accept()[0]
    for sock in (left, right):
        sock.setblocking(False)
    ends = Ends(Way(lambda: over_rdma(iwarp_pair(True, (left, right))), ISER))
    sides: list[InitiatorDatamover | TargetDatamover] = [ends.initiator, ends.target]
    ends.commanded(0, READ, memoryview(bytearray(8)))
    for _ in range(3):
        for side in sides:
            side.progress(0.0)  # raises nothing
    if reset:  # as of a process that was killed with unread bytes
        gone = (left, right)[closer]
        gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        gone.close()
    else:
        sides[closer].connection_terminate()
    with pytest.raises(ConnectionLost, match="reset" if reset else "closed"):
        drive(sides[1 - closer])
    ends.close()


@pytest.mark.parametrize("at_target", [True, False])
def test_an_rcap_error_is_told_to_both_layers_above(ends: Ends, at_target: bool) -> None:
    """The end that finds the error closes the connection; the other end hears of it, by a
    Terminate or by the end alone.

    proves: ISER-4.1-10, ISER-4.2-2, ISER-10.1.2-1, ISER-10.1.2.1-2, ISER-10.1.2.2-1
    """
    answer = ends.commanded(0, READ, memoryview(bytearray(8)))
    if at_target:
        ends.down.on_pdu = None
        # More than receives were posted, that for a Hello included, and none are taken in.
        for _ in range(RECEIVES + 2):
            ends.command(1, NO_DATA, memoryview(b""))
        ends.initiator.flush()
    else:
        ends.target.put_data(answer, memoryview(bytes(9)), 0)
        ends.target.flush()
    sides: list[InitiatorDatamover | TargetDatamover] = [ends.initiator, ends.target]
    with pytest.raises(RemoteProtocolError):
        drive(sides[at_target])
    with pytest.raises(TransportError):
        drive(sides[not at_target])
