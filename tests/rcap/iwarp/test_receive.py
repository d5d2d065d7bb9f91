"""The receive core: every rule of placement, every chunking, any bytes. No sockets."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iserblk.errors import RemoteProtocolError
from iserblk.rcap import seam
from iserblk.rcap.iwarp import ddp, mpa, rdmap
from iserblk.rcap.iwarp.reads import RTR_TOKEN, OutstandingRead
from iserblk.rcap.iwarp.receive import KEPT_STAGING, ReceiveCore
from iserblk.rcap.stags import StagTable
from tests.rcap.fpdu import decode_fpdu
from tests.rcap.wire import pattern

WRITE, WRITE_MORE = 0xC140, 0x8140
RESPONSE, RESPONSE_MORE = 0xC142, 0x8142
SEND, SEND_MORE, READ_REQUEST, TERMINATE = 0x4143, 0x0143, 0x4141, 0x4147
SEND_INVALIDATE = 0x4144
TOP = 2**64 - 1


def tagged(control: int, stag: int, to: int, payload: bytes = b"") -> bytes:
    header = ddp.TaggedHeader(14 + len(payload), control, stag, to)
    return ddp.encode_fpdu(header, payload, crc=True)


def untagged(
    control: int, msn: int, payload: bytes = b"", qn: int = 0, mo: int = 0, stag: int = 0
) -> bytes:
    header = ddp.UntaggedHeader(18 + len(payload), control, stag, qn, msn, mo)
    return ddp.encode_fpdu(header, payload, crc=True)


def read_request(msn: int, sink: tuple[int, int], size: int, source: tuple[int, int]) -> bytes:
    payload = rdmap.ReadRequest(*sink, size, *source).pack()
    return untagged(READ_REQUEST, msn, payload, qn=1)


class Receiver:
    """A core with 4,000 bytes for reading and writing, 2,000 read-only and 2,000 write-only, and
    a Read of 1,000 bytes under way; receives of 3,000 bytes, IRD 2."""

    def __init__(self, *, crc: bool = True, rtr: int = mpa.RTR_NONE) -> None:
        self.stags = StagTable()
        self.memory = bytearray(4000)
        self.read_only = pattern(2000)
        self.write_only = bytearray(2000)
        both = seam.REMOTE_READ | seam.REMOTE_WRITE
        self.stag = self.stags.advertise(memoryview(self.memory), both)
        self.stag_read = self.stags.advertise(memoryview(self.read_only), seam.REMOTE_READ)
        self.stag_write = self.stags.advertise(memoryview(self.write_only), seam.REMOTE_WRITE)
        self.core = ReceiveCore(
            self.stags, crc=crc, ird=2, receive_size=3000, settle=lambda: 0, rtr=rtr
        )
        self.core.posted = 5
        self.sink = bytearray(1000)
        self.core.reads.append(OutstandingRead(9, memoryview(self.sink), "read"))
        self.events: list[tuple[int, object, bytes, int, bool]] = []

    def feed(self, data: bytes, size: int = 1 << 20) -> None:
        """Give it ``data``, ``size`` bytes at a time, wherever it wants them."""
        view = memoryview(data)
        while view:
            piece, view = view[:size], view[size:]
            while piece:
                given_now = 0
                for buffer in self.core.get_buffers():
                    count = min(len(buffer), len(piece))
                    buffer[:count] = piece[:count]
                    piece = piece[count:]
                    given_now += count
                assert given_now
                try:
                    self.core.received(given_now)
                finally:
                    self._collect()

    def _collect(self) -> None:
        for item in self.core.completions:
            data = b"" if item.data is None else bytes(item.data)
            self.events.append((item.opcode, item.token, data, item.invalidated, item.solicited))
        self.core.completions.clear()


Frames = Callable[[Receiver], bytes]

VIOLATIONS: dict[str, tuple[Frames, tuple[int, int, int]]] = {
    # MPA
    "ULPDU of nothing": (lambda r: bytes(8), ddp.MPA_LENGTH),
    "ULPDU of 13 bytes": (lambda r: b"\0\x0d" + bytes(20), ddp.MPA_LENGTH),
    "untagged ULPDU of 17 bytes": (
        lambda r: ddp.encode_fpdu(ddp.TaggedHeader(17, SEND, 0, 0), bytes(3), crc=True),
        ddp.MPA_LENGTH,
    ),
    "untagged ULPDU of 17 bytes, rare opcode": (
        lambda r: ddp.encode_fpdu(ddp.TaggedHeader(17, TERMINATE, 0, 0), bytes(3), crc=True),
        ddp.MPA_LENGTH,
    ),
    "wrong CRC": (lambda r: untagged(SEND, 1, b"x")[:-1] + b"\0", ddp.MPA_CRC),
    # versions and opcodes
    "DDP version 0, tagged": (lambda r: tagged(0xC040, r.stag, 0, b"x"), ddp.TAGGED_VERSION),
    "DDP version 2, untagged": (lambda r: untagged(0x4243, 1, b"x"), ddp.UNTAGGED_VERSION),
    "RDMAP version 0": (lambda r: untagged(0x4103, 1, b"x"), rdmap.INVALID_VERSION),
    "RDMAP version 3": (lambda r: tagged(0xC1C0, r.stag, 0, b"x"), rdmap.INVALID_VERSION),
    "opcode 8": (lambda r: untagged(0x4148, 1, b"x"), rdmap.UNEXPECTED_OPCODE),
    "opcode 15, tagged": (lambda r: tagged(0xC14F, r.stag, 0, b"x"), rdmap.UNEXPECTED_OPCODE),
    "tagged Send": (lambda r: tagged(0xC143, r.stag, 0, b"x"), rdmap.UNEXPECTED_OPCODE),
    "untagged Write": (lambda r: untagged(0x4140, 1, b"x"), rdmap.UNEXPECTED_OPCODE),
    "untagged Read Response": (lambda r: untagged(0x4142, 1, b"x"), rdmap.UNEXPECTED_OPCODE),
    "tagged Read Request": (
        lambda r: tagged(0xC141, r.stag, 0, bytes(28)),
        rdmap.UNEXPECTED_OPCODE,
    ),
    # RDMA Write
    "Write to STag 0": (lambda r: tagged(WRITE, 0, 0, b"x"), ddp.INVALID_STAG),
    "Write to index 0": (lambda r: tagged(WRITE, 9, 0, b"x"), ddp.INVALID_STAG),
    "Write to other key": (lambda r: tagged(WRITE, r.stag + 1, 0, b"x"), ddp.INVALID_STAG),
    "Write past the table": (lambda r: tagged(WRITE, 0xFFFFFF01, 0, b"x"), ddp.INVALID_STAG),
    "Write one too far": (lambda r: tagged(WRITE, r.stag, 4000, b"x"), ddp.BASE_OR_BOUNDS),
    "Write across the end": (lambda r: tagged(WRITE, r.stag, 3999, b"xy"), ddp.BASE_OR_BOUNDS),
    "Write up to the top": (lambda r: tagged(WRITE, r.stag, TOP, b"x"), ddp.BASE_OR_BOUNDS),
    "Write wraps": (lambda r: tagged(WRITE, r.stag, TOP, b"xy"), ddp.TO_WRAP),
    "Write to read-only": (lambda r: tagged(WRITE, r.stag_read, 0, b"x"), rdmap.ACCESS_RIGHTS),
    "Write with reserved bits": (
        lambda r: tagged(WRITE | 0x3C30, r.stag_read, 0, b"x"),
        rdmap.ACCESS_RIGHTS,
    ),
    # Send
    "Send on queue 3": (lambda r: untagged(SEND, 1, b"x", qn=3), ddp.INVALID_QN),
    "Send with MSN 0": (lambda r: untagged(SEND, 0, b"x"), ddp.MSN_RANGE),
    "Send with MSN 2": (lambda r: untagged(SEND, 2, b"x"), ddp.MSN_RANGE),
    "Send twice": (lambda r: untagged(SEND, 1, b"x") * 2, ddp.MSN_RANGE),
    "Send with MO": (lambda r: untagged(SEND, 1, b"x", mo=1), ddp.INVALID_MO),
    "Send with a gap": (
        lambda r: untagged(SEND_MORE, 1, b"xx") + untagged(SEND, 1, b"x", mo=3),
        ddp.INVALID_MO,
    ),
    "Send over itself": (
        lambda r: untagged(SEND_MORE, 1, b"xx") + untagged(SEND, 1, b"x", mo=1),
        ddp.INVALID_MO,
    ),
    "Send begins again": (
        lambda r: untagged(SEND_MORE, 1, b"xx") + untagged(SEND, 1, b"x"),
        ddp.INVALID_MO,
    ),
    "Send begins again, not the last": (
        lambda r: untagged(SEND_MORE, 1, b"xx") + untagged(SEND_MORE, 1, b"x"),
        ddp.INVALID_MO,
    ),
    "Send too long": (lambda r: untagged(SEND, 1, bytes(3001)), ddp.MESSAGE_TOO_LONG),
    "Send too long in segments": (
        lambda r: untagged(SEND_MORE, 1, bytes(2999)) + untagged(SEND, 1, b"xx", mo=2999),
        ddp.MESSAGE_TOO_LONG,
    ),
    "six Sends": (
        lambda r: b"".join(untagged(SEND, msn, b"x") for msn in range(1, 7)),
        ddp.NO_BUFFER,
    ),
    "sixth Send, empty": (
        lambda r: b"".join(untagged(SEND, msn) for msn in range(1, 7)),
        ddp.NO_BUFFER,
    ),
    "segments of two kinds": (
        lambda r: untagged(SEND_MORE, 1, b"xx") + untagged(0x4145, 1, b"x", mo=2),
        rdmap.UNEXPECTED_OPCODE,
    ),
    "segments with two STags": (
        lambda r: (
            untagged(0x0144, 1, b"xx", stag=r.stag)
            + untagged(SEND_INVALIDATE, 1, b"x", mo=2, stag=r.stag_read)
        ),
        rdmap.UNEXPECTED_OPCODE,
    ),
    "invalidates STag 0": (
        lambda r: untagged(SEND_INVALIDATE, 1, b"x"),
        rdmap.CANNOT_INVALIDATE,
    ),
    "invalidates twice": (
        lambda r: (
            untagged(SEND_INVALIDATE, 1, b"x", stag=r.stag)
            + untagged(SEND_INVALIDATE, 2, b"x", stag=r.stag)
        ),
        rdmap.CANNOT_INVALIDATE,
    ),
    "invalidates a sink": (
        lambda r: untagged(SEND_INVALIDATE, 1, b"x", stag=9),
        rdmap.CANNOT_INVALIDATE,
    ),
    # Read Request
    "Read Request on queue 0": (
        lambda r: untagged(READ_REQUEST, 1, bytes(28), qn=0),
        ddp.INVALID_QN,
    ),
    "Read Request with MSN 2": (lambda r: read_request(2, (1, 0), 0, (0, 0)), ddp.MSN_RANGE),
    "Read Request with MO": (
        lambda r: untagged(READ_REQUEST, 1, bytes(28), qn=1, mo=4),
        ddp.INVALID_MO,
    ),
    "Read Request in segments": (
        lambda r: untagged(0x0141, 1, bytes(28), qn=1),
        ddp.INVALID_MO,
    ),
    "Read Request of 27 bytes": (
        lambda r: untagged(READ_REQUEST, 1, bytes(27), qn=1),
        ddp.MESSAGE_TOO_LONG,
    ),
    "Read Request of 29 bytes": (
        lambda r: untagged(READ_REQUEST, 1, bytes(29), qn=1),
        ddp.MESSAGE_TOO_LONG,
    ),
    "Read from nowhere": (
        lambda r: read_request(1, (1, 0), 1, (r.stag + 256 * 99, 0)),
        rdmap.INVALID_STAG,
    ),
    "Read from write-only": (
        lambda r: read_request(1, (1, 0), 1, (r.stag_write, 0)),
        rdmap.ACCESS_RIGHTS,
    ),
    "Read across the end": (
        lambda r: read_request(1, (1, 0), 2, (r.stag, 3999)),
        rdmap.BASE_OR_BOUNDS,
    ),
    "Read of 4 GiB": (
        lambda r: read_request(1, (1, 0), 2**32 - 1, (r.stag, 0)),
        rdmap.BASE_OR_BOUNDS,
    ),
    "Read wraps": (lambda r: read_request(1, (1, 0), 2, (r.stag, TOP)), rdmap.TO_WRAP),
    "Read into a sink that wraps": (
        lambda r: read_request(1, (1, TOP), 2, (r.stag, 0)),
        rdmap.TO_WRAP,
    ),
    "third Read at IRD 2": (
        lambda r: b"".join(read_request(msn, (1, 0), 1, (r.stag, 0)) for msn in (1, 2, 3)),
        ddp.NO_BUFFER,
    ),
    "third Read of nothing at IRD 2": (
        lambda r: b"".join(read_request(msn, (1, 0), 0, (0, 0)) for msn in (1, 2, 3)),
        ddp.NO_BUFFER,
    ),
    # Read Response
    "Response to other STag": (lambda r: tagged(RESPONSE, 8, 0, bytes(1000)), ddp.INVALID_STAG),
    "Response to advertised STag": (
        lambda r: tagged(RESPONSE, r.stag, 0, bytes(1000)),
        ddp.INVALID_STAG,
    ),
    "Response with a gap": (lambda r: tagged(RESPONSE_MORE, 9, 1, b"x"), ddp.BASE_OR_BOUNDS),
    "Response over itself": (
        lambda r: tagged(RESPONSE_MORE, 9, 0, b"xx") + tagged(RESPONSE_MORE, 9, 1, b"x"),
        ddp.BASE_OR_BOUNDS,
    ),
    "Response too long": (lambda r: tagged(RESPONSE, 9, 0, bytes(1001)), ddp.BASE_OR_BOUNDS),
    "Response too short": (lambda r: tagged(RESPONSE, 9, 0, bytes(999)), ddp.BASE_OR_BOUNDS),
    "Response of nothing": (lambda r: tagged(RESPONSE, 9, 0), ddp.BASE_OR_BOUNDS),
    "second Response": (
        lambda r: tagged(RESPONSE, 9, 0, bytes(1000)) + tagged(RESPONSE, 9, 0),
        rdmap.UNEXPECTED_OPCODE,
    ),
}


@pytest.mark.parametrize("size", [1, 1 << 20], ids=["byte by byte", "at once"])
@pytest.mark.parametrize("name", VIOLATIONS)
def test_violation(name: str, size: int) -> None:
    # proves: ISER-4.1-10, ISER-8.2-3, ISER-8.3.2-4, ISER-11-1
    make, code = VIOLATIONS[name]
    receiver = Receiver()
    data = make(receiver)
    before = bytes(receiver.memory)
    with pytest.raises(RemoteProtocolError) as caught:
        receiver.feed(data, size)
    error = caught.value
    assert error.terminate == code
    assert error.layer == {0: "RDMAP", 1: "DDP", 2: "MPA"}[code[0]]
    assert bytes(receiver.memory) == before
    terminate = rdmap.Terminate.unpack_untrusted(receiver.core.terminate)
    assert terminate[:3] == code
    assert terminate.swapped is False
    if code[0] == 2:
        assert terminate.rest == b""
        return
    # The last segment's length and header are copied (RFC 5040 figure 10).
    last = None
    while data:
        decoded = decode_fpdu(data, crc=True)
        assert decoded is not None
        last, data = decoded[0], data[decoded[1] :]
    assert last is not None
    expected = last.header.length.to_bytes(2, "big") + last.header.pack()[2:]
    hdrct = 0xC0
    if code[:2] == (0, 1) and last.header.control & 15 == rdmap.READ_REQUEST:
        expected += last.payload
        hdrct = 0xE0
    assert (terminate.rest, terminate.hdrct) == (expected, hdrct)


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        ("01020000", "terminated.*RDMAP: access rights violation"),
        ("0102", "a Terminate of 2 bytes"),
    ],
)
def test_a_terminate_is_not_answered(payload: str, words: str) -> None:
    receiver = Receiver()
    with pytest.raises(RemoteProtocolError, match=words) as caught:
        receiver.feed(untagged(TERMINATE, 1, bytes.fromhex(payload), qn=2))
    assert caught.value.terminate is None
    assert receiver.core.terminate == b""


# --- what is right ---


def _conversation(receiver: Receiver) -> bytes:
    """Everything that a peer may do, in one stream."""
    return b"".join(
        [
            tagged(WRITE_MORE, receiver.stag, 0, pattern(1501, 1)),
            tagged(RESPONSE_MORE, 9, 0, pattern(400, 2)),
            untagged(SEND_MORE, 1, b"a Send "),
            tagged(WRITE, receiver.stag, 1501, pattern(2499, 3)),
            read_request(1, (0x77, 5), 100, (receiver.stag_read, 50)),
            untagged(SEND_MORE, 1, b"in three ", mo=7),
            tagged(WRITE, 0xBAD, TOP, b""),
            untagged(SEND, 1, b"segments", mo=16),
            untagged(0x4145, 2, b"solicited"),
            read_request(2, (0x78, TOP), 0, (0xBAD, TOP)),
            tagged(RESPONSE_MORE, 9, 400, pattern(600, 4)),
            untagged(0x4144, 3, b"invalidates", stag=receiver.stag),
            tagged(RESPONSE, 0xBAD, TOP, b""),
            untagged(0x4146, 4, b"both", stag=receiver.stag_write),
            tagged(WRITE | 0x3C30, receiver.stag_read, 0),
            untagged(SEND | 0x3C30, 5, b"reserved bits"),
        ]
    )


def _check_conversation(receiver: Receiver) -> None:
    assert bytes(receiver.memory) == pattern(1501, 1) + pattern(2499, 3)
    assert bytes(receiver.sink) == pattern(400, 2) + pattern(600, 4)
    assert receiver.events == [
        (seam.RECEIVE, None, b"a Send in three segments", 0, False),
        (seam.RECEIVE, None, b"solicited", 0, True),
        (seam.RECEIVE, None, b"invalidates", receiver.stag, False),
        (seam.RDMA_READ, "read", b"", 0, False),
        (seam.RECEIVE, None, b"both", receiver.stag_write, True),
        (seam.RECEIVE, None, b"reserved bits", 0, False),
    ]
    first, second = receiver.core.responses
    assert (first.sink_stag, first.sink_to, bytes(first.view)) == (
        0x77,
        5,
        receiver.read_only[50:150],
    )
    assert (second.sink_stag, second.sink_to, bytes(second.view)) == (0x78, TOP, b"")
    assert receiver.core.reads_received == 2
    assert receiver.core.opened
    assert not receiver.core.partial()


@pytest.mark.parametrize("crc", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3, 16, 19, 20, 21, 512, 1 << 20])
def test_every_chunking_means_the_same(crc: bool, size: int) -> None:
    receiver = Receiver(crc=crc)
    receiver.feed(_conversation(receiver), size)
    _check_conversation(receiver)


@given(cuts=st.lists(st.integers(1, 3000), max_size=40), crc=st.booleans())
def test_any_chunking_means_the_same(cuts: list[int], crc: bool) -> None:
    receiver = Receiver(crc=crc)
    data = _conversation(receiver)
    for cut in cuts:
        receiver.feed(data[:cut])
        data = data[cut:]
    receiver.feed(data)
    _check_conversation(receiver)


def test_a_write_to_memory_that_is_being_let_go_of_is_refused() -> None:
    """Other threads run while memory is unmapped. This memory takes in the peer's Write itself."""
    receiver = Receiver()
    faults: list[str] = []

    class Memory(bytearray):
        def __del__(self) -> None:
            try:
                receiver.feed(tagged(WRITE, stag, 0, b"late"))
            except RemoteProtocolError as error:
                faults.append(str(error))

    stag = receiver.stags.advertise(memoryview(Memory(100)), seam.REMOTE_WRITE)
    region = receiver.stags.owned(stag)
    region.valid = False
    receiver.stags.release(region)
    assert len(faults) == 1


