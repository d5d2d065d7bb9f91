"""The datamover contract over Traditional iSCSI: both ends on a socket pair, and a lying peer."""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from iserblk.datamover.iser_target import TargetSlot
from iserblk.datamover.seam import INLINE, READ, WRITE, PduSlot
from iserblk.datamover.tcp_initiator import TcpInitiator
from iserblk.datamover.tcp_target import TcpTarget
from iserblk.errors import ConnectionLost, RemoteProtocolError
from iserblk.iscsi import bhs, pdu
from iserblk.iscsi.keys import SessionParameters
from iserblk.sockets.stream import SocketStream
from tests.contract.test_datamover import Recorder, drive

INLINE_SIZE = 8192
PLAIN = SessionParameters(
    max_burst_length=65536, first_burst_length=16384, max_recv_data_segment_length=8192
)
WAYS = {
    "plain": PLAIN,
    "no-immediate-data": replace(PLAIN, immediate_data=False),
    "unsolicited": replace(PLAIN, initial_r2t=False),
    "unsolicited-only": replace(PLAIN, initial_r2t=False, immediate_data=False),
    "digests": replace(PLAIN, header_digest="CRC32C", data_digest="CRC32C"),
    "header-digest": replace(PLAIN, header_digest="CRC32C"),
    "data-digest": replace(PLAIN, data_digest="CRC32C"),
    "large-segments": replace(
        PLAIN,
        max_burst_length=1 << 20,
        max_recv_data_segment_length=262144,
        initiator_recv_data_segment_length=262144,
    ),
}
SIZES = [1, 3, 512, 4096, 8192, 16384, 16385, 65537, (1 << 20) + 1]


class Numbers:
    stat_sn = 100
    exp_cmd_sn = 5
    max_cmd_sn = 50


class Ends:
    """Both ends of one connection, as the two layers above use them."""

    def __init__(self, way: SessionParameters = PLAIN) -> None:
        left, right = socket.socketpair()
        self.way = way
        self.up, self.down = Recorder(), Recorder()
        self.initiator = TcpInitiator(SocketStream(left), INLINE_SIZE, 262144)
        self.target = TcpTarget(SocketStream(right), 262144)
        self.initiator.user, self.target.user = self.up, self.down
        self.target.notice_numbers(Numbers())
        self.slots = [PduSlot(index) for index in range(8)]
        self.answers = [TargetSlot(index) for index in range(8)]
        self.initiator.allocate_connection_resources(self.slots, 8)
        self.target.allocate_connection_resources(self.answers, INLINE_SIZE, 8)
        for end in (self.initiator, self.target):
            end.notice_key_values(way)
            end.enable_datamover()
        self.next = 0
        self.down.on_pdu = self.map

    def map(self, unit: bytes) -> None:
        if unit[0] == bhs.SCSI_COMMAND:
            self.target.map_task(self.answers[self.next])
            self.next += 1

    def until(self, condition: Callable[[], bool]) -> None:
        for _ in range(10000):
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

    def command(self, index: int, direction: int, data: memoryview) -> None:
        slot = self.slots[index]
        slot.direction, slot.data = direction, data
        slot.bhs[:] = pdu.ScsiCommand(
            flags=bhs.FLAG_FINAL | (bhs.FLAG_READ if direction == READ else bhs.FLAG_WRITE),
            lun=bytes((0, 3, 0, 0, 0, 0, 0, 0)),
            itt=index,
            edtl=len(data),
            cmd_sn=index,
            exp_stat_sn=1,
            cdb=bytes(16),
        ).pack()
        self.initiator.send_control(slot)

    def respond(self, index: int, status: int = 0, sense: bytes = b"", **more: int) -> None:
        answer = self.answers[index]
        answer.inline[: len(sense)] = sense
        answer.inline_length = len(sense)
        answer.bhs[:] = pdu.ScsiResponse(
            status=status,
            data_length=len(sense),
            itt=index,
            stat_sn=100,
            exp_cmd_sn=5,
            max_cmd_sn=50,
            **more,
        ).pack()
        self.target.send_control(answer, True)

    def close(self) -> None:
        self.initiator.connection_terminate()
        self.target.connection_terminate()


