"""One suite for every datamover, over every queue pair: what iSCSI may rely on."""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Callable, Iterator

import pytest

from iserblk.datamover.iser import BHS_LENGTH
from iserblk.datamover.iser_initiator import IserInitiator
from iserblk.datamover.iser_target import IserTarget, TargetSlot
from iserblk.datamover.seam import INLINE, NO_DATA, READ, WRITE, PduSlot
from iserblk.errors import ConnectionLost, RemoteProtocolError, TransportError
from iserblk.rcap.inprocess import memory_pair
from iserblk.rcap.iwarp.mpa import MpaInitiator, MpaResponder
from iserblk.rcap.iwarp.queuepair import IwarpQueuePair
from iserblk.rcap.seam import QueuePair

INLINE_SIZE = 8192
RECEIVE_SIZE = 28 + 48 + INLINE_SIZE


def iwarp_pair(crc: bool = True) -> tuple[QueuePair, QueuePair]:
    left, right = socket.socketpair()
    initiator, responder = MpaInitiator(crc=crc), MpaResponder(crc=crc)
    theirs = responder.receive_data(initiator.data_to_send())
    assert theirs is not None
    responder.accept()
    ours = initiator.receive_data(responder.data_to_send())
    assert ours is not None
    return (
        IwarpQueuePair(left, ours, initiator=True, receive_size=RECEIVE_SIZE),
        IwarpQueuePair(right, theirs, initiator=False, receive_size=RECEIVE_SIZE),
    )


class Recorder:
    """The iSCSI layer above: writes down what came up."""

    def __init__(self) -> None:
        self.pdus: list[tuple[bytes, bytes, int]] = []
        self.on_pdu: Callable[[bytes], None] | None = None
        self.filled: list[PduSlot] = []
        self.sent: list[PduSlot] = []

    def control_notify(self, message: memoryview, at: int, invalidated: int) -> None:
        bhs = bytes(message[at : at + BHS_LENGTH])
        self.pdus.append((bhs, bytes(message[at + BHS_LENGTH :]), invalidated))
        if self.on_pdu is not None:
            self.on_pdu(bhs)

    def data_completion_notify(self, slot: PduSlot) -> None:
        self.filled.append(slot)

    def sent_notify(self, slot: PduSlot) -> None:
        self.sent.append(slot)

    def connection_terminate_notify(self, error: Exception) -> None:
        raise AssertionError(error)


class Ends:
    """Both ends of one connection, with 8 slots each."""

    def __init__(self, pair: tuple[QueuePair, QueuePair], send_invalidate: bool = True) -> None:
        self.up, self.down = Recorder(), Recorder()
        self.initiator = IserInitiator(pair[0], INLINE_SIZE)
        self.initiator.user = self.up
        self.slots = [PduSlot(index) for index in range(8)]
        self.initiator.allocate_connection_resources(self.slots, 8)
        self.target = IserTarget(pair[1], send_invalidate)
        self.target.user = self.down
        self.answers = [TargetSlot(index) for index in range(8)]
        self.target.allocate_connection_resources(self.answers, INLINE_SIZE, 16)
        self.down.on_pdu = lambda _bhs: self.target.map_task(self.answers[0])

    def until(self, condition: Callable[[], bool]) -> None:
        """Drive both ends until ``condition`` holds."""
        for _ in range(1000):
            self.initiator.flush()
            self.target.flush()
            if condition():
                return
            both = (self.initiator, self.target)
            full = [end.fileno() for end in both if end.wants_write()]
            ready = select.select([end.fileno() for end in both], full, [], 5)
            assert ready[0] or ready[1], "nothing happens any more"
            self.target.progress(0.0)
            self.initiator.progress(0.0)
        raise AssertionError("no end")

    def close(self) -> None:
        self.initiator.connection_terminate()
        self.target.connection_terminate()


def drive(end: IserInitiator | IserTarget) -> None:
    """``progress`` until it raises."""
    for _ in range(1000):
        full = [end.fileno()] if end.wants_write() else []
        assert any(select.select([end.fileno()], full, [], 5)), "nothing happens any more"
        end.progress(0.0)
    raise AssertionError("no end")


PAIRS: dict[str, Callable[[], tuple[QueuePair, QueuePair]]] = {
    "memory": lambda: memory_pair(receive_size=RECEIVE_SIZE),
    "iwarp-crc": lambda: iwarp_pair(True),
    "iwarp-nocrc": lambda: iwarp_pair(False),
}


@pytest.fixture(params=list(PAIRS))
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    both = Ends(PAIRS[request.param]())
    yield both
    both.close()


def bhs(opcode: int, length: int = 0, tag: int = 7) -> bytes:
    return struct.pack(">BBxxI8xI28x", opcode, 0x80, length, tag)