def test_nothing_is_placed_before_the_crc_is_verified() -> None:
    receiver = Receiver()
    data = bytearray(tagged(WRITE, receiver.stag, 0, b"x" * 4000))
    data[3000] ^= 1
    receiver.feed(bytes(data[:-1]))
    assert receiver.core.partial()
    with pytest.raises(RemoteProtocolError):
        receiver.feed(bytes(data[-1:]))
    assert receiver.memory == bytes(4000)


@pytest.mark.parametrize("kind", ["Send", "RDMA Write"])
def test_no_burst_of_errors_goes_unnoticed(kind: str) -> None:
    """Bits of a frame are turned over, up to 32 in a row, wherever in the frame: what a CRC of 32
    bits finds without fail. Nothing is delivered or placed, and the connection ends.

    proves: ISER-5.1-13
    """
    shapes = random.Random(13)
    bursts = [1, 3, (1 << 32) - 1, *(shapes.getrandbits(32) | 1 for _ in range(3))]
    payload = pattern(24)
    size = 8 * len(untagged(SEND, 1, payload) if kind == "Send" else tagged(WRITE, 0, 0, payload))
    for burst in bursts:
        for at in range(size - burst.bit_length() + 1):
            receiver = Receiver()
            frame = untagged(SEND, 1, payload)
            if kind == "RDMA Write":
                frame = tagged(WRITE, receiver.stag, 0, payload)
            damaged = (int.from_bytes(frame, "big") ^ burst << at).to_bytes(len(frame), "big")
            with pytest.raises(RemoteProtocolError):
                receiver.feed(damaged)
                receiver.feed(bytes(1 << 16))  # the length of the frame has become longer
            assert not receiver.events and not any(receiver.memory)


