"""The send core: segmentation, batches, order, and letting go of memory. No sockets."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iserblk.errors import LocalProtocolError
from iserblk.rcap import seam
from iserblk.rcap.iwarp import ddp, rdmap
from iserblk.rcap.iwarp.reads import OutstandingRead, ReadResponse
from iserblk.rcap.iwarp.transmit import BATCH_BUFFERS, BATCH_BYTES, BATCH_LOW, SendCore, SlotFrame
from iserblk.rcap.stags import StagTable
from tests.rcap.fpdu import Fpdu, decode_fpdu
from tests.rcap.wire import Unmarker, pattern, rdma_request


def core_for(
    *,
    crc: bool = True,
    markers: bool = False,
    emss: int = 1448,
    ord: int = 4,
    segments: int = 1,
    reads: deque[OutstandingRead] | None = None,
    responses: Sequence[ReadResponse] | deque[ReadResponse] = (),
) -> SendCore:
    return SendCore(
        crc=crc,
        markers=markers,
        emss=emss,
        ord=ord,
        reads=deque() if reads is None else reads,
        responses=responses if isinstance(responses, deque) else deque(responses),
        opened=True,
        segments=segments,
    )


def send(header: bytes, data: bytes | None = None, opcode: int = seam.SEND) -> seam.WorkRequest:
    request = seam.WorkRequest(opcode)
    request.header = SlotFrame(len(header)).slot(0)
    request.header.view[:] = header
    request.header_length = len(header)
    request.data = None if data is None else memoryview(data)
    return request


def drain(core: SendCore, take: int = 1 << 30) -> list[bytes]:
    """Send everything, ``take`` bytes at a time; returns the batches."""
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


def frames(stream: bytes, crc: bool = True) -> list[Fpdu]:
    result = []
    while stream:
        decoded = decode_fpdu(stream, crc=crc)
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


def places(batch: bytes) -> list[tuple[int, int, int]]:
    """For each frame of a batch: where it starts and ends, and the bytes of its pad and CRC."""
    result = []
    start = 0
    while start < len(batch):
        decoded = decode_fpdu(batch[start:], crc=True)
        assert decoded is not None
        frame, size = decoded
        result.append((start, start + size, size - ddp.LENGTH_SIZE - frame.header.length))
        start += size
    return result


@given(
    sizes=st.lists(
        st.tuples(
            st.sampled_from("swr"),
            st.one_of(st.integers(0, 9000), st.sampled_from([1424, 1428, 2852, 2856, 100_000])),
        ),
        max_size=20,
    ),
    emss=st.sampled_from([136, 536, 1448, 1460, 8948, 10924, 21848, 32772]),
    segments=st.sampled_from([1, 3, 64]),
    take=st.sampled_from([1448, 1 << 30]),
)
def test_with_crc_tcp_cuts_no_trailer(
    sizes: list[tuple[str, int]], emss: int, segments: int, take: int
) -> None:
    """A batch begins a TCP segment, and is cut at multiples of the EMSS: no pad or CRC lies on both
    sides of a cut, nor, with one segment a frame, any frame. A pad is not cut off its CRC at any
    multiple of four either (where the peer's window ends): its frame is a send and a segment."""
    core = core_for(emss=emss, segments=segments, ord=100)
    expected = {kind: b"" for kind in "sw"}
    for n, (kind, size) in enumerate(sizes):
        data = pattern(size, n)
        if kind == "s":
            core.requests.append(send(data[: size // 2], data[size // 2 :]))
            expected["s"] += data
        elif kind == "w":
            core.requests.append(rdma_request(seam.RDMA_WRITE, data, 1, 0))
            expected["w"] += data
        else:
            core.requests.append(rdma_request(seam.RDMA_READ, memoryview(bytearray(8)), 1, 0))
    batches = drain(core, take)
    for batch in batches:
        for start, end, trailer in places(batch):
            assert start % 4 == end % 4 == 0
            assert (end - trailer) // emss == (end - 1) // emss
            if segments == 1:
                assert start // emss == (end - 1) // emss
            assert end - start <= max(emss, min(segments * emss, 65544))
            if trailer > ddp.CRC_SIZE:
                assert len(batch) == end <= emss
    received = [(frame.header, frame.payload) for batch in batches for frame in frames(batch)]
    for kind, opcode in ("s", rdmap.SEND), ("w", rdmap.WRITE):
        of_kind = [data for header, data in received if header.control & 15 == opcode]
        assert b"".join(of_kind) == expected[kind]


@pytest.mark.parametrize("emss", [537, 1447, 65483])
def test_where_the_emss_is_no_multiple_of_four_a_batch_is_one_segment(emss: int) -> None:
    core = core_for(emss=emss, segments=3)
    for n in range(50):
        core.requests.append(send(pattern(76, n)))
        core.requests.append(rdma_request(seam.RDMA_WRITE, pattern(n * 100), 1, 0))
    batches = drain(core)
    assert max(map(len, batches)) <= emss
    assert len(batches) < sum(len(frames(batch)) for batch in batches)


def test_frames_of_one_segment_leave_many_at_a_time() -> None:
    core = core_for(emss=1448)
    core.requests.append(rdma_request(seam.RDMA_WRITE, bytes(1 << 20), 1, 0))
    batches = drain(core)
    assert sum(len(frames(batch)) for batch in batches) == -(-(1 << 20) // 1428)
    assert len(batches) <= 4


@pytest.mark.parametrize("emss", [1449, 10924, 21848, 32772, 65480, 65483])
def test_no_ulpdu_is_longer_than_its_field_can_say(emss: int) -> None:
    core = core_for(emss=emss, segments=64)
    core.requests.append(rdma_request(seam.RDMA_WRITE, pattern(200_000), 1, 0))
    assert sum(len(frame.payload) for batch in drain(core) for frame in frames(batch)) == 200_000


@pytest.mark.parametrize("change", ["emss", "allow"])
def test_a_send_goes_on_where_it_was_when_frames_grow(change: str) -> None:
    core = core_for(emss=1449)  # a batch is a segment
    message = pattern(8000)
    core.requests.append(send(message))
    core.build()
    first = b"".join(core.batch)
    core.sent(core.batch_left)
    if change == "emss":
        core.set_emss(8949)
    else:
        core.allow(65535)
    segments = frames(first + b"".join(drain(core)))
    offset = 0
    for segment in segments:
        assert isinstance(segment.header, ddp.UntaggedHeader)
        assert (segment.header.msn, segment.header.mo) == (1, offset)
        offset += len(segment.payload)
    assert b"".join(segment.payload for segment in segments) == message


@pytest.mark.parametrize("allowed", [8192, 65535])
def test_frames_are_as_long_as_the_peer_allows(allowed: int) -> None:
    core = core_for(emss=1448)
    assert core.mulpdu == 1442
    core.allow(allowed)
    assert allowed - 3 <= core.mulpdu <= allowed
    core.requests.append(rdma_request(seam.RDMA_WRITE, pattern(200_000), 1, 0))
    core.requests.append(send(pattern(76), pattern(100_001)))
    lengths = [frame.header.length for batch in drain(core) for frame in frames(batch)]
    assert allowed - 8 <= max(lengths) <= allowed
    core.set_emss(536)  # it means nothing any more
    assert allowed - 3 <= core.mulpdu <= allowed


def test_without_crc_a_batch_is_bounded_in_bytes_and_buffers() -> None:
    core = core_for(crc=False)
    for _ in range(3000):
        core.requests.append(rdma_request(seam.RDMA_WRITE, b"x", 1, 0))
    core.requests.append(rdma_request(seam.RDMA_WRITE, bytes(4 << 20), 1, 0))
    total = 0
    while core.build():
        assert len(core.batch) <= BATCH_BUFFERS
        assert core.batch_left <= BATCH_BYTES
        total += core.batch_left
        core.sent(core.batch_left)
    assert total > 4 << 20


def test_a_batch_is_filled_up_where_frames_may_be_cut_anywhere() -> None:
    core = core_for()
    core.allow(65535)
    data = pattern(3 << 20)
    for number in range(3):
        request = rdma_request(seam.RDMA_WRITE, data[number << 20 : (number + 1) << 20], 1, 0)
        request.signaled, request.token = True, number
        core.requests.append(request)
    stream = b""
    offers: list[int] = []
    ends: dict[object, int] = {}
    while core.build():
        assert core.batch_left <= BATCH_BYTES
        offers.append(core.batch_left)
        sent = b"".join(core.batch)[:100_001]
        core.sent(len(sent))
        stream += sent
        ends |= {done.token: len(stream) for done in core.completions if done.token not in ends}
    rest = len(stream)
    for offer in offers:
        assert offer >= min(BATCH_LOW, rest)
        rest -= min(offer, 100_001)
    segments = frames(stream)
    assert b"".join(segment.payload for segment in segments) == data
    # Each completes with the send that carried the last byte of its last frame, no other.
    position = 0
    expected = []
    for segment in segments:
        position += ddp.fpdu_size(segment.header.length)
        if segment.header.control & ddp.LAST:
            expected.append(min(-(-position // 100_001) * 100_001, len(stream)))
    assert list(ends.items()) == list(enumerate(expected))


def test_a_batch_of_whole_segments_is_not_filled_up() -> None:
    core = core_for()
    core.requests.append(rdma_request(seam.RDMA_WRITE, bytes(2 << 20), 1, 0))
    core.build()
    left = core.batch_left
    core.sent(left - 10)  # what follows would begin in the middle of a segment
    assert core.build()
    assert core.batch_left == 10


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


def test_a_request_that_is_posted_again_completes_as_what_it_is_now() -> None:
    core = core_for()
    request = send(bytes(100))
    request.signaled = True
    seen: list[tuple[int, object]] = []
    for opcode, token in (
        *((seam.SEND, "one"), (seam.SEND, "one"), (seam.SEND_INVALIDATE, "one")),
        *((seam.SEND_INVALIDATE, "two"), (seam.SEND, "one")),
    ):
        request.opcode, request.token = opcode, token
        core.requests.append(request)
        core.build()
        core.sent(core.batch_left)
        assert (core.completions[-1].opcode, core.completions[-1].token) == (opcode, token)
        seen.append((opcode, token))
        # Those before, which the layer above may not have looked at yet, stay what they were.
        assert [(each.opcode, each.token) for each in core.completions] == seen


@pytest.mark.parametrize("step", [1, 7, 124, 300, 1 << 30])
def test_of_several_signaled_requests_those_complete_that_have_left(step: int) -> None:
    core = core_for(crc=False)  # so that all leave in one batch
    sizes = [100, 4, 60, 200, 0, 31]
    for number, size in enumerate(sizes):
        core.requests.append(send(bytes(size)))
        core.requests[-1].signaled, core.requests[-1].token = number != 2, number
    core.build()
    ends = [sum(24 + (each + 3 & ~3) for each in sizes[: n + 1]) for n in range(len(sizes))]
    assert core.batch_left == ends[-1]
    gone = 0
    while gone < ends[-1]:
        count = min(step, core.batch_left)
        core.sent(count)
        gone += count
        left = [number for number, end in enumerate(ends) if end <= gone and number != 2]
        assert [each.token for each in core.completions] == left
    request = send(b"next")
    request.signaled, request.token = True, "next"
    core.requests.append(request)
    core.build()
    core.sent(core.batch_left)
    assert core.completions[-1].token == "next" and len(core.completions) == len(sizes)


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
    reads: deque[OutstandingRead] = deque()
    core = core_for(ord=2, reads=reads)
    core.requests.extend([_read(1), _read(2), _read(3), send(b"behind")])
    segments = frames(b"".join(drain(core)))
    assert [s.header.control for s in segments] == [0x4141, 0x4141]
    for n, segment in enumerate(segments, 1):
        assert segment.header == ddp.UntaggedHeader(46, 0x4141, 0, 1, n, 0)
        request = rdmap.ReadRequest.unpack_untrusted(segment.payload)
        assert request == (reads[n - 1].stag, 0, 100, 0x100 * n, n)
        assert 0 < request.sink_stag < 256
    reads.popleft()
    segments = frames(b"".join(drain(core)))
    assert [s.header.control for s in segments] == [0x4141, 0x4143]


def test_sinks_under_way_have_different_stags() -> None:
    reads: deque[OutstandingRead] = deque()
    core = core_for(ord=255, reads=reads)
    core.requests.extend([_read(n) for n in range(255)])
    drain(core)
    assert len({read.stag for read in reads}) == 255


def _response(size: int, seed: int = 0) -> ReadResponse:
    stags = StagTable()
    stag = stags.advertise(memoryview(pattern(size, seed)), seam.REMOTE_READ)
    region = stags.owned(stag)
    return ReadResponse(0x77, 1000, region.view, region)


def test_read_responses_do_not_wait_for_blocked_requests_and_take_turns() -> None:
    core = core_for(ord=0, responses=[_response(4000), _response(0)])
    core.requests.append(_read(1))
    segments = frames(b"".join(drain(core)))
    assert [s.header.control for s in segments] == [0x8142, 0x8142, 0xC142, 0xC142]
    assert [s.header.to for s in segments if isinstance(s.header, ddp.TaggedHeader)] == [
        1000,
        2428,
        3856,
        1000,
    ]
    assert core.reads_finished == 2

    core = core_for(responses=[_response(10), _response(10), _response(10)])
    core.requests.extend([send(b"one"), send(b"two"), send(b"three")])
    segments = frames(b"".join(drain(core)))
    assert [s.header.control & 15 for s in segments] == [3, 2, 3, 2, 3, 2]


def test_a_response_counts_as_finished_with_its_last_byte() -> None:
    core = core_for(crc=False, responses=[_response(100), _response(100), _response(100)])
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
    memory = bytearray(pattern(600_000))
    stags = StagTable()
    region = stags.owned(stags.advertise(memoryview(memory), seam.REMOTE_READ))
    halves = [region.view[at : at + 300_000] for at in (0, 300_000)]
    core = core_for(crc=False, responses=[ReadResponse(1, 0, half, region) for half in halves])
    halves.clear()
    core.build()
    head = b"".join(core.batch)[:already]
    if already:
        core.sent(already)
    core.detach(region)
    stags.release(region)
    memory.clear()  # BufferError while a view is left
    stream = head + b"".join(drain(core))
    assert b"".join(frame.payload for frame in frames(stream, crc=False)) == pattern(600_000)


def test_detach_copies_nothing_that_is_sent_from_other_memory() -> None:
    stags = StagTable()
    memories = [bytearray(pattern(200_000)) for _ in range(2)]
    regions = [
        stags.owned(stags.advertise(memoryview(memory), seam.REMOTE_READ)) for memory in memories
    ]
    core = core_for(
        crc=False,
        responses=[
            ReadResponse(1, 0, region.view[at : at + 100_000], region)
            for region in regions
            for at in (0, 100_000)
        ],
    )
    core.build()
    core.sent(150_000)  # in the midst of the second response
    before = list(core.batch)
    core.detach(regions[0])
    others = [
        piece
        for piece in before
        if not (isinstance(piece, memoryview) and piece.obj is memories[0])
    ]
    assert [piece for piece in core.batch if any(piece is other for other in others)] == others
    copied = sum(len(piece) for piece in before) - sum(map(len, others))
    assert 0 < copied <= 51_000
    assert sum(isinstance(each, memoryview) and each.obj is memories[1] for each in before) > 1
    before.clear()
    stags.release(regions[0])
    memories[0].clear()  # BufferError while a view is left


@pytest.mark.parametrize(
    ("let_go", "left"),
    [
        pytest.param(lambda core: core.sent(core.batch_left), 0, id="sent"),
        pytest.param(lambda core: core.abort(b""), 0, id="dropped"),
        pytest.param(lambda core: core.abort(rdmap.terminate_for(ddp.MPA_CRC)), 1, id="ended"),
    ],
)
def test_another_thread_may_look_at_the_batch_while_memory_in_it_dies(
    let_go: Callable[[SendCore], None], left: int
) -> None:
    """A batch may be the last to refer to the mapping of a header slot, and other threads run while
    that is unmapped. This memory looks at the batch itself."""
    core = core_for(crc=False)
    seen: list[int] = []

    class Memory(bytearray):
        def __del__(self) -> None:
            seen.append(len(core.batch))

    def post() -> None:
        request = seam.WorkRequest(seam.SEND)
        request.header = SlotFrame(8, memoryview(Memory(SlotFrame.room(8)))).slot(0)
        request.header_length = 8
        core.requests.append(request)

    post()
    assert core.build()
    let_go(core)
    assert seen == [left]


@pytest.mark.parametrize("already", [0, 50])
@pytest.mark.parametrize("markers", [True, False])
def test_terminate_follows_what_was_begun_and_nothing_else_does(
    already: int, markers: bool
) -> None:
    core = core_for(markers=markers)
    memory = bytearray(pattern(5000))
    core.requests.extend([rdma_request(seam.RDMA_WRITE, memory, 1, 0), send(bytes(1400))])  # type: ignore[arg-type]
    core.build()
    begun = [frame.header.control for frame in frames(b"".join(core.batch))] if not markers else []
    stream = b"".join(core.batch)[:already]
    if already:
        core.sent(already)
    core.abort(rdmap.terminate_for(ddp.MPA_CRC))
    memory.clear()
    stream += b"".join(drain(core))
    core.requests.append(send(b"never"))
    assert not core.build()
    segments = frames(Unmarker(crc=True).feed(stream) if markers else stream)
    assert [s.header.control for s in segments] == [*(begun or [0x8140]), 0x4147]
    assert segments[-1].header == ddp.UntaggedHeader(22, 0x4147, 0, 2, 1, 0)
    assert segments[-1].payload == bytes.fromhex("20020000")


def test_responder_sends_nothing_before_it_is_opened() -> None:
    core = core_for()
    core.opened = False
    core.requests.append(send(b"early"))
    assert not core.build()
    core.abort(rdmap.terminate_for(ddp.MPA_CRC))
    assert core.batch == []