@pytest.fixture(params=list(WAYS))
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    both = Ends(WAYS[request.param])
    yield both
    both.close()


@pytest.fixture
def plain() -> Iterator[Ends]:
    both = Ends()
    yield both
    both.close()


def unsolicited(got: list[tuple[bytes, bytes, int]]) -> bytes:
    """The data that came up with a command, and behind it."""
    whole = b""
    for head, behind, _ in got:
        size = int.from_bytes(head[5:8], "big")
        if head[0] == bhs.DATA_OUT:
            assert pdu.DataOut.unpack_from(head).buffer_offset == len(whole)
        whole += behind[:size]
    return whole


@pytest.mark.parametrize("size", [0, 1, 3, 4, 511, 512, 8191, 8192])
def test_inline_data_arrives_whole(ends: Ends, size: int) -> None:
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


@pytest.mark.parametrize("size", SIZES)
def test_read(ends: Ends, size: int) -> None:
    """Data-In lands in the buffer; a good status comes with the last one, as a SCSI Response."""
    buffer = bytearray(size)
    source = bytes(i * 5 & 255 for i in range(size))
    ends.command(0, READ, memoryview(buffer))
    ends.until(lambda: bool(ends.down.pdus))
    ends.target.put_data(ends.answers[0], memoryview(source), 0)
    ends.respond(0)
    assert ends.answers[0].busy == 1
    ends.until(lambda: bool(ends.up.pdus))
    assert bytes(buffer) == source
    response = pdu.ScsiResponse.unpack_from(ends.up.pdus[0][0])
    assert response == pdu.ScsiResponse(
        status=0, itt=0, stat_sn=100, exp_cmd_sn=5, max_cmd_sn=50, exp_data_sn=response.exp_data_sn
    )
    ends.initiator.deallocate_task_resources(ends.slots[0], 0)
    assert ends.slots[0].data is None
    buffer.clear()  # BufferError while anybody has a view of it
    assert ends.down.sent == [ends.answers[0]] and ends.answers[0].busy == 0
    assert len(ends.up.pdus) == 1 and not ends.down.filled


@pytest.mark.parametrize("size", SIZES)
def test_write(ends: Ends, size: int) -> None:
    """What may go unasked does; the rest is asked for, burst by burst."""
    source = bytearray(i * 11 & 255 for i in range(size))
    sink = bytearray(size)
    ends.command(0, WRITE, memoryview(source))
    ends.until(lambda: bool(ends.down.pdus) and bool(ends.down.pdus[-1][0][1] & bhs.FLAG_FINAL))
    first = unsolicited(ends.down.pdus)
    way = ends.way
    most = min(size, way.first_burst_length)
    if way.initial_r2t:
        most = min(most, way.max_recv_data_segment_length) if way.immediate_data else 0
    assert len(first) == most
    sink[:most] = first
    for at in range(most, size, way.max_burst_length):
        part = memoryview(sink)[at : at + way.max_burst_length]
        ends.target.get_data(ends.answers[0], part, at)
        ends.until(lambda: bool(ends.down.filled))
        assert ends.down.filled == [ends.answers[0]] and ends.answers[0].busy == 0
        ends.down.filled.clear()
    assert sink == source
    ends.respond(0)
    ends.until(lambda: bool(ends.up.pdus))
    ends.initiator.deallocate_task_resources(ends.slots[0], 0)
    source.clear()  # BufferError while anybody has a view of it