@pytest.mark.parametrize("control", [RESPONSE, WRITE])
def test_a_sink_ends_with_its_read(control: int) -> None:
    """The STag of a sink is valid for the Read Response that it is for, and for nothing else.

    proves: ISER-8.3.2-8
    """
    receiver = Receiver()
    if control == RESPONSE:
        receiver.feed(tagged(RESPONSE, 9, 0, pattern(1000)))
        assert [event[1] for event in receiver.events] == ["read"]
        assert receiver.sink == pattern(1000)
    before = bytes(receiver.sink)
    with pytest.raises(RemoteProtocolError):
        receiver.feed(tagged(control, 9, 0, b"late"))
    assert receiver.sink == before


def test_msn_wraps() -> None:
    receiver = Receiver()
    receiver.core._send_msn = 0xFFFFFFFF
    receiver.feed(untagged(SEND, 0xFFFFFFFF, b"last") + untagged(SEND, 0, b"first"))
    assert [event[2] for event in receiver.events] == [b"last", b"first"]


def test_the_largest_fpdus() -> None:
    stags = StagTable()
    memory = bytearray(3 * 65521)
    stag = stags.advertise(memoryview(memory), seam.REMOTE_WRITE)
    for crc in (True, False):
        memory[:] = bytes(len(memory))
        core = ReceiveCore(stags, crc=crc, ird=1, receive_size=100, settle=lambda: 0)
        receiver = Receiver()
        receiver.core = core
        data = pattern(len(memory))
        stream = b"".join(
            tagged(WRITE_MORE, stag, at, data[at : at + 65521]) for at in range(0, len(data), 65521)
        )
        receiver.feed(stream, 40_000)
        assert memory == data


