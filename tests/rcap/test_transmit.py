"""The send core: segmentation, batches, order, and letting go of memory. No sockets."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iserblk.errors import LocalProtocolError
from iserblk.rcap import seam
from iserblk.rcap.iwarp import ddp, rdmap
from iserblk.rcap.iwarp.reads import OutstandingRead, ReadResponse
from iserblk.rcap.iwarp.transmit import BATCH_BUFFERS, SendCore, SlotFrame
from iserblk.rcap.stags import StagTable
from tests.rcap.wire import Unmarker, pattern, rdma_request


def core_for(
    *, crc: bool = True, markers: bool = False, emss: int = 1448, ord: int = 4
) -> SendCore:
    reads: deque[OutstandingRead] = deque()
    responses: deque[ReadResponse] = deque()
    return SendCore(
        crc=crc,
        markers=markers,
        emss=emss,
        ord=ord,
        reads=reads,
        responses=responses,
        opened=True,
    )


def send(header: bytes, data: bytes | None = None, opcode: int = seam.SEND) -> seam.WorkRequest:
    request = seam.WorkRequest(opcode)
    request.header = SlotFrame(len(header)).slot(0)
    request.header.view[:] = header
    request.header_length = len(header)
    request.data = None if data is None else memoryview(data)
    return request


def drain(core: SendCore, take: int = 1 << 30) -> list[bytes]:
    """Everything that it has to send, one item per batch, ``take`` bytes at a time."""
    batches = []
    while core.batch or core.build():
        batch = b"".join(core.batch)
        assert len(batch) == core.batch_left
        left = batch
        while left:
            assert b"".join(core.batch) == left
            count = min(take, len(left))
            core.sent(count)
            left = left[count:]
        batches.append(batch)
    return batches


def frames(stream: bytes, crc: bool = True) -> list[ddp.Fpdu]:
    result = []
    while stream:
        decoded = ddp.decode_fpdu_untrusted(stream, crc=crc)
        assert decoded is not None
        result.append(decoded[0])
        stream = stream[decoded[1] :]
    return result


@pytest.mark.parametrize(
    ("opcode", "control", "invalidate"),
    [
        (seam.SEND, 0x4143, 0),
        (seam.SEND_INVALIDATE, 0x4144, 0xABC),
        (seam.SEND_SE, 0x4145, 0),
        (seam.SEND_SE_INVALIDATE, 0x4146, 0xABC),
    ],
)
@pytest.mark.parametrize("data", [None, b"with data"])
def test_headers_of_sends(opcode: int, control: int, invalidate: int, data: bytes | None) -> None:
    # proves: ISER-4.1-5
    core = core_for()
    for _ in range(2):
        request = send(b"header", data, opcode)
        request.stag = 0xABC
        core.requests.append(request)
    payload = b"header" + (data or b"")
    assert [(frame.header, frame.payload) for frame in frames(b"".join(drain(core)))] == [
        (ddp.UntaggedHeader(18 + len(payload), control, invalidate, 0, msn, 0), payload)
        for msn in (1, 2)
    ]


@pytest.mark.parametrize("crc", [True, False])
@pytest.mark.parametrize("header", [0, 1, 76, 1420, 1424, 1425, 3000])
@pytest.mark.parametrize("data", [0, 1, 1348, 1349, 5000])
def test_segments_of_a_send(crc: bool, header: int, data: int) -> None:
    # proves: ISER-4.1-4
    core = core_for(crc=crc)
    message = pattern(header + data)
    core.requests.append(send(message[:header], message[header:]))
    segments = frames(b"".join(drain(core)), crc)
    offset = 0
    for segment in segments:
        assert isinstance(segment.header, ddp.UntaggedHeader)
        assert (segment.header.msn, segment.header.mo) == (1, offset)
        assert segment.header.length <= (1442 if crc else 65535)
        offset += len(segment.payload)
    assert b"".join(segment.payload for segment in segments) == message
    assert [bool(s.header.control & ddp.LAST) for s in segments][:-1] == [False] * (
        len(segments) - 1
    )
    assert segments[-1].header.control & ddp.LAST


@pytest.mark.parametrize("size", [0, 1, 1428, 1429, 100_000])
def test_segments_of_a_write(size: int) -> None:
    # proves: ISER-4.1-6
    core = core_for()
    data = pattern(size)
    core.requests.append(rdma_request(seam.RDMA_WRITE, data, 0x123456, 0x1_0000_0000))
    segments = frames(b"".join(drain(core)))
    offset = 0
    for segment in segments:
        assert isinstance(segment.header, ddp.TaggedHeader)
        assert (segment.header.stag, segment.header.to) == (0x123456, 0x1_0000_0000 + offset)
        assert ddp.fpdu_size(segment.header.length) <= 1448
        offset += len(segment.payload)
    assert b"".join(segment.payload for segment in segments) == data
    assert [s.header.control for s in segments] == [0x8140] * (len(segments) - 1) + [0xC140]


def test_the_peers_offset_may_wrap_and_harms_nobody_here() -> None:
    core = core_for()
    core.requests.append(rdma_request(seam.RDMA_WRITE, bytes(3000), 1, 2**64 - 4))
    core.requests.append(rdma_request(seam.RDMA_READ, memoryview(bytearray(1)), 1, 2**64 + 3))
    segments = frames(b"".join(drain(core)))
    assert [s.header.to for s in segments[:3] if isinstance(s.header, ddp.TaggedHeader)] == [
        2**64 - 4,
        1424,
        2852,
    ]


@pytest.mark.parametrize("emss", [536, 1448, 65483])
def test_with_crc_a_batch_is_whole_frames_of_one_segment(emss: int) -> None:
    core = core_for(emss=emss)
    for n in range(50):
        core.requests.append(send(pattern(76, n)))
        core.requests.append(rdma_request(seam.RDMA_WRITE, pattern(n * 100), 1, 0))
    batches = drain(core)
    for batch in batches:
        assert len(batch) <= emss
        assert frames(batch)
    assert len(batches) < sum(len(frames(batch)) for batch in batches)


def test_without_crc_a_batch_is_bounded_in_bytes_and_buffers() -> None:
    core = core_for(crc=False)
    for _ in range(3000):
        core.requests.append(rdma_request(seam.RDMA_WRITE, b"x", 1, 0))
    core.requests.append(rdma_request(seam.RDMA_WRITE, bytes(4 << 20), 1, 0))
    total = 0
    while core.build():
        assert len(core.batch) <= BATCH_BUFFERS
        assert core.batch_left <= 256 * 1024 + 65544
        total += core.batch_left
        core.sent(core.batch_left)
    assert total > 4 << 20


@given(
    sizes=st.lists(st.tuples(st.sampled_from("swr"), st.integers(0, 4000)), max_size=20),
    take=st.integers(1, 5000),
    crc=st.booleans(),
    markers=st.booleans(),
)
def test_partial_sends_lose_nothing(
    sizes: list[tuple[str, int]], take: int, crc: bool, markers: bool
) -> None:
    streams = []
    for step in (take, 1 << 30):
        core = core_for(crc=crc, markers=markers, ord=100)
        for n, (kind, size) in enumerate(sizes):
            if kind == "s":
                core.requests.append(send(pattern(size // 2, n), pattern(size - size // 2, n)))
            elif kind == "w":
                core.requests.append(rdma_request(seam.RDMA_WRITE, pattern(size, n), n, n))
            else:
                sink = memoryview(bytearray(size))
                core.requests.append(rdma_request(seam.RDMA_READ, sink, n, n))
        streams.append(b"".join(drain(core, step)))
    assert streams[0] == streams[1]
    clean = Unmarker(crc=crc).feed(streams[0]) if markers else streams[0]
    last = [frame for frame in frames(clean, crc) if frame.header.control & ddp.LAST]
    assert len(last) == len(sizes)


def test_signaled_requests_complete_when_they_have_left() -> None:
    core = core_for()
    request = send(bytes(100))
    request.signaled, request.token = True, "token"
    core.requests.append(request)
    core.build()
    core.sent(123)
    assert core.completions == []
    core.sent(1)
    (completion,) = core.completions
    assert (completion.opcode, completion.token) == (seam.SEND, "token")


def test_a_slot_of_another_provider() -> None:
    core = core_for()
    request = seam.WorkRequest(seam.SEND)
    request.header = seam.HeaderSlot(memoryview(bytearray(4)), object(), 0)
    core.requests.append(request)
    with pytest.raises(LocalProtocolError):
        core.build()


# --- RDMA Read ---


def _read(n: int) -> seam.WorkRequest:
    return rdma_request(seam.RDMA_READ, memoryview(bytearray(100)), 0x100 * n, n, n)


def test_read_requests_and_the_ord() -> None:
    core = core_for(ord=2)
    core.requests.extend([_read(1), _read(2), _read(3), send(b"behind")])
    segments = frames(b"".join(drain(core)))
    assert [s.header.control for s in segments] == [0x4141, 0x4141]
    for n, segment in enumerate(segments, 1):
        assert segment.header == ddp.UntaggedHeader(46, 0x4141, 0, 1, n, 0)
        request = rdmap.ReadRequest.unpack_untrusted(segment.payload)
        assert request == (core._reads[n - 1].stag, 0, 100, 0x100 * n, n)
        assert 0 < request.sink_stag < 256
    core._reads.popleft()
    segments = frames(b"".join(drain(core)))
    assert [s.header.control for s in segments] == [0x4141, 0x4143]


def test_sinks_under_way_have_different_stags() -> None:
    core = core_for(ord=255)
    core.requests.extend([_read(n) for n in range(255)])
    drain(core)
    assert len({read.stag for read in core._reads}) == 255


def _response(size: int, seed: int = 0) -> ReadResponse:
    stags = StagTable()
    stag = stags.advertise(memoryview(pattern(size, seed)), seam.REMOTE_READ)
    region = stags.owned(stag)
    return ReadResponse(0x77, 1000, region.view, region)


def test_read_responses_do_not_wait_for_blocked_requests_and_take_turns() -> None:
    core = core_for(ord=0)
    core.requests.append(_read(1))
    core._responses.extend([_response(4000), _response(0)])
    segments = frames(b"".join(drain(core)))
    assert [s.header.control for s in segments] == [0x8142, 0x8142, 0xC142, 0xC142]
    assert [s.header.to for s in segments if isinstance(s.header, ddp.TaggedHeader)] == [
        1000,
        2428,
        3856,
        1000,
    ]
    assert core.reads_finished == 2

    core = core_for()
    core.requests.extend([send(b"one"), send(b"two"), send(b"three")])
    core._responses.extend([_response(10), _response(10), _response(10)])
    segments = frames(b"".join(drain(core)))
    assert [s.header.control & 15 for s in segments] == [3, 2, 3, 2, 3, 2]


def test_a_response_counts_as_finished_with_its_last_byte() -> None:
    core = core_for(crc=False)
    core._responses.extend([_response(100), _response(100), _response(100)])
    core.build()
    assert core.batch_left == 3 * 120
    core.sent(119)
    assert core.reads_finished == 0
    core.sent(1)
    assert core.reads_finished == 1
    core.sent(200)
    assert core.reads_finished == 2
    core.sent(40)
    assert core.reads_finished == 3


@pytest.mark.parametrize("already", [0, 10, 5000])
def test_detach_copies_what_is_still_to_be_sent(already: int) -> None:
    core = core_for(crc=False)
    memory = bytearray(pattern(600_000))
    stags = StagTable()
    region = stags.owned(stags.advertise(memoryview(memory), seam.REMOTE_READ))
    for at in (0, 300_000):
        core._responses.append(ReadResponse(1, 0, region.view[at : at + 300_000], region))
    core.build()
    head = b"".join(core.batch)[:already]
    if already:
        core.sent(already)
    core.detach(region)
    stags.release(region)
    memory.clear()  # BufferError while a view is left
    stream = head + b"".join(drain(core))
    assert b"".join(frame.payload for frame in frames(stream, crc=False)) == pattern(600_000)


@pytest.mark.parametrize("already", [0, 50])
@pytest.mark.parametrize("markers", [True, False])
def test_terminate_follows_what_was_begun_and_nothing_else_does(
    already: int, markers: bool
) -> None:
    core = core_for(markers=markers)
    memory = bytearray(pattern(5000))
    core.requests.extend([rdma_request(seam.RDMA_WRITE, memory, 1, 0), send(b"never")])
    core.build()
    stream = b"".join(core.batch)[:already]
    if already:
        core.sent(already)
    core.abort(rdmap.terminate_for(ddp.MPA_CRC))
    memory.clear()
    stream += b"".join(drain(core))
    core.requests.append(send(b"never"))
    assert not core.build()
    segments = frames(Unmarker(crc=True).feed(stream) if markers else stream)
    assert [s.header.control for s in segments] == [0x8140, 0x4147]
    assert segments[1].header == ddp.UntaggedHeader(22, 0x4147, 0, 2, 1, 0)
    assert segments[1].payload == bytes.fromhex("20020000")


def test_responder_sends_nothing_before_it_is_opened() -> None:
    core = core_for()
    core.opened = False
    core.requests.append(send(b"early"))
    assert not core.build()
    core.abort(rdmap.terminate_for(ddp.MPA_CRC))
    assert core.batch == []