def send(ends: Ends, slot: PduSlot, data: bytes = b"") -> None:
    slot.bhs[:] = bhs(1, len(data))
    slot.inline[: len(data)] = data
    slot.inline_length = len(data)
    ends.initiator.send_control(slot)


@pytest.mark.parametrize("size", [0, 1, 3, 4, 511, 512, 8191, 8192])
def test_inline_data_arrives_whole(ends: Ends, size: int) -> None:
    """Send_Control with a data segment of any length, padded or not.

    proves: ISER-3.2.1-1, ISER-RC-12
    """
    data = bytes(i * 7 & 255 for i in range(size))
    ends.slots[0].direction = INLINE
    send(ends, ends.slots[0], data)
    ends.until(lambda: bool(ends.down.pdus))
    got_bhs, got, _ = ends.down.pdus[0]
    assert got_bhs == bhs(1, size)
    assert got[:size] == data
    assert len(got) - size < 4


@pytest.mark.parametrize("size", [1, 512, 4096, 65537, 1 << 20])
def test_read_is_put_into_the_buffer(ends: Ends, size: int) -> None:
    """A READ: RDMA Write into the advertised buffer, then the response that invalidates it.

    proves: ISER-6.2-5, ISER-7.1-3, ISER-7.1-4, ISER-7.1-5, ISER-7.3.5-10, ISER-7.3.5-11
    proves: ISER-IB00-2-1
    """
    buffer = bytearray(size)
    source = bytes(i * 5 & 255 for i in range(size))
    slot = ends.slots[0]
    slot.direction, slot.data = READ, memoryview(buffer)
    send(ends, slot)
    ends.until(lambda: bool(ends.down.pdus))
    answer = ends.answers[0]
    ends.target.put_data(answer, memoryview(source), 0)
    answer.bhs[:] = bhs(0x21)
    ends.target.send_control(answer, True)
    ends.until(lambda: bool(ends.up.pdus))
    assert bytes(buffer) == source
    invalidated = ends.up.pdus[0][2]
    assert invalidated == slot.stag != 0
    ends.initiator.deallocate_task_resources(slot, invalidated)
    assert slot.stag == 0 and slot.data is None
    ends.until(lambda: bool(ends.down.sent))
    assert answer.busy == 0
    # Put_Data is told of by nobody: neither end has a notice beside the PDUs.
    assert not ends.down.filled and not ends.up.filled
    assert len(ends.up.pdus) == 1 and ends.down.sent == [answer]


@pytest.mark.parametrize("size", [1, 512, 4096, 65537, 1 << 20])
def test_write_is_fetched_from_the_buffer(ends: Ends, size: int) -> None:
    """A WRITE: RDMA Read from the advertised buffer into the one named by Get_Data.

    proves: ISER-6.2-5, ISER-7.1-5, ISER-7.3.6-3, ISER-7.3.6-9, ISER-8.3.1-3, ISER-IB00-2-1
    """
    source = bytes(i * 11 & 255 for i in range(size))
    sink = bytearray(size)
    slot = ends.slots[0]
    slot.direction, slot.data = WRITE, memoryview(source)
    send(ends, slot)
    ends.until(lambda: bool(ends.down.pdus))
    answer = ends.answers[0]
    ends.target.get_data(answer, memoryview(sink), 0)
    ends.until(lambda: bool(ends.down.filled))
    assert ends.down.filled == [answer] and not ends.up.filled
    assert bytes(sink) == source


def test_parts_at_an_offset(ends: Ends) -> None:
    """Buffer Offset counts from the first byte that was advertised. proves: ISER-7145-2.1-1"""
    buffer = bytearray(100)
    slot = ends.slots[0]
    slot.direction, slot.data = READ, memoryview(buffer)
    send(ends, slot)
    ends.until(lambda: bool(ends.down.pdus))
    answer = ends.answers[0]
    ends.target.put_data(answer, memoryview(b"abc"), 40)
    answer.bhs[:] = bhs(0x21)
    ends.target.send_control(answer, True)
    ends.until(lambda: bool(ends.up.pdus))
    assert bytes(buffer) == bytes(40) + b"abc" + bytes(57)