# --- the RTR Send of a peer-to-peer initiator ---


def test_rtr_send_takes_no_receive_and_completes_nothing() -> None:
    receiver = Receiver(rtr=mpa.RTR_SEND)
    receiver.core.posted = 1
    receiver.feed(untagged(SEND, 1) + untagged(SEND, 2, b"first message"))
    assert [event[2] for event in receiver.events] == [b"first message"]


@pytest.mark.parametrize("rtr", [mpa.RTR_NONE, mpa.RTR_WRITE])
def test_empty_send_is_a_message_where_no_rtr_send_is_due(rtr: int) -> None:
    receiver = Receiver(rtr=rtr)
    receiver.feed(untagged(SEND, 1))
    assert [event[2] for event in receiver.events] == [b""]


def test_only_the_first_send_can_be_the_rtr() -> None:
    receiver = Receiver(rtr=mpa.RTR_SEND)
    receiver.feed(untagged(SEND, 1, b"message") + untagged(SEND, 2))
    assert [event[2] for event in receiver.events] == [b"message", b""]


def test_rtr_read_of_ours_completes_for_nobody() -> None:
    receiver = Receiver()
    receiver.core.reads.clear()
    receiver.core.reads.append(OutstandingRead(1, None, RTR_TOKEN))
    receiver.feed(tagged(RESPONSE, 1, 0))
    assert receiver.events == []
    assert not receiver.core.reads


