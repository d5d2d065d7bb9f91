"""The iWARP queue pair against a peer made of plain bytes: what the contract suite cannot see."""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Iterator
from typing import Any

import pytest

from iserblk.errors import ConnectionLost, LocalProtocolError, RemoteProtocolError
from iserblk.rcap import seam
from iserblk.rcap.iwarp import ddp, mpa
from iserblk.rcap.iwarp.llp import MpaLlp
from iserblk.rcap.iwarp.queuepair import MOST_REQUESTS, TURN_BYTES, IwarpQueuePair
from iserblk.sockets.wire import WOULD_BLOCK, SocketWire
from tests.rcap.fpdu import Fpdu, decode_fpdu
from tests.rcap.wire import (
    PATIENCE_S,
    Driver,
    connected_sockets,
    iwarp_pair,
    pattern,
    rdma_request,
    send_request,
)
from tests.support.descriptors import descriptors, descriptors_to_begin_with

SEND_1 = ddp.encode_fpdu(ddp.UntaggedHeader(22, 0x4143, 0, 0, 1, 0), b"data", crc=True)


def parameters(**changes: object) -> mpa.MpaParameters:
    values: dict[str, object] = {
        "revision": 2,
        "enhanced": True,
        "crc": True,
        "markers": False,
        "ird": 4,
        "ord": 4,
        "peer_ird": 4,
        "peer_ord": 4,
        "rtr": mpa.RTR_NONE,
        "private_data": b"",
    }
    return mpa.MpaParameters(**{**values, **changes})  # type: ignore[arg-type]


