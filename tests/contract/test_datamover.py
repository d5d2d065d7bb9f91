"""One suite for both roles of every datamover, through their seams: what iSCSI may rely on."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import pytest

from iserblk.datamover.seam import BARE, INLINE, InitiatorDatamover, PduSlot, TargetDatamover
from iserblk.errors import ConnectionLost, TransportError
from iserblk.iscsi import bhs, pdu
from iserblk.scsi.tasks import READ, WRITE
from tests.contract.datamovers import EVERY_WAY, WAYS, Ends, drive, unsolicited

SIZES = [1, 3, 512, 4096, 8192, 16384, 16385, 65537, 1 << 20, (1 << 20) + 1]


@pytest.fixture(params=list(EVERY_WAY))
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    both = Ends(EVERY_WAY[request.param])
    yield both
    both.close()


@pytest.fixture(params=list(WAYS))
def unforgiving(request: pytest.FixtureRequest) -> Iterator[Ends]:
    """ErrorRecoveryLevel 0."""
    both = Ends(WAYS[request.param])
    yield both
    both.close()


def _sides(ends: Ends) -> tuple[InitiatorDatamover | TargetDatamover, ...]:
    return ends.initiator, ends.target


@pytest.mark.parametrize("size", [0, 1, 3, 4, 511, 512, 8191, 8192])
def test_inline_data_arrives_whole(ends: Ends, size: int) -> None:
    """Send_Control with a data segment of any length, padded or not.

    proves: ISER-3.2.1-1, ISER-RC-12
    """
    data = bytes(i * 7 & 255 for i in range(size))
    slot = ends.slots[0]
    slot.direction = INLINE
    unit = struct.pack(">BBxxI8xI28x", 0, 0x80, size, 7)
    slot.bhs[:] = unit
    slot.inline[:size] = data
    slot.inline_length = size
    ends.initiator.send_control(slot)
    ends.until(lambda: bool(ends.down.pdus))
    head, got, _ = ends.down.pdus[0]
    assert (head, got[:size]) == (unit, data)
    assert len(got) - size < 4


def test_slots_may_be_added(ends: Ends) -> None:
    """They are as those that were there from the start; these are not touched."""
    before = [(slot.bhs, slot.inline) for slot in ends.slots]
    late = [PduSlot(8), PduSlot(9)]
    assert ends.initiator.adds_resources and all(slot.bhs is BARE for slot in late)
    ends.initiator.add_resources(late, 2)
    assert before == [(slot.bhs, slot.inline) for slot in ends.slots]
    slots = [ends.slots[7], *late]
    for tag, slot in enumerate(slots):
        size = len(slot.inline)
        assert size == len(before[0][1])
        slot.direction = INLINE
        slot.bhs[:] = struct.pack(">BBxxI8xI28x", 0, 0x80, size, tag)
        slot.inline[:] = bytes((tag,)) * size
        slot.inline_length = size
        ends.initiator.send_control(slot)
    ends.until(lambda: len(ends.down.pdus) == 3)
    for tag, (head, got, _) in enumerate(ends.down.pdus):
        assert head == bytes(slots[tag].bhs)
        assert got == bytes((tag,)) * len(slots[tag].inline)


@pytest.mark.parametrize("size", SIZES)
def test_read(ends: Ends, size: int) -> None:
    """Data-In lands in the buffer, and the response comes behind it.

    proves: ISER-6.2-5, ISER-7.1-5, ISER-IB00-2-1
    """
    buffer = bytearray(size)
    source = bytes(i * 5 & 255 for i in range(size))
    slot = ends.slots[0]
    answer = ends.commanded(0, READ, memoryview(buffer))
    ends.target.put_data(answer, memoryview(source), 0)
    ends.respond(0)
    assert answer.busy == 1 + ends.keeps
    ends.until(lambda: bool(ends.up.pdus))
    assert bytes(buffer) == source
    head, _, invalidated = ends.up.pdus[0]
    response = pdu.ScsiResponse.unpack_from(head)
    assert response == pdu.ScsiResponse(
        status=0, itt=0, stat_sn=100, exp_cmd_sn=5, max_cmd_sn=50, exp_data_sn=response.exp_data_sn
    )
    assert invalidated == slot.stag
    ends.initiator.deallocate_task_resources(slot, invalidated)
    assert slot.stag == 0 and slot.data is None
    ends.until(lambda: bool(ends.down.sent))
    if ends.keeps:
        assert answer.busy == 1
        ends.acknowledge()
        ends.until(lambda: len(ends.down.sent) == 2)
    assert set(ends.down.sent) == {answer} and answer.busy == 0
    ends.target.deallocate_task_resources(answer)
    buffer.clear()  # BufferError while a view of it is left


@pytest.mark.parametrize("size", SIZES)
def test_write(ends: Ends, size: int) -> None:
    """Unsolicited data goes as far as was agreed; the target asks for the rest, burst by burst.

    proves: ISER-6.2-5, ISER-7.1-5, ISER-7.3.6-3, ISER-7.3.6-9, ISER-7.3.6-16, ISER-8.3.1-3
    proves: ISER-IB00-2-1
    """
    source = bytearray(i * 11 & 255 for i in range(size))
    sink = bytearray(size)
    answer = ends.commanded(0, WRITE, memoryview(source))
    first = unsolicited(ends.down.pdus)
    way = ends.way
    most = min(size, way.first_burst_length)
    if way.initial_r2t:
        most = min(most, way.max_recv_data_segment_length) if way.immediate_data else 0
    assert len(first) == most
    sink[:most] = first
    for at in range(most, size, way.max_burst_length):
        part = memoryview(sink)[at : at + way.max_burst_length]
        ends.target.get_data(answer, part, at)
        assert answer.busy == 1
        ends.until(lambda: bool(ends.down.filled))
        assert ends.down.filled == [answer] and answer.busy == 0
        ends.down.filled.clear()
    assert sink == source
    ends.respond(0)
    ends.until(lambda: bool(ends.up.pdus))
    ends.initiator.deallocate_task_resources(ends.slots[0], ends.up.pdus[0][2])
    source.clear()  # BufferError while a view of it is left


def test_only_what_asked_for_a_notice_has_one(ends: Ends) -> None:
    """Reads and writes side by side, with Notify_Enable and without, answered in another order than
    they came. Each transfer that asked for it is followed by one Data_Completion_Notify, no other
    by any; neither end hears of RDMA that the other has done, nor of a response twice.

    proves: ISER-7.1-3, ISER-7.1-4, ISER-7.3.5-10, ISER-7.3.5-11
    """
    size = 32768
    buffers = [bytearray(size) for _ in range(4)]
    sources = [bytearray(bytes((index,)) * size) for index in range(4)]
    reads = [ends.commanded(i, READ, memoryview(each)) for i, each in enumerate(buffers)]
    writes = [ends.commanded(4 + i, WRITE, memoryview(each)) for i, each in enumerate(sources)]
    commands = len(ends.down.pdus)
    for number in (2, 0, 3, 1):
        notify = number % 2 == 1
        sink = memoryview(bytearray(8192))
        ends.target.get_data(writes[number], sink, 16384, notify_enable=notify)
        ends.target.put_data(reads[number], memoryview(b"r" * size), 0, notify_enable=notify)
        ends.respond(number)
    ends.until(lambda: len(ends.up.pdus) == 4 and not any(slot.busy for slot in writes))
    for number in (1, 3, 2, 0):
        ends.respond(4 + number)
    ends.until(lambda: len(ends.up.pdus) == 8 and len(ends.down.sent) >= 8)
    if ends.keeps:
        ends.initiator.deallocate_task_resources(ends.slots[3], 0)
        ends.acknowledge(3)
        ends.until(lambda: not any(slot.busy for slot in reads))
    assert len(ends.down.sent) == 8 + 4 * ends.keeps  # once more for each read that was kept
    assert all(bytes(each) == b"r" * size for each in buffers)
    noticed = sorted(slot.index for slot, _ in ends.down.completed)
    assert noticed == [slot.index for slot in (reads[1], reads[3], writes[1], writes[3])]
    assert sorted({slot.index for slot in ends.down.sent}) == list(range(8))
    assert [head[0] for head, _, _ in ends.up.pdus] == [bhs.SCSI_RESPONSE] * 8
    assert len(ends.down.pdus) == commands + ends.keeps
    assert [slot.busy for slot in (*reads, *writes)] == [0] * 8


def test_parts_at_an_offset(ends: Ends) -> None:
    """Buffer Offset counts from the first byte of the buffer. proves: ISER-7145-2.1-1"""
    buffer = bytearray(100)
    answer = ends.commanded(0, READ, memoryview(buffer))
    ends.target.put_data(answer, memoryview(b"abc"), 40)
    ends.respond(0)
    ends.until(lambda: bool(ends.up.pdus))
    assert bytes(buffer) == bytes(40) + b"abc" + bytes(57)


def test_several_writes_at_once(ends: Ends) -> None:
    """Each Get_Data fills the sink of its own task."""
    sources = [bytearray(bytes((index + 1,)) * 200_000) for index in range(3)]
    for index, source in enumerate(sources):
        ends.command(index, WRITE, memoryview(source))
    ends.until(lambda: ends.next == 3)
    sinks = [bytearray(50_000) for _ in sources]
    for index, sink in enumerate(sinks):
        ends.target.get_data(ends.answers[index], memoryview(sink), 100_000)
    ends.until(lambda: len(ends.down.filled) == 3)
    assert [bytes(sink) for sink in sinks] == [bytes(source[:50_000]) for source in sources]


def test_data_that_is_given_up(ends: Ends) -> None:
    """cancel_data frees the sink at once, or says that it cannot; then the sink is filled."""
    source, sink = bytearray(b"x" * 65536), bytearray(32768)
    answer = ends.commanded(0, WRITE, memoryview(source))
    ends.target.get_data(answer, memoryview(sink), 16384)
    if ends.target.cancel_data(answer):
        assert answer.busy == 0
        ends.target.deallocate_task_resources(answer)
        sink.clear()  # BufferError while a view of it is left
        ends.commanded(1, READ, memoryview(bytearray(4)))
        assert not ends.down.filled
    else:
        ends.until(lambda: ends.down.filled == [answer])
        assert bytes(sink) == b"x" * 32768


def test_additional_header_segments_arrive_intact(ends: Ends) -> None:
    """Each end hears of every PDU once, with its place in the message.

    proves: ISER-3.2.1-1, ISER-7.2-2, ISER-7.3-2
    """
    ahs, data = b"\0\5\1\0abcd", b"12345"
    units = []
    for slot, answer in zip(ends.slots[:2], ends.answers[:2], strict=True):
        stat_sn = ends.numbers.stat_sn
        unit = struct.pack(
            ">BBxxI8sI4xI20x", bhs.NOP_IN, 0x80, 2 << 24 | 5, b"LUNfield", 7, stat_sn
        )
        units.append((unit, ahs + data, 0))
        ends.numbers.stat_sn += 1
        for part in (slot, answer):
            part.bhs[:] = unit
            part.inline[:13] = ahs + data
            part.inline_length = 13
        slot.direction = INLINE
        ends.initiator.send_control(slot)
        ends.target.send_control(answer)
    ends.until(lambda: len(ends.down.pdus) == len(ends.up.pdus) == 2)
    for came in (ends.down.pdus, ends.up.pdus):
        assert [(got, behind[:13], invalidated) for got, behind, invalidated in came] == units


def test_a_task_that_ends_without_a_response(unforgiving: Ends) -> None:
    """The task's buffer is free, and late data for it ends the connection.

    proves: ISER-2.4.1-4, ISER-3.1.9-1, ISER-8.3.2-2, ISER-8.3.2-3, ISER-7145-1.5.1-2
    """
    buffers = [bytearray(8), bytearray(8)]
    late, other = (
        unforgiving.commanded(index, READ, memoryview(buffer))
        for index, buffer in enumerate(buffers)
    )
    unforgiving.initiator.deallocate_task_resources(unforgiving.slots[0], 0)
    buffers[0].clear()  # BufferError while a view of it is left
    unforgiving.target.put_data(other, memoryview(b"in time!"), 0)
    unforgiving.respond(1)
    unforgiving.target.put_data(late, memoryview(b"too late"), 0)
    unforgiving.respond(0)
    unforgiving.target.flush()
    with pytest.raises(TransportError):
        drive(unforgiving.initiator)
    assert buffers == [bytearray(), bytearray(b"in time!")]


def test_the_end_frees_everything(ends: Ends) -> None:
    """The caller's buffers are its own when the call returns, on both sides.

    proves: ISER-3.1.5-1, ISER-3.1.7-1
    """
    to_read, to_write, source, sink = (bytearray(1 << 20) for _ in range(4))
    reads = ends.commanded(0, READ, memoryview(to_read))
    writes = ends.commanded(1, WRITE, memoryview(to_write))
    ends.target.put_data(reads, memoryview(source), 0)
    ends.respond(0)
    ends.target.get_data(writes, memoryview(sink)[:65536], 16384)
    ends.target.flush()
    ends.initiator.progress(0.0)
    for side in _sides(ends):
        side.connection_terminate()
        assert side.fileno() == -1
    for slot in ends.slots[:2]:
        slot.data = None
    for answer in (reads, writes):
        ends.target.deallocate_task_resources(answer)
    for buffer in (to_read, to_write, source, sink):
        buffer.clear()  # BufferError while a view of it is left


def test_an_end_that_was_asked_for_is_not_notified(ends: Ends) -> None:
    """Connection_Terminate calls nobody up: neither for PDUs that have come already, nor for
    transfers and PDUs under way, nor to say that the connection has ended.

    proves: ISER-3.2.4-2
    """
    source, sink = bytearray(65536), bytearray(65536)
    reads = ends.commanded(0, READ, memoryview(source))
    writes = ends.commanded(1, WRITE, memoryview(sink))
    ends.target.put_data(reads, memoryview(bytes(65536)), 0)
    ends.respond(0)
    ends.target.get_data(writes, memoryview(bytearray(32768)), 16384)
    ends.target.flush()
    ends.command(2, READ, memoryview(bytearray(4)))
    ends.initiator.flush()

    def told() -> list[int]:
        down = ends.down
        return [len(each) for each in (ends.up.pdus, down.pdus, down.filled, down.sent)]

    before = told()
    for side in _sides(ends):
        side.connection_terminate()
    assert told() == before and not ends.up.pdus and not ends.down.filled


def test_connections_do_not_mix(ends: Ends, request: pytest.FixtureRequest) -> None:
    """The datamover object is the Connection_Handle. proves: ISER-3-1, ISER-7.3-1"""
    other = Ends(EVERY_WAY[request.node.callspec.params["ends"]])
    try:
        for number, each in enumerate((ends, other)):
            each.command(number, READ, memoryview(bytearray(1)))
        other.until(lambda: bool(other.down.pdus))
        assert not ends.down.pdus
        ends.until(lambda: bool(ends.down.pdus))
        itts = [pdu.ScsiCommand.unpack_from(each.down.pdus[0][0]).itt for each in (ends, other)]
        assert itts == [0, 1]
        ends.close()
        other.respond(0)
        other.until(lambda: bool(other.up.pdus))
    finally:
        other.close()


@pytest.mark.parametrize("closer", [0, 1])
def test_a_peer_that_vanishes(ends: Ends, closer: int) -> None:
    """The end that stays sees a lost connection, and not before the peer has closed it.

    proves: ISER-4.2-2, ISER-5.2.3.2-4, ISER-10.1.1-1, ISER-10.1.1.2-1, ISER-10.1.2.2-3
    proves: ISER-GEN-8.1.6-2
    """
    sides = _sides(ends)
    ends.commanded(0, READ, memoryview(bytearray(512)))
    for side in sides:
        side.progress(0.0)  # raises nothing
    sides[closer].connection_terminate()
    with pytest.raises(ConnectionLost):
        drive(sides[1 - closer])


@pytest.mark.parametrize("asking", [0, 1])
def test_disconnect_is_found_by_progress(ends: Ends, asking: int) -> None:
    sides = _sides(ends)
    sides[asking].disconnect()
    for side in (sides[asking], sides[1 - asking]):
        with pytest.raises(TransportError):
            drive(side)


def test_an_initiator_that_disconnects_does_not_blame_the_target(ends: Ends) -> None:
    ends.initiator.disconnect()
    with pytest.raises(TransportError, match="this side"):
        drive(ends.initiator)


def test_both_describe_themselves(ends: Ends) -> None:
    for side in _sides(ends):
        assert side.describe()["datamover"] in ("iser", "tcp")


# shows: SYSTEM-3
def test_each_upward_primitive_is_called(ends: Ends) -> None:
    """Control_Notify at both ends, Data_Completion_Notify at the target; ``progress`` raises where
    RFC 7145 has Connection_Terminate_Notify.

    proves: ISER-3.2-1
    """
    source, sink = bytearray(b"x" * 65536), bytearray(32768)
    answer = ends.commanded(0, WRITE, memoryview(source))
    assert [head[0] for head, _, _ in ends.down.pdus if head[0] == bhs.SCSI_COMMAND]
    ends.target.get_data(answer, memoryview(sink), 16384)
    ends.until(lambda: bool(ends.down.filled))
    ends.respond(0)
    ends.until(lambda: bool(ends.up.pdus))
    assert ends.down.filled == [answer]
    assert [head[0] for head, _, _ in ends.up.pdus] == [bhs.SCSI_RESPONSE]
    ends.initiator.disconnect()
    for side in _sides(ends):
        with pytest.raises(TransportError):
            drive(side)


# shows: SYSTEM-3
def test_primitives_and_their_users() -> None:
    """Each downward primitive of section 3.1 is a call of the seams; those that move data exist at
    the target alone. Deallocating a connection's resources is a part of its end.
    proves: ISER-3.1-1"""
    both = {
        "send_control",
        "allocate_connection_resources",
        "enable_datamover",
        "connection_terminate",
        "notice_key_values",
        "deallocate_task_resources",
    }
    target_only = {"put_data", "get_data"}
    assert both | target_only <= set(dir(TargetDatamover))
    assert both <= set(dir(InitiatorDatamover)) and not target_only & set(dir(InitiatorDatamover))