# --- direct placement, without CRC ---


def _begun(large: int = 60_000) -> tuple[Receiver, bytes, bytearray, int]:
    """A receiver without CRC in the middle of a large Write, and the rest of its stream."""
    receiver = Receiver(crc=False)
    memory = bytearray(large)
    stag = receiver.stags.advertise(memoryview(memory), seam.REMOTE_WRITE)
    stream = tagged(WRITE, stag, 0, pattern(large)) + untagged(SEND, 1, b"behind")
    receiver.feed(stream[:1000])
    return receiver, stream[1000:], memory, stag


def test_the_rest_of_a_large_write_lands_in_its_place() -> None:
    receiver, rest, memory, _ = _begun()
    buffers = receiver.core.get_buffers()
    assert len(buffers) == 2
    assert len(buffers[0]) == 60_000 - (1000 - 16)
    buffers[0][:] = b"\x99" * len(buffers[0])
    assert memory[1000:] == b"\x99" * 59_000
    receiver.feed(rest, 7_001)
    assert memory == pattern(60_000)
    assert [event[2] for event in receiver.events] == [b"behind"]


def test_direct_placement_is_diverted() -> None:
    receiver, rest, memory, stag = _begun()
    region = receiver.stags.owned(stag)
    receiver.feed(rest[:30_000], 5_000)
    region.valid = False
    receiver.core.divert(region)
    receiver.stags.release(region)
    memory[:] = bytes(60_000)
    receiver.feed(rest[30_000:], 5_000)
    assert memory == bytes(60_000)
    assert [event[2] for event in receiver.events] == [b"behind"]
    memory.clear()