class Bench:
    """A queue pair and the bare socket at its other end."""

    def __init__(self, *, initiator: bool = True, **changes: object) -> None:
        mine, self.wire = connected_sockets()
        self.wire.settimeout(PATIENCE_S)
        self.pair = IwarpQueuePair(mine, parameters(**changes), initiator=initiator)
        self.pair.post_receive(10)
        self.driver = Driver(self.pair)

    def run_until_error(self) -> Exception:
        self.driver.run(lambda: self.driver.errors[0] is not None)
        error = self.driver.errors[0]
        assert error is not None
        return error

    def read(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            piece = self.wire.recv(count - len(data))
            assert piece, f"end after {data.hex()}"
            data += piece
        return data

    def silent(self) -> bool:
        return not select.select([self.wire], [], [], 0)[0]


@pytest.fixture
def benches() -> Iterator[list[Bench]]:
    made: list[Bench] = []
    yield made
    for bench in made:
        bench.pair.close()
        bench.wire.close()


def make(benches: list[Bench], **options: object) -> Bench:
    benches.append(Bench(**options))  # type: ignore[arg-type]
    return benches[-1]


# --- the first frames ---


@pytest.mark.parametrize(
    ("rtr", "frame"),
    [
        (mpa.RTR_SEND, "0012 4143 00000000 00000000 00000001 00000000 587be8c4"),
        (mpa.RTR_WRITE, "000e c140 00000001 0000000000000000 ebd34c5f"),
        (
            mpa.RTR_READ,
            "002e 4141 00000000 00000001 00000001 00000000"
            "00000001 0000000000000000 00000000 00000001 0000000000000000 27dbd7e7",
        ),
    ],
)
def test_rtr_frame_goes_out_at_once(benches: list[Bench], rtr: int, frame: str) -> None:
    expected = bytes.fromhex(frame)
    bench = make(benches, rtr=rtr)
    assert bench.read(len(expected)) == expected
    assert bench.silent()


def test_read_behind_the_rtr_read_has_msn_2_and_only_it_completes(benches: list[Bench]) -> None:
    bench = make(benches, rtr=mpa.RTR_READ, ord=1)
    sink = bytearray(4)
    bench.pair.post([rdma_request(seam.RDMA_READ, memoryview(sink), 0x1234, 8, "mine")])
    bench.read(52)
    assert bench.silent()  # ORD 1: it waits for the answer to the RTR
    bench.wire.sendall(bytes.fromhex("000ec142 00000001 0000000000000000 21a3e83e"))
    bench.driver.run(lambda: not bench.silent())
    decoded = decode_fpdu(bench.read(52), crc=True)
    assert decoded is not None
    header = decoded[0].header
    assert isinstance(header, ddp.UntaggedHeader) and (header.qn, header.msn) == (1, 2)
    sink_stag = int.from_bytes(decoded[0].payload[:4], "big")
    answer = ddp.TaggedHeader(18, 0xC142, sink_stag, 0)
    bench.wire.sendall(ddp.encode_fpdu(answer, b"sink", crc=True))
    bench.driver.run(lambda: bool(bench.driver.events[0]))
    assert [event.token for event in bench.driver.events[0]] == ["mine"]
    assert sink == b"sink"


# shows: SYSTEM-13
@pytest.mark.parametrize("rtr", [mpa.RTR_NONE, mpa.RTR_SEND, mpa.RTR_WRITE, mpa.RTR_READ])
@pytest.mark.parametrize("crc", [True, False])
def test_both_ends_with_each_rtr(rtr: int, crc: bool) -> None:
    a, b = iwarp_pair(rtr=rtr, crc=crc, ird=1, ord=1)
    driver = Driver(a, b)
    a.post_receive(1)
    b.post_receive(1)
    a.post([send_request(a, b"from a")])
    b.post([send_request(b, b"from b")])
    driver.run(lambda: all(driver.events))
    assert [events[0].data for events in driver.events] == [b"from b", b"from a"]
    assert [len(events) for events in driver.events] == [1, 1]
    a.close()
    b.close()


def test_responder_sends_nothing_before_the_first_fpdu(benches: list[Bench]) -> None:
    bench = make(benches, initiator=False)
    bench.pair.post([send_request(bench.pair, b"early")])
    bench.pair.progress(0.0)
    assert bench.silent()
    bench.wire.sendall(SEND_1)
    bench.driver.run(lambda: not bench.silent())
    assert b"early" in bench.read(20 + 5 + 3 + 4)


def test_responder_that_never_got_a_valid_fpdu_ends_without_a_terminate(
    benches: list[Bench],
) -> None:
    bench = make(benches, initiator=False)
    bench.wire.sendall(SEND_1[:-1] + b"\0")
    assert isinstance(bench.run_until_error(), RemoteProtocolError)
    assert bench.wire.recv(100) == b""


def test_fpdus_behind_the_reply_are_taken_without_waiting(benches: list[Bench]) -> None:
    bench = make(benches, leftover=SEND_1 + SEND_1[:10])
    assert bench.pair.next_deadline() == 0.0
    bench.driver.step(0)
    assert [event.data for event in bench.driver.events[0]] == [b"data"]
    assert bench.pair.next_deadline() is None


# --- the end ---


def test_terminate_reaches_the_peer_and_then_the_end(benches: list[Bench]) -> None:
    # proves: ISER-4.1-12, ISER-10.1.2.1-1
    bench = make(benches)
    bench.wire.sendall(SEND_1 + SEND_1)
    error = bench.run_until_error()
    assert isinstance(error, RemoteProtocolError) and error.terminate == ddp.MSN_RANGE
    assert [event.data for event in bench.driver.events[0]] == [b"data"]
    terminate = decode_fpdu(bench.read(20 + 24 + 4), crc=True)
    assert terminate is not None
    assert terminate[0].header == ddp.UntaggedHeader(42, 0x4147, 0, 2, 1, 0)
    assert terminate[0].payload == bytes.fromhex("1203c000 0016") + SEND_1[2:20]
    assert bench.wire.recv(100) == b""
    assert bench.pair.fileno() >= 0
    bench.pair.close()
    assert bench.pair.fileno() == -1


def test_close_with_unread_bytes_does_not_reset_away_the_terminate(benches: list[Bench]) -> None:
    bench = make(benches)
    bench.wire.sendall(SEND_1[:-1] + b"\0" + bytes(100_000))
    bench.run_until_error()
    bench.pair.close()
    assert bench.read(28)[20:24] == bytes.fromhex("20020000")


def test_error_behind_completions_is_announced_by_the_deadline(benches: list[Bench]) -> None:
    bench = make(benches)
    bench.wire.sendall(SEND_1 + SEND_1)
    select.select([bench.pair.fileno()], [], [], PATIENCE_S)
    assert [c.opcode for c in bench.pair.progress(0.0)] == [seam.RECEIVE]
    assert bench.pair.next_deadline() == 0.0
    with pytest.raises(RemoteProtocolError):
        bench.pair.progress(0.0)


@pytest.mark.parametrize(
    ("sent", "text"),
    [
        (b"", "the peer closed the connection$"),
        (SEND_1[:1], "in the middle of a message"),
        (SEND_1[:-1], "in the middle of a message"),
    ],
)
def test_end_of_the_stream(benches: list[Bench], sent: bytes, text: str) -> None:
    bench = make(benches)
    bench.wire.sendall(sent)
    bench.wire.close()
    error = bench.run_until_error()
    assert isinstance(error, ConnectionLost)
    with pytest.raises(ConnectionLost, match=text):
        raise error


def test_reset_by_the_peer(benches: list[Bench]) -> None:
    bench = make(benches)
    bench.wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    bench.wire.close()
    assert isinstance(bench.run_until_error(), ConnectionLost)
    with pytest.raises(ConnectionLost):
        bench.pair.post([send_request(bench.pair, b"more")])


def test_reset_found_by_a_send(benches: list[Bench]) -> None:
    bench = make(benches)
    bench.wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    bench.wire.close()
    memory = bytearray(1000)
    select.select([bench.pair.fileno()], [], [], PATIENCE_S)
    with pytest.raises(ConnectionLost):
        for _ in range(3):
            bench.pair.post([rdma_request(seam.RDMA_WRITE, memory, 1, 0)])  # type: ignore[arg-type]
    memory.clear()
    assert isinstance(bench.run_until_error(), ConnectionLost)


def test_terminate_waits_its_turn_behind_a_full_socket(benches: list[Bench]) -> None:
    bench = make(benches, crc=False)
    data = pattern(32 << 20)
    bench.pair.post([rdma_request(seam.RDMA_WRITE, data, 1, 0)])
    assert bench.pair.wants_write()
    bench.wire.sendall(bytes(100))
    bench.run_until_error()
    bench.pair.close()
    received = b""
    while piece := bench.wire.recv(1 << 20):
        received += piece
    # Whole frames at first; where the socket was full at the end, it ends there.
    assert 0 < len(received) < len(data)
    decoded = decode_fpdu(received, crc=False)
    assert decoded is not None and decoded[0].payload == data[: len(decoded[0].payload)]


def test_requests_that_no_peer_takes_have_a_bound(benches: list[Bench]) -> None:
    """A peer that takes nothing, and answers all the same, ends what waits, and more comes."""
    bench = make(benches, crc=False)
    bench.pair.post([rdma_request(seam.RDMA_WRITE, pattern(32 << 20), 1, 0)])
    assert bench.pair.wants_write()
    request = send_request(bench.pair, b"data")
    bench.pair.post([request] * MOST_REQUESTS)
    with pytest.raises(ConnectionLost, match="takes nothing"):
        bench.pair.post([request])
    assert isinstance(bench.run_until_error(), ConnectionLost)


class Swallow:
    """A Wire that takes all at once."""

    def __init__(self) -> None:
        self.taken = 0

    def send(self, _buffers: list[bytes | memoryview], size: int) -> int:
        self.taken += size
        return size

    def receive(self, _buffers: list[memoryview]) -> int:
        return WOULD_BLOCK


def test_one_turn_sends_no_more_than_its_share() -> None:
    """A peer that takes all at once does not keep the event loop: the rest leaves in later turns,
    for which the socket is writable."""
    mine, wire = connected_sockets()
    lower = MpaLlp(mine, parameters(crc=False))
    swallow = Swallow()
    lower.wire = swallow  # type: ignore[assignment]
    pair = IwarpQueuePair(mine, parameters(crc=False), initiator=True, llp=lower)
    size = 32 << 20
    request = rdma_request(seam.RDMA_WRITE, pattern(size), 1, 0, "sent")
    request.signaled = True
    pair.post([request])
    turns, completions = 1, []
    while pair.wants_write():
        assert swallow.taken <= turns * (TURN_BYTES + (2 << 20))
        completions += pair.progress(0.0)
        turns += 1
    assert swallow.taken >= size and 2 < turns <= 4
    assert [each.token for each in completions + pair.progress(0.0)] == ["sent"]
    pair.close()
    wire.close()


class Flood:
    """A Wire that always has as many of one FPDU as fit. ``receives``: how often it was asked."""

    fpdu = b""
    receives = 0

    def send(self, _buffers: list[bytes | memoryview], size: int) -> int:
        return size

    def receive(self, buffers: list[memoryview]) -> int:
        self.receives += 1
        count = len(buffers[0]) // len(self.fpdu)
        buffers[0][: count * len(self.fpdu)] = self.fpdu * count
        return count * len(self.fpdu)


@pytest.mark.parametrize(("size", "fewest", "most"), [(0, 1, 1), (8, 1, 1), (16384, 16, 16)])
def test_one_turn_takes_no_more_segments_than_its_share(size: int, fewest: int, most: int) -> None:
    """A peer that always has small segments does not keep the event loop, though none of them
    completes anything."""
    mine, wire = connected_sockets()
    lower = MpaLlp(mine, parameters(crc=False))
    flood = Flood()
    lower.wire = flood  # type: ignore[assignment]
    pair = IwarpQueuePair(mine, parameters(crc=False), initiator=True, llp=lower)
    stag, _ = pair.advertise(memoryview(bytearray(1 << 20)), seam.REMOTE_WRITE)
    header = ddp.TaggedHeader(ddp.TAGGED_SIZE - ddp.LENGTH_SIZE + size, 0xC140, stag, 0)
    flood.fpdu = ddp.encode_fpdu(header, bytes(size), crc=False)
    assert not pair.progress(0.0)
    assert fewest <= flood.receives <= most
    pair.close()
    wire.close()


# --- memory ---


def test_retire_in_the_middle_of_a_segment(benches: list[Bench]) -> None:
    """Without CRC the rest of a large segment goes straight into memory, but not after retire."""
    bench = make(benches, crc=False)
    memory = bytearray(60_000)
    stag, _ = bench.pair.advertise(memoryview(memory), seam.REMOTE_WRITE)
    write = ddp.encode_fpdu(ddp.TaggedHeader(60_014, 0xC140, stag, 0), b"x" * 60_000, crc=False)
    bench.wire.sendall(write[:20_000])
    bench.driver.run(lambda: memory[19_000] == ord("x"))
    assert bench.pair.retire(stag) is True
    memory[:] = bytes(60_000)
    bench.wire.sendall(write[20_000:] + SEND_1)
    bench.driver.run(lambda: bool(bench.driver.events[0]))
    assert memory == bytes(60_000)
    memory.clear()


# --- sockets ---


def test_no_descriptor_is_left_after_many_connections() -> None:
    before = descriptors_to_begin_with()
    for _ in range(200):
        a, b = iwarp_pair()
        driver = Driver(a, b)
        b.post_receive(1)
        a.post([send_request(a, b"hello")])
        driver.run(lambda driver=driver: bool(driver.events[1]))  # type: ignore[misc]
        a.close()
        b.close()
    assert descriptors() == before


def test_over_a_socket_that_is_not_tcp() -> None:
    first, second = socket.socketpair()
    a = IwarpQueuePair(first, parameters(), initiator=True)
    b = IwarpQueuePair(second, parameters(), initiator=False)
    b.post_receive(1)
    driver = Driver(a, b)
    a.post([send_request(a, b"hello")])
    driver.run(lambda: bool(driver.events[1]))
    assert driver.events[1][0].data == b"hello"
    a.close()
    b.close()


@pytest.mark.parametrize("size", [536, 1400])
def test_frames_follow_the_segment_size_of_tcp(size: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        first = socket.socket()
        first.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, size)
        first.connect(listener.getsockname())
        wire, _ = listener.accept()
    emss = first.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
    pair = IwarpQueuePair(first, parameters(), initiator=True)
    assert pair.describe()["emss"] == emss <= size
    pair.post([rdma_request(seam.RDMA_WRITE, pattern(20_000), 1, 0)])
    pair.close()
    received = b""
    with wire:
        while piece := wire.recv(65536):
            received += piece
    payload = b""
    while received:
        decoded = decode_fpdu(received, crc=True)
        assert decoded is not None and decoded[1] <= emss
        payload += decoded[0].payload
        received = received[decoded[1] :]
    assert payload == pattern(20_000)


class RecordingSocket(socket.socket):
    """Keeps the size and the flags of each send."""

    sends: list[tuple[int, int]]

    def send(self, data: memoryview, flags: int = 0) -> int:  # type: ignore[override]
        self.sends.append((len(data), flags))
        return super().send(data, flags)

    def sendmsg(self, buffers: list[memoryview], ancillary: tuple[()] = (), flags: int = 0) -> int:  # type: ignore[override]
        self.sends.append((sum(map(len, buffers)), flags))
        return super().sendmsg(buffers, ancillary, flags)


@pytest.mark.plain("replaces a function of its module")
@pytest.mark.parametrize("crc", [True, False])
@pytest.mark.parametrize("allowed", [True, False])
def test_with_crc_each_send_ends_a_segment(
    crc: bool, allowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """siw needs this: TCP puts nothing behind a batch into its last segment. A peer that takes
    frames wherever they are cut does not."""
    monkeypatch.setattr("iserblk.rcap.iwarp.llp.wire", SocketWire)  # it can be watched
    first, second = connected_sockets()
    sock = RecordingSocket(fileno=first.detach())
    sock.sends = []
    pair = IwarpQueuePair(sock, parameters(crc=crc), initiator=True, emss=1448)
    if allowed:
        pair.allow_ulpdu(65535)
    pair.post([send_request(pair, b"small"), rdma_request(seam.RDMA_WRITE, bytes(9000), 1, 0)])
    pair.close()
    second.close()
    assert sock.sends
    assert all(bool(flags & socket.MSG_EOR) is (crc and not allowed) for _, flags in sock.sends)
    assert len(sock.sends) == (2 if crc and not allowed else 1)


@pytest.mark.parametrize(
    ("options", "crc", "declares", "after"),
    [
        ({}, True, 65535, 65534),
        ({}, False, 0, 65534),  # they are as large already
        ({"segments": 1}, True, 0, 1442),
        ({"segments": 4}, True, 0, 4 * 1448 - 6),
    ],
)
def test_largest_ulpdu(options: dict[str, Any], crc: bool, declares: int, after: int) -> None:
    """What is declared, and what an allowance of the peer leads to."""
    first, second = connected_sockets()
    with second:
        pair = IwarpQueuePair(first, parameters(crc=crc), initiator=True, emss=1448, **options)
        assert pair.max_ulpdu == declares
        before = pair.describe()["mulpdu"]
        assert before == (1442 if declares else after)
        pair.allow_ulpdu(65535)
        assert pair.describe()["mulpdu"] == after
        pair.close()


class Shrinking:
    """An LLP whose network changes; ``size`` is its segment size."""

    def __init__(self, llp: MpaLlp, size: int) -> None:
        self._llp = llp
        self.size = size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llp, name)

    def emss(self) -> int:
        return self.size


def test_frames_follow_the_segment_size() -> None:
    """A smaller segment size is noticed soon, and used from the next batch on."""
    first, second = connected_sockets()
    with second:
        second.settimeout(PATIENCE_S)
        llp = Shrinking(MpaLlp(first, parameters()), 1448)
        pair = IwarpQueuePair(first, parameters(), initiator=True, llp=llp)
        llp.size = 1388
        stream = b""
        for _ in range(3):
            pair.post([rdma_request(seam.RDMA_WRITE, bytes(70_000), 1, 0)])
            wanted = len(stream) + 70_000
            while len(stream) < wanted:
                stream += second.recv(1 << 20)
        lengths = [frame.header.length for frame in whole_frames(stream)]
        assert max(lengths[:49]) == 1442
        assert max(lengths[49:]) == 1382
        pair.close()


def whole_frames(stream: bytes) -> list[Fpdu]:
    found = []
    while (decoded := decode_fpdu(stream, crc=True)) is not None:
        found.append(decoded[0])
        stream = stream[decoded[1] :]
    return found


def test_frames_larger_than_a_segment_arrive() -> None:
    """Between two ends that have said so, in both directions, over segments of 1,448 bytes."""
    pairs = iwarp_pair(emss=1448)
    for pair in pairs:
        assert pair.max_ulpdu
        pair.allow_ulpdu(pair.max_ulpdu)
    driver = Driver(*pairs)
    sinks = [bytearray(300_001), bytearray(300_001)]
    for sink, pair, other in zip(sinks, pairs, reversed(pairs), strict=True):
        stag, base = other.advertise(memoryview(sink), seam.REMOTE_WRITE)
        pair.post([rdma_request(seam.RDMA_WRITE, pattern(len(sink)), stag, base)])
    driver.run(lambda: all(sink == pattern(len(sink)) for sink in sinks))
    for pair in pairs:
        pair.close()


def test_description_names_both_ends(benches: list[Bench]) -> None:
    bench = make(benches, rtr=mpa.RTR_WRITE)
    description = bench.pair.describe()
    assert str(description["peer"]).startswith("127.0.0.1:")
    assert description["local"] != description["peer"]
    assert description["mpa_crc"] is True


def test_read_without_ord_is_a_bug_of_the_caller(benches: list[Bench]) -> None:
    bench = make(benches, ord=0)
    with pytest.raises(LocalProtocolError):
        bench.pair.post([rdma_request(seam.RDMA_READ, memoryview(bytearray(1)), 1, 0)])
    assert bench.silent()


def test_a_read_beyond_a_lowered_ird_is_refused() -> None:
    """The ULPs have agreed on less than connection management has."""
    a, b = iwarp_pair(ird=4, ord=4)
    driver = Driver(a, b)
    try:
        a.limit_reads(1, 4)
        b.post_receive(1)
        source = memoryview(bytearray(2_000_000))  # more than the socket takes at once
        stag, base = a.advertise(source, seam.REMOTE_READ)
        b.post(
            [
                rdma_request(seam.RDMA_READ, memoryview(bytearray(1_000_000)), stag, base)
                for _ in range(4)
            ]
        )
        a.post([send_request(a, b"opens")])
        driver.run(lambda: driver.errors[0] is not None)
        assert "more than 1 RDMA Reads" in str(driver.errors[0])
    finally:
        a.close()
        b.close()
