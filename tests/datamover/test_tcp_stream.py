"""PDUs on a byte stream: every chunking, every digest, and nothing but RemoteProtocolError."""

from __future__ import annotations

import contextlib
import gc
import struct
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iserblk.datamover.tcp_stream import NOWHERE, OutPdu, PduReceiver, PduSender
from iserblk.errors import ConnectionLost, RemoteProtocolError

DATA_OUT = 0x05

ORPHANS = 1 << 12  # that may wait


class Stream:
    """Takes ``room`` bytes a call; keeps what was sent."""

    def __init__(self, room: int = 1 << 30) -> None:
        self.out = bytearray()
        self.room = room
        self.closed = False

    def send(self, buffers: list[bytes | memoryview], size: int) -> int:
        if self.closed:
            raise ConnectionLost("closed")
        whole = b"".join(buffers)
        assert len(whole) == size
        if not self.room:
            return -1
        self.out += whole[: self.room]
        return min(self.room, size)

    def receive(self, buffers: list[memoryview]) -> int:
        raise AssertionError

    def fileno(self) -> int:
        return -1

    def disconnect(self, discard: bool = False) -> None: ...

    def close(self) -> None:
        self.closed = True

    def describe(self) -> dict[str, object]:
        return {}


def bhs_of(opcode: int, size: int, ahs: int = 0, tag: int = 7) -> bytes:
    return struct.pack(">BBxxI8xI28x", opcode, 0x80, ahs // 4 << 24 | size, tag)


class Taker:
    """A receiver whose Data-Outs are placed in ``placed``, in order."""

    def __init__(self, most: int, header: bool, data: bool, drop: bool = False) -> None:
        self.got: list[tuple[bytes, bytes]] = []
        self.placed: list[bytearray] = []
        self.drop = drop
        self.rx = PduReceiver(self.place, self.deliver)
        self.rx.full_feature_phase(most, header, data)

    def place(self, message: memoryview, at: int) -> memoryview | None:
        if message[at] != DATA_OUT:
            return None
        if self.drop:
            return NOWHERE
        size = int.from_bytes(message[at + 5 : at + 8], "big")
        self.placed.append(bytearray(size))
        return memoryview(self.placed[-1])

    def deliver(self, message: memoryview, placed: bool) -> None:
        head = bytes(message[:48])
        if placed:
            assert len(message) == 48
            self.got.append((head, b"" if self.drop else bytes(self.placed[-1])))
        else:
            end = 48 + head[4] * 4 + int.from_bytes(head[5:8], "big")
            assert 0 <= len(message) - end < 4
            self.got.append((head, bytes(message[48:end])))

    def feed(self, data: bytes, chunks: list[int] | None = None) -> None:
        turn = 0
        while data:
            size = min(chunks[turn % len(chunks)] if chunks else len(data), len(data))
            turn += 1
            taken = 0
            for view in self.rx.buffers():
                part = data[taken : min(size, taken + len(view))]
                view[: len(part)] = part
                taken += len(part)
            assert taken
            data = data[taken:]
            self.rx.received(taken)


PDUS = st.lists(
    st.tuples(st.sampled_from([0, 1, DATA_OUT]), st.integers(0, 3), st.binary(max_size=300)),
    max_size=8,
)


def on_the_wire(pdus: list[tuple[int, int, bytes]], header: bool, data: bool) -> bytes:
    stream = Stream()
    tx = PduSender(stream)
    tx.full_feature_phase(header, data)
    for opcode, words, payload in pdus:
        ahs = bytes(range(words * 4))
        head = bhs_of(opcode, len(payload), len(ahs)) + ahs
        tx.queued.append(tx.frame(head, memoryview(payload), object()))
    tx.flush()
    return bytes(stream.out)


@given(PDUS, st.booleans(), st.booleans(), st.lists(st.integers(1, 400), min_size=1))
def test_any_chunking(
    pdus: list[tuple[int, int, bytes]], header: bool, data: bool, chunks: list[int]
) -> None:
    taker = Taker(300, header, data)
    taker.feed(on_the_wire(pdus, header, data), chunks)
    expected = []
    for opcode, words, payload in pdus:
        ahs = bytes(range(words * 4))
        placed = opcode == DATA_OUT and payload
        head = bhs_of(opcode, len(payload), len(ahs))
        expected.append((head, payload if placed else ahs + payload))
    assert taker.got == expected
    assert taker.rx.staged == 0


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("digest", [False, True])
def test_large_data_is_received_where_it_belongs(digest: bool, drop: bool) -> None:
    """Behind the first read-ahead every byte is offered a place in the task's own buffer."""
    payload = bytes(i * 7 & 255 for i in range(1 << 20))
    wire = on_the_wire([(DATA_OUT, 0, payload), (0, 0, b"ping")], digest, digest)
    taker = Taker(1 << 20, digest, digest, drop)
    taker.feed(wire[:100])
    views = taker.rx.buffers()
    if not drop:
        assert views[0].obj is taker.placed[0]
        assert len(views[0]) == len(payload) - (52 if not digest else 48)
    taker.feed(wire[100:], [100_000])
    assert [got[1] for got in taker.got] == [b"" if drop else payload, b"ping"]


def test_divert_leaves_the_buffer_alone() -> None:
    wire = on_the_wire([(DATA_OUT, 0, b"x" * 1000), (0, 0, b"ping")], True, True)
    taker = Taker(1000, True, True)
    taker.feed(wire[:152])
    taker.rx.divert()
    before = bytes(taker.placed[0])
    taker.placed[0].clear()  # BufferError while a view of it is left
    taker.placed[0] = bytearray(b"gone")
    taker.feed(wire[152:], [7])
    assert before == b"x" * 100 + bytes(900)
    assert [got[1] for got in taker.got] == [b"gone", b"ping"]


@pytest.mark.parametrize("opcode", [0, DATA_OUT])
def test_every_flipped_bit_is_found(opcode: int) -> None:
    wire = on_the_wire([(opcode, 1, b"payload")], True, True)
    for at in range(len(wire)):
        taker = Taker(300, True, True)
        broken = bytearray(wire)
        broken[at] ^= 0x10
        try:
            taker.feed(bytes(broken))
        except RemoteProtocolError:
            continue
        assert not taker.got, f"byte {at}"  # an AHS length that wants more bytes than there are


def test_digest_of_the_standard() -> None:
    """RFC 7143 appendix A.4 has 32 bytes of zeros: aa 36 91 8a."""
    wire = on_the_wire([(0, 0, bytes(32))], False, True)
    assert wire[48 + 32 :] == bytes.fromhex("aa36918a")


def test_data_beyond_what_was_declared() -> None:
    taker = Taker(512, False, False)
    with pytest.raises(RemoteProtocolError, match="512 at most"):
        taker.feed(bhs_of(0, 513))


@given(st.binary(max_size=4000), st.booleans(), st.booleans(), st.integers(1, 100))
def test_any_bytes(data: bytes, header: bool, digest: bool, chunk: int) -> None:
    taker = Taker(512, header, digest)
    with contextlib.suppress(RemoteProtocolError):
        taker.feed(data, [chunk])


def test_login_goes_step_by_step() -> None:
    """Bytes behind the last login PDU are not decoded before the agreed digests are set."""
    taker = Taker(512, False, False)
    taker.rx = PduReceiver(taker.place, taker.deliver)
    first = on_the_wire([(3, 0, b"login")], False, False)
    second = on_the_wire([(0, 0, b"ping")], True, True)
    taker.feed(first + second)
    assert [got[1] for got in taker.got] == [b"login"]
    taker.rx.full_feature_phase(512, True, True)
    taker.rx.parse()
    assert [got[1] for got in taker.got] == [b"login", b"ping"]


@pytest.mark.parametrize("room", [1, 5, 48, 49, 1000])
def test_partial_sends(room: int) -> None:
    stream = Stream(room)
    tx = PduSender(stream)
    source = bytearray(b"abcdefg")
    tokens = [object(), object()]
    for token in tokens:
        tx.queued.append(tx.frame(bhs_of(1, 7), memoryview(source), source, token))
    tx.flush()
    assert not tx.blocked and not tx.queued
    assert bytes(stream.out) == (bhs_of(1, 7) + b"abcdefg\0") * 2
    assert list(tx.sent) == tokens


@pytest.mark.parametrize("room", [0, 3, 50])
def test_disown_copies_what_has_to_leave(room: int) -> None:
    stream = Stream(room)
    tx = PduSender(stream)
    source = bytearray(b"abcdefg")
    tx.queued.append(tx.frame(bhs_of(1, 7), memoryview(source), source))
    send = stream.send

    def once(buffers: list[bytes | memoryview], size: int) -> int:
        done = send(buffers, size)
        stream.room = 0
        return done

    stream.send = once  # type: ignore[method-assign]
    tx.flush()
    assert tx.blocked
    tx.disown(source)
    source.clear()  # BufferError while a view of it is left
    stream.room = 1000
    tx.resume()
    assert bytes(stream.out) == bhs_of(1, 7) + b"abcdefg\0"


def test_what_nobody_owns_is_counted_while_it_waits() -> None:
    """So many PDUs without an owner wait for no peer that takes what it answers. Those that lost
    their owner while they waited count as well, and all of them no longer when they have left."""
    stream = Stream(0)
    tx = PduSender(stream)
    source = bytearray(1)
    for _ in range(ORPHANS):
        tx.queued.append(tx.frame(bhs_of(1, 1), memoryview(source), source))
    tx.flush()
    assert tx.blocked and not tx.orphaned, "they are those of a task"
    tx.disown(source)
    tx.resume()
    assert not tx.orphaned
    tx.queued.append(tx.frame(bhs_of(1, 0), None))
    tx.flush()
    assert tx.orphaned
    stream.room = 1 << 30
    while tx.blocked:
        tx.resume()
    stream.room = 0
    for _ in range(ORPHANS):
        tx.queued.append(tx.frame(bhs_of(1, 0), None))
    tx.flush()
    assert tx.blocked and not tx.orphaned
    tx.queued.append(tx.frame(bhs_of(1, 0), None))
    tx.flush()
    assert tx.orphaned


class Following:
    """A Rest: ``made`` counts."""

    made = 0

    def following(self) -> list[OutPdu]:
        self.made += 1
        return [OutPdu([bhs_of(DATA_OUT, 0)], 48)]


@pytest.mark.parametrize("ends", [False, True])
def test_what_follows_a_pdu_that_has_begun_to_leave(ends: bool) -> None:
    """It is made when that has left; not at all where its owner has gone."""
    stream = Stream(room=50)
    tx = PduSender(stream)
    source = bytearray(b"abcdefg")
    unit = tx.frame(bhs_of(DATA_OUT, 7), memoryview(source), source)
    unit.rest = rest = Following()
    tx.queued.append(unit)
    send = stream.send

    def once(buffers: list[bytes | memoryview], size: int) -> int:
        done = send(buffers, size)
        stream.room = 0
        return done

    stream.send = once  # type: ignore[method-assign]
    tx.flush()
    assert tx.blocked and not rest.made
    if ends:
        tx.disown(source)
        source.clear()  # BufferError while a view of it is left
    stream.room = 1000
    stream.send = send  # type: ignore[method-assign]
    tx.resume()
    assert rest.made == (0 if ends else 1)
    expected = bhs_of(DATA_OUT, 7) + b"abcdefg\0"
    assert bytes(stream.out) == expected + (b"" if ends else bhs_of(DATA_OUT, 0))


def test_one_turn_sends_no_more_than_its_share() -> None:
    """A peer that takes all at once does not keep the event loop: the rest leaves in later turns,
    for which the socket is writable."""
    stream = Stream()
    tx = PduSender(stream)
    source = memoryview(bytes(range(256)) * 4096)
    for _ in range(24):
        tx.queued.append(tx.frame(bhs_of(1, len(source)), source, source))
    turns = 0
    tx.flush()
    while tx.blocked:
        assert len(stream.out) <= (turns + 1) * (10 << 20)
        turns += 1
        tx.resume()
    assert turns == 2 and bytes(stream.out) == (bhs_of(1, len(source)) + bytes(source)) * 24


def test_closed() -> None:
    stream = Stream(0)
    tx = PduSender(stream)
    tx.queued.append(OutPdu([b"x"], 1))
    tx.flush()
    tx.close()
    assert not tx.blocked
    tx.queued.append(OutPdu([b"x"], 1))
    with pytest.raises(ConnectionLost):
        tx.flush()
    tx.flush()


def test_what_another_protocol_begins_with_leaves_no_memory() -> None:
    """The connection keeps the receiver as long as it lasts."""
    gc.collect()
    tracemalloc.start()
    try:
        stream = PduReceiver(lambda head, size: None, lambda message, whole: None)
        before, _ = tracemalloc.get_traced_memory()
        assert stream.take_staged() == b""
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert before - after > 8192