def test_sense_and_residual(plain: Ends) -> None:
    """A status other than GOOD has a PDU of its own, behind what data there is."""
    buffer = bytearray(100)
    plain.command(0, READ, memoryview(buffer))
    plain.until(lambda: bool(plain.down.pdus))
    plain.target.put_data(plain.answers[0], memoryview(b"part"), 0)
    plain.respond(0, 2, b"\0\2ab", flags=bhs.FLAG_FINAL | bhs.RESIDUAL_UNDERFLOW, residual=96)
    plain.until(lambda: bool(plain.up.pdus))
    head, behind, _ = plain.up.pdus[0]
    response = pdu.ScsiResponse.unpack_from(head)
    assert (response.status, response.residual, behind) == (2, 96, b"\0\2ab")
    assert (response.exp_data_sn, buffer[:5]) == (1, b"part\0")


@pytest.mark.parametrize("status", [0, 2])  # 2: its sense data may say that it went well
@pytest.mark.parametrize("said", [0, 3])
def test_missing_data_is_residual_whatever_the_target_says(
    plain: Ends, said: int, status: int
) -> None:
    buffer = bytearray(100)
    plain.command(0, READ, memoryview(buffer))
    plain.until(lambda: bool(plain.down.pdus))
    plain.target.put_data(plain.answers[0], memoryview(b"abc"), 40)
    flags = bhs.FLAG_FINAL | (bhs.RESIDUAL_UNDERFLOW if said else 0)
    plain.respond(0, status, flags=flags, residual=said)
    plain.until(lambda: bool(plain.up.pdus))
    response = pdu.ScsiResponse.unpack_from(plain.up.pdus[0][0])
    assert response.flags == bhs.FLAG_FINAL | bhs.RESIDUAL_UNDERFLOW
    assert response.residual == 97
    assert bytes(buffer) == bytes(40) + b"abc" + bytes(57)


def test_additional_header_segments_arrive_intact(ends: Ends) -> None:
    unit = struct.pack(">BBxxI8sI28x", 1, 0x80, 2 << 24 | 5, b"LUNfield", 7)
    behind = b"\0\5\1\0abcd" + b"12345"
    slot, answer = ends.slots[0], ends.answers[0]
    for part in (slot, answer):
        part.bhs[:] = unit
        part.inline[:13] = behind
        part.inline_length = 13
    slot.direction = INLINE
    ends.initiator.send_control(slot)
    ends.until(lambda: bool(ends.down.pdus))
    assert (ends.down.pdus[0][0], ends.down.pdus[0][1][:13]) == (unit, behind)


def test_two_writes_at_once(ends: Ends) -> None:
    """R2Ts of several tasks; each Data-Out finds its own sink."""
    sources = [bytearray(bytes((index + 1,)) * 200_000) for index in range(3)]
    for index, source in enumerate(sources):
        ends.command(index, WRITE, memoryview(source))
    ends.until(lambda: ends.next == 3)
    sinks = [bytearray(50_000) for _ in sources]
    for index, sink in enumerate(sinks):
        ends.target.get_data(ends.answers[index], memoryview(sink), 100_000)
    ends.until(lambda: len(ends.down.filled) == 3)
    assert [bytes(sink) for sink in sinks] == [bytes(source[:50_000]) for source in sources]


def test_cancelled_data_is_dropped(plain: Ends) -> None:
    """The sink is free at once; what comes late for it harms nobody."""
    source, sink = bytearray(b"x" * 65536), bytearray(32768)
    plain.command(0, WRITE, memoryview(source))
    plain.until(lambda: bool(plain.down.pdus))
    plain.target.get_data(plain.answers[0], memoryview(sink), 16384)
    assert plain.answers[0].busy == 1
    assert plain.target.cancel_data(plain.answers[0])
    assert plain.answers[0].busy == 0
    plain.target.deallocate_task_resources(plain.answers[0])
    sink.clear()  # BufferError while anybody has a view of it
    plain.command(1, READ, memoryview(bytearray(4)))
    plain.until(lambda: plain.next == 2)
    plain.target.flush()
    plain.initiator.progress(0.0)
    plain.target.progress(0.0)
    assert not plain.down.filled