@pytest.mark.parametrize("cut", [59_985, 60_000, 60_016, 60_018, 60_019])
def test_direct_placement_ends_at_any_cut(cut: int) -> None:
    receiver = Receiver(crc=False)
    sink = bytearray(60_001)
    receiver.core.reads.clear()
    receiver.core.reads.append(OutstandingRead(5, memoryview(sink), "large"))
    stream = tagged(RESPONSE, 5, 0, pattern(60_001)) + untagged(SEND, 1, b"behind")
    receiver.feed(stream[:100])
    receiver.feed(stream[100:cut])
    receiver.feed(stream[cut:])
    assert sink == pattern(60_001)
    assert [event[:3] for event in receiver.events] == [
        (seam.RDMA_READ, "large", b""),
        (seam.RECEIVE, None, b"behind"),
    ]


@pytest.mark.parametrize(
    ("control", "to", "code"),
    [
        (WRITE, 0, ddp.BASE_OR_BOUNDS),
        (0xC240, 0, ddp.TAGGED_VERSION),
        (0xC143, 0, rdmap.UNEXPECTED_OPCODE),
        (RESPONSE, 0, ddp.INVALID_STAG),
    ],
)
def test_direct_placement_is_checked_first(
    control: int, to: int, code: tuple[int, int, int]
) -> None:
    receiver = Receiver(crc=False)
    with pytest.raises(RemoteProtocolError) as caught:
        receiver.feed(tagged(control, receiver.stag, to, bytes(60_000))[:1000])
    assert caught.value.terminate == code
    assert receiver.memory == bytes(4000)