@pytest.mark.parametrize("name", list(PAIRS))
def test_without_remote_invalidation(name: str) -> None:
    """Plain Sends only: the initiator invalidates by itself.

    proves: ISER-7145-1.5.1-3, ISER-7145-1.5.1-4, ISER-7145-7.3.2-1, ISER-7145-11-2
    proves: ISER-7145-11-3
    """
    ends = Ends(PAIRS[name](), send_invalidate=False)
    try:
        buffer = bytearray(8)
        slot = ends.slots[0]
        slot.direction, slot.data = READ, memoryview(buffer)
        send(ends, slot)
        ends.until(lambda: bool(ends.down.pdus))
        answer = ends.answers[0]
        answer.bhs[:] = bhs(0x21)
        ends.target.send_control(answer, True)
        ends.until(lambda: bool(ends.up.pdus))
        assert ends.up.pdus[0][2] == 0
        ends.initiator.deallocate_task_resources(slot, 0)
        # Now a late RDMA Write must not find the buffer any more.
        ends.target.put_data(answer, memoryview(b"late"), 0)
        ends.target.flush()
        with pytest.raises(TransportError):
            ends.until(lambda: False)
        assert bytes(buffer) == bytes(8)
    finally:
        ends.close()


def test_stag_of_another_task_is_refused(ends: Ends) -> None:
    """A response that invalidates what is not its task's breaks the connection.

    proves: ISER-7.3.2-10
    """
    buffers = [bytearray(8), bytearray(8)]
    for slot, buffer in zip(ends.slots, buffers, strict=False):
        slot.direction, slot.data = READ, memoryview(buffer)
        send(ends, slot)
    ends.until(lambda: len(ends.down.pdus) == 2)
    answer = ends.answers[0]  # mapped to the second command
    answer.bhs[:] = bhs(0x21)
    ends.target.send_control(answer, True)
    ends.until(lambda: bool(ends.up.pdus))
    with pytest.raises(RemoteProtocolError, match="not its task's"):
        ends.initiator.deallocate_task_resources(ends.slots[0], ends.up.pdus[0][2])
    assert ends.slots[0].stag == 0


def test_read_without_a_read_stag_is_refused(ends: Ends) -> None:
    send(ends, ends.slots[0])
    ends.until(lambda: bool(ends.down.pdus))
    with pytest.raises(RemoteProtocolError, match="no Read STag"):
        ends.target.put_data(ends.answers[0], memoryview(b"x"), 0)
    with pytest.raises(RemoteProtocolError, match="no Write STag"):
        ends.target.get_data(ends.answers[0], memoryview(bytearray(1)), 0)


def test_nine_primitives_and_their_users() -> None:
    """Each downward primitive of section 3.1 is a call of the datamovers; those that move data
    exist at the target alone. proves: ISER-3.1-1"""
    both = {
        "send_control",
        "allocate_connection_resources",
        "deallocate_connection_resources",
        "enable_datamover",
        "connection_terminate",
        "notice_key_values",
        "deallocate_task_resources",
    }
    target_only = {"put_data", "get_data"}
    assert both | target_only <= set(dir(IserTarget))
    assert both <= set(dir(IserInitiator)) and not target_only & set(dir(IserInitiator))


def test_connections_do_not_mix() -> None:
    """The datamover object is the Connection_Handle. proves: ISER-3-1, ISER-7.3-1"""
    one, other = Ends(PAIRS["memory"]()), Ends(PAIRS["memory"]())
    for number, ends in enumerate((one, other)):
        ends.slots[0].bhs[:] = bhs(1, tag=number)
        ends.initiator.send_control(ends.slots[0])
    other.until(lambda: bool(other.down.pdus))
    assert not one.down.pdus
    one.until(lambda: bool(one.down.pdus))
    assert [ends.down.pdus[0][0] for ends in (one, other)] == [bhs(1, tag=0), bhs(1, tag=1)]
    one.close()
    answer = other.answers[0]
    answer.bhs[:] = bhs(0x21)
    other.target.send_control(answer)
    other.until(lambda: bool(other.up.pdus))
    other.close()


def test_additional_header_segments_arrive_intact(ends: Ends) -> None:
    """In both directions, every PDU once, with its place in the message.

    proves: ISER-3.2.1-1, ISER-7.2-2, ISER-7.3-2
    """
    unit = struct.pack(">BBxxI8sI28x", 1, 0x80, 2 << 24 | 5, b"LUNfield", 7)
    ahs, data = b"\0\5\1\0abcd", b"12345"
    for slot, answer in zip(ends.slots[:2], ends.answers[:2], strict=True):
        for part in (slot, answer):
            part.bhs[:] = unit
            part.inline[:13] = ahs + data
            part.inline_length = 13
        slot.direction = INLINE
        ends.initiator.send_control(slot)
        ends.target.send_control(answer)
    ends.until(lambda: len(ends.down.pdus) == len(ends.up.pdus) == 2)
    for got, behind, invalidated in ends.down.pdus + ends.up.pdus:
        assert (got, behind[:13], invalidated) == (unit, ahs + data, 0)