def test_a_task_that_ends_without_a_response(plain: Ends) -> None:
    """Its buffer is free, and late data for it ends the connection."""
    buffer = bytearray(8)
    plain.command(0, READ, memoryview(buffer))
    plain.until(lambda: bool(plain.down.pdus))
    plain.initiator.deallocate_task_resources(plain.slots[0], 0)
    buffer.clear()  # BufferError while anybody has a view of it
    plain.target.put_data(plain.answers[0], memoryview(b"too late"), 0)
    plain.respond(0)
    plain.target.flush()
    with pytest.raises(RemoteProtocolError, match="no such read"):
        drive(plain.initiator)


@pytest.mark.parametrize("end", ["connection_terminate", "deallocate_connection_resources"])
def test_the_end_frees_everything(plain: Ends, end: str) -> None:
    to_read, to_write, source, sink = (bytearray(1 << 20) for _ in range(4))
    plain.command(0, READ, memoryview(to_read))
    plain.command(1, WRITE, memoryview(to_write))
    plain.until(lambda: plain.next == 2)
    plain.target.put_data(plain.answers[0], memoryview(source), 0)
    plain.respond(0)
    plain.target.get_data(plain.answers[1], memoryview(sink)[:65536], 8192)
    plain.target.flush()
    plain.initiator.progress(0.0)
    for side in (plain.initiator, plain.target):
        getattr(side, end)()
        assert side.fileno() == -1
    for slot in plain.slots[:2]:
        slot.data = None
    for answer in plain.answers[:2]:
        plain.target.deallocate_task_resources(answer)
    for buffer in (to_read, to_write, source, sink):
        buffer.clear()  # BufferError while anybody has a view of it


def test_disconnect_is_found_by_progress(plain: Ends) -> None:
    for side in (plain.initiator, plain.target):
        side.disconnect()
        with pytest.raises(ConnectionLost):
            drive(side)


# -- a peer that lies ------------------------------------------------------------------------------


class Liar:
    """One end of ours with tasks 0 (a read) and 1 (a write) of 20,000 bytes; raw bytes to it."""

    def __init__(self, plain: Ends) -> None:
        left, right = socket.socketpair()
        self.socket = right
        self.dm = TcpInitiator(SocketStream(left), INLINE_SIZE, 8192)
        plain.initiator.connection_terminate()
        plain.initiator = self.dm
        self.dm.user = plain.up
        self.dm.allocate_connection_resources(plain.slots, 8)
        self.dm.notice_key_values(PLAIN)
        self.dm.enable_datamover()
        self.read = bytearray(20000)
        plain.command(0, READ, memoryview(self.read))
        plain.command(1, WRITE, memoryview(bytes(20000)))
        self.dm.flush()

    def say(self, unit: pdu.Pdu, data: bytes = b"") -> None:
        self.socket.sendall(unit.pack() + data)
        self.dm.progress(0.0)


@pytest.fixture
def liar(plain: Ends) -> Iterator[Liar]:
    lying = Liar(plain)
    yield lying
    lying.socket.close()


def data_in(**changes: int) -> tuple[pdu.DataIn, bytes]:
    fields = {"itt": 0, "data_length": 8, "data_sn": 0, "buffer_offset": 0, "flags": 0, **changes}
    unit = pdu.DataIn(lun=bytes(8), stat_sn=0, exp_cmd_sn=1, max_cmd_sn=9, **fields)
    return unit, bytes(unit.data_length)


@pytest.mark.parametrize(
    "changes",
    [
        {"itt": 1},
        {"itt": 9},
        {"data_sn": 1},
        {"buffer_offset": 19993},
        {"buffer_offset": 0xFFFFFFFF},
        {"data_length": 8193},
        {"flags": 0x01},
    ],
    ids=str,
)
def test_a_lying_data_in(liar: Liar, changes: dict[str, int]) -> None:
    with pytest.raises(RemoteProtocolError):
        liar.say(*data_in(**changes))


def test_data_in_over_data_that_came_already(liar: Liar) -> None:
    liar.say(*data_in(buffer_offset=8))
    with pytest.raises(RemoteProtocolError, match="came before"):
        liar.say(*data_in(buffer_offset=8, data_sn=1))