# --- any bytes ---


def _any_frame(receiver: Receiver) -> st.SearchStrategy[bytes]:
    stags = st.sampled_from([receiver.stag, receiver.stag_read, receiver.stag_write, 9, 0])
    offsets = st.one_of(st.integers(0, 4100), st.integers(0, TOP))
    payload = st.binary(max_size=60)
    control = st.one_of(
        st.sampled_from([WRITE, WRITE_MORE, RESPONSE, RESPONSE_MORE]), st.integers(0, 0xFFFF)
    )
    control_untagged = st.one_of(
        st.sampled_from([SEND, SEND_MORE, 0x4144, 0x4145, 0x4146, TERMINATE, READ_REQUEST]),
        st.integers(0, 0x7FFF),
    )
    small = st.integers(0, 3)
    return st.one_of(
        st.builds(tagged, control.map(lambda c: c | 0x8000), stags, offsets, payload),
        st.builds(untagged, control_untagged, small, payload, small, small, stags),
        st.builds(
            read_request,
            small,
            st.tuples(stags, offsets),
            st.integers(0, 5000),
            st.tuples(stags, offsets),
        ),
        st.binary(max_size=40),
    )


@given(data=st.data(), crc=st.booleans(), size=st.integers(1, 100))
def test_any_bytes_raise_nothing_else_and_stay_inside(
    data: st.DataObject, crc: bool, size: int
) -> None:
    receiver = Receiver(crc=crc)
    stream = b"".join(data.draw(st.lists(_any_frame(receiver), max_size=8)))
    before = bytes(receiver.read_only)
    try:
        receiver.feed(stream, size)
    except RemoteProtocolError as error:
        assert error.layer in ("MPA", "DDP", "RDMAP")
        if error.terminate is not None:
            assert rdmap.Terminate.unpack_untrusted(receiver.core.terminate)[:3] == error.terminate
    assert receiver.read_only == before
    assert len(receiver.core.responses) <= 2
    assert len(receiver.events) <= 6