def test_a_task_that_ends_without_a_response(ends: Ends) -> None:
    """Deallocate_Task_Resources closes what it had advertised, at the target it forgets it.

    proves: ISER-3.1.9-1, ISER-8.3.2-2, ISER-8.3.2-3
    """
    buffers = [bytearray(8), bytearray(8)]
    for slot, buffer in zip(ends.slots, buffers, strict=False):
        slot.direction, slot.data = READ, memoryview(buffer)
    send(ends, ends.slots[0])
    ends.until(lambda: len(ends.down.pdus) == 1)
    ends.down.on_pdu = lambda _bhs: ends.target.map_task(ends.answers[1])
    send(ends, ends.slots[1])
    ends.until(lambda: len(ends.down.pdus) == 2)
    ends.initiator.deallocate_task_resources(ends.slots[0], 0)
    buffers[0].clear()  # BufferError while anybody has a view of it
    late, other = ends.answers[:2]
    ends.target.put_data(other, memoryview(b"in time!"), 0)
    ends.target.put_data(late, memoryview(b"too late"), 0)
    ends.target.flush()
    with pytest.raises(RemoteProtocolError):
        drive(ends.initiator)
    assert buffers == [bytearray(), bytearray(b"in time!")]
    ends.target.deallocate_task_resources(other)
    with pytest.raises(RemoteProtocolError, match="no Read STag"):
        ends.target.put_data(other, memoryview(b"x"), 0)


@pytest.mark.parametrize("end", ["connection_terminate", "deallocate_connection_resources"])
def test_the_end_frees_everything(ends: Ends, end: str) -> None:
    """The caller's buffers are its own when the call returns, on both sides.

    proves: ISER-3.1.5-1, ISER-3.1.7-1
    """
    to_read, to_write, source, sink = (bytearray(1 << 20) for _ in range(4))
    one, other = ends.slots[:2]
    one.direction, one.data = READ, memoryview(to_read)
    other.direction, other.data = WRITE, memoryview(to_write)
    send(ends, one)
    ends.until(lambda: len(ends.down.pdus) == 1)
    ends.down.on_pdu = lambda _bhs: ends.target.map_task(ends.answers[1])
    send(ends, other)
    ends.until(lambda: len(ends.down.pdus) == 2)
    ends.target.put_data(ends.answers[0], memoryview(source), 0)
    ends.target.get_data(ends.answers[1], memoryview(sink), 0)
    ends.target.flush()
    for side in (ends.initiator, ends.target):
        getattr(side, end)()
        assert side.fileno() == -1
    for slot in (one, other):
        slot.data = None
    for answer in ends.answers[:2]:
        ends.target.deallocate_task_resources(answer)
    for buffer in (to_read, to_write, source, sink):
        buffer.clear()  # BufferError while anybody has a view of it


@pytest.mark.parametrize("at_target", [True, False])
def test_an_rcap_error_is_told_to_both_layers_above(ends: Ends, at_target: bool) -> None:
    """The side that finds it ends the connection; the other one hears of it, whether by a
    Terminate or by the end alone.

    proves: ISER-4.1-10, ISER-4.2-2, ISER-10.1.2-1, ISER-10.1.2.1-2, ISER-10.1.2.2-1
    """
    slot, answer = ends.slots[0], ends.answers[0]
    slot.direction, slot.data = READ, memoryview(bytearray(8))
    send(ends, slot)
    ends.until(lambda: bool(ends.down.pdus))
    if at_target:
        slot.bhs[:] = bhs(1)
        slot.direction = NO_DATA
        for _ in range(17):  # one more than receives were posted, and none are taken in
            ends.initiator.send_control(slot)
        ends.initiator.flush()
    else:
        ends.target.put_data(answer, memoryview(bytes(9)), 0)
        ends.target.flush()
    sides: list[IserInitiator | IserTarget] = [ends.initiator, ends.target]
    with pytest.raises(RemoteProtocolError):
        drive(sides[at_target])
    with pytest.raises(TransportError):
        drive(sides[not at_target])


@pytest.mark.parametrize("closer", [0, 1])
def test_a_peer_that_vanishes(ends: Ends, closer: int) -> None:
    """The connection is lost, for either side. proves: ISER-4.2-2, ISER-10.1.1-1,
    ISER-10.1.1.2-1, ISER-10.1.2.2-3"""
    sides: list[IserInitiator | IserTarget] = [ends.initiator, ends.target]
    sides[closer].connection_terminate()
    with pytest.raises(ConnectionLost):
        drive(sides[1 - closer])


def test_disconnect_ends_both(ends: Ends) -> None:
    ends.initiator.disconnect()
    with pytest.raises(TransportError):
        ends.until(lambda: False)