def r2t(**changes: int) -> pdu.ReadyToTransfer:
    fields = {"itt": 1, "ttt": 3, "r2t_sn": 0, "buffer_offset": 8192, "desired_length": 8192}
    fields |= changes
    return pdu.ReadyToTransfer(lun=bytes(8), stat_sn=0, exp_cmd_sn=1, max_cmd_sn=9, **fields)


@pytest.mark.parametrize(
    "changes",
    [
        {"itt": 0},
        {"itt": 9},
        {"r2t_sn": 1},
        {"buffer_offset": 0},
        {"buffer_offset": 19999},
        {"buffer_offset": 0xFFFFFFFF},
        {"desired_length": 0},
        {"desired_length": 65537},
        {"ttt": bhs.NO_TAG},
    ],
    ids=str,
)
def test_a_lying_r2t(liar: Liar, changes: dict[str, int]) -> None:
    with pytest.raises(RemoteProtocolError):
        liar.say(r2t(**changes))


def test_more_r2ts_than_were_agreed(liar: Liar) -> None:
    liar.socket.sendall(r2t().pack() + r2t(r2t_sn=1, buffer_offset=16384, desired_length=8).pack())
    with pytest.raises(RemoteProtocolError, match="MaxOutstandingR2T"):
        liar.dm.progress(0.0)


@pytest.mark.parametrize(
    "changes",
    [
        {"itt": 5},
        {"data_sn": 1},
        {"buffer_offset": 16000},
        {"data_length": 1001},
        {"flags": 0x80},
        {"data_length": 1000, "flags": 0},
        {"data_length": 0},
    ],
    ids=str,
)
def test_a_lying_data_out(plain: Ends, changes: dict[str, int]) -> None:
    plain.command(0, WRITE, memoryview(bytes(20000)))
    plain.until(lambda: bool(plain.down.pdus))
    plain.target.get_data(plain.answers[0], memoryview(bytearray(1000)), 8192)
    fields = {"itt": 0, "data_length": 8, "ttt": 1, "data_sn": 0, "flags": 0}
    fields |= {"buffer_offset": 8192, **changes}
    unit = pdu.DataOut(lun=bytes(8), exp_stat_sn=0, **fields)
    slot = plain.slots[1]
    slot.direction = INLINE
    slot.bhs[:] = unit.pack()
    slot.inline_length = unit.data_length
    plain.initiator.send_control(slot)
    plain.initiator.flush()
    with pytest.raises(RemoteProtocolError):
        drive(plain.target)


_WORDS = st.lists(
    st.sampled_from([0, 1, 2, 512, 8192, 16384, 19999, bhs.NO_TAG]) | st.integers(0, 0xFFFFFFFF),
    min_size=11,
    max_size=11,
)
_UNITS = st.lists(
    st.tuples(
        st.sampled_from([bhs.DATA_IN, bhs.R2T, bhs.SCSI_RESPONSE]) | st.integers(0, 255),
        st.integers(0, 255),
        _WORDS,
        st.binary(max_size=600),
        st.sampled_from([0, 1, None]),
    ),
    max_size=12,
)


@settings(deadline=None)
@given(_UNITS, st.booleans())
def test_whatever_a_target_sends(
    units: list[tuple[int, int, list[int], bytes, int | None]], honest: bool
) -> None:
    """With a read and a write under way: the documented errors, and no byte outside of the read."""
    plain = Ends()
    lying = Liar(plain)
    try:
        for opcode, flags, words, data, itt in units:
            head = bytearray((opcode, flags, 0, 0))
            head += b"".join(word.to_bytes(4, "big") for word in words)
            if honest:
                head[4:8] = len(data).to_bytes(4, "big")
            if itt is not None:
                head[16:20] = itt.to_bytes(4, "big")
            lying.socket.sendall(bytes(head) + data + bytes(-len(data) & 3))
            lying.dm.progress(0.0)
    except RemoteProtocolError:
        pass
    finally:
        assert len(lying.read) == 20000
        lying.socket.close()
        plain.close()