def test_staging_that_is_not_used_gives_its_memory_back() -> None:
    """A burst fills staging; what comes after it needs little. Pages that were given back are
    zero."""
    receiver = Receiver()
    burst = tagged(WRITE, receiver.stag, 0, pattern(4000)) * 60
    send = untagged(SEND, 1, b"a message")
    receiver.feed(burst)
    receiver.core.trim()
    (room,) = receiver.core.get_buffers()
    assert bytes(room[: len(burst)]) == burst  # it was in use since the call before
    receiver.feed(send)
    receiver.core.trim()
    (room,) = receiver.core.get_buffers()
    assert bytes(room[: len(send)]) == send
    kept = KEPT_STAGING
    assert bytes(room[:kept]) == (send + burst[len(send) :])[:kept]
    assert bytes(room[kept : len(burst)]) == bytes(len(burst) - kept)
    receiver.feed(burst)  # and it can be used again
    assert receiver.memory == pattern(4000)


def test_what_is_staged_stays() -> None:
    """Trimmed while the end of a message is still to come, and while one waits to be read."""
    receiver = Receiver(crc=False)
    filler = tagged(WRITE, receiver.stag, 0, pattern(4000)) * 20
    message = untagged(SEND, 1, pattern(3000))
    receiver.feed(filler)
    receiver.feed(message[:2500])
    for _ in range(3):
        receiver.core.trim()
    receiver.feed(message[2500:])
    assert receiver.events == [(seam.RECEIVE, None, pattern(3000), 0, False)]
    core = receiver.core
    (room,) = core.get_buffers()
    large = filler + untagged(SEND, 2, b"behind it")
    room[: len(large)] = large
    core.received(len(large))
    for _ in range(3):
        core.trim()
    (event,) = core.completions
    assert event.data is not None and bytes(event.data) == b"behind it"
