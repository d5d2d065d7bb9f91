"""MPA start-up: both roles, both revisions, every option, hostile bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iserblk.errors import LocalProtocolError, RemoteProtocolError
from iserblk.rcap.iwarp import ddp, mpa
from tests.rcap.fpdu import decode_fpdu
from tests.rcap.wire import Unmarker, start_up

REQUEST, REPLY = mpa.REQUEST_KEY, mpa.REPLY_KEY


def frame(key: bytes, flags: int, revision: int, private_data: bytes = b"") -> bytes:
    return mpa.HEADER.pack(key, flags, revision, len(private_data)) + private_data


def enhanced(word_ird: int, word_ord: int, rest: bytes = b"") -> bytes:
    return mpa.ENHANCED.pack(word_ird, word_ord) + rest


# --- what goes out ---


def test_request_by_default() -> None:
    request = mpa.MpaInitiator(private_data=b"\x80\0\0\0").data_to_send()
    # CRC wanted, enhanced; IRD 64, peer-to-peer; ORD 64, RTR Write or Read.
    assert request == REQUEST + bytes.fromhex("50 02 0008 8040 c040 80000000")


def test_request_as_the_kernel_sends_it() -> None:
    initiator = mpa.MpaInitiator(
        crc=False, ird=128, ord=1, rtr=mpa.RTR_NONE, private_data=b"\x80\0\0\0"
    )
    assert initiator.data_to_send() == REQUEST + bytes.fromhex("10 02 0008 0080 0001 80000000")
    assert initiator.data_to_send() == b""


def test_request_of_revision_1() -> None:
    initiator = mpa.MpaInitiator(revision=1, private_data=b"pd")
    assert initiator.data_to_send() == REQUEST + bytes.fromhex("40 01 0002") + b"pd"


@pytest.mark.parametrize(
    "options",
    [
        {"revision": 3},
        {"ird": 0x3FFF},
        {"ord": -1},
        {"private_data": bytes(509)},
        {"private_data": bytes(513), "revision": 1},
    ],
)
def test_initiator_options_out_of_range(options: dict[str, object]) -> None:
    with pytest.raises(LocalProtocolError):
        mpa.MpaInitiator(**options)  # type: ignore[arg-type]


def test_responder_options_out_of_range() -> None:
    with pytest.raises(LocalProtocolError):
        mpa.MpaResponder(rtr=mpa.RTR_NONE)
    responder = mpa.MpaResponder()
    for answer in (responder.accept, responder.reject):
        with pytest.raises(LocalProtocolError):
            answer()
    responder.receive_data(mpa.MpaInitiator().data_to_send())
    with pytest.raises(LocalProtocolError):
        responder.accept(bytes(509))
    responder.accept()
    with pytest.raises(LocalProtocolError):
        responder.accept()


# --- both ends ---


@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize("theirs", [True, False])
@pytest.mark.parametrize("revision", [1, 2])
def test_crc_is_used_when_either_side_asks(ours: bool, theirs: bool, revision: int) -> None:
    # proves: ISER-5.1-13
    initiator = mpa.MpaInitiator(crc=ours, revision=revision)
    a, b = start_up(initiator, mpa.MpaResponder(crc=theirs))
    assert a.crc is b.crc is (ours or theirs)


def test_private_data_both_ways() -> None:
    initiator = mpa.MpaInitiator(private_data=bytes(508))
    a, b = start_up(initiator, mpa.MpaResponder(), b"answer")
    assert (a.private_data, b.private_data) == (b"answer", bytes(508))
    assert (a.leftover, b.leftover) == (b"", b"")


@pytest.mark.parametrize(
    ("ours", "theirs", "expected_ours", "expected_theirs"),
    [
        # (IRD, ORD) of each end, then what each may use.
        ((64, 64), (64, 64), (64, 64), (64, 64)),
        ((128, 1), (16, 16), (128, 1), (1, 16)),
        ((4, 0), (64, 64), (4, 0), (1, 4)),  # one place for the RTR Read
        ((0, 0), (64, 64), (0, 0), (1, 0)),
        ((64, 64), (2, 3), (64, 2), (2, 3)),
        ((64, 0), (0, 64), (64, 0), (1, 64)),  # a target: no Reads but the RTR
    ],
)
def test_ird_and_ord(
    ours: tuple[int, int],
    theirs: tuple[int, int],
    expected_ours: tuple[int, int],
    expected_theirs: tuple[int, int],
) -> None:
    # proves: ISER-5.1.1-6, ISER-5.1.1-9, ISER-7145-8.2-1
    initiator = mpa.MpaInitiator(ird=ours[0], ord=ours[1])
    responder = mpa.MpaResponder(ird=theirs[0], ord=theirs[1])
    a, b = start_up(initiator, responder)
    assert (a.ird, a.ord) == expected_ours
    assert (b.ird, b.ord) == expected_theirs
    assert a.ord <= b.ird and b.ord <= a.ird
    assert (b.peer_ird, b.peer_ord) == ours


@pytest.mark.parametrize("rtr", [mpa.RTR_NONE, mpa.RTR_SEND, mpa.RTR_WRITE])
def test_a_target_that_takes_no_reads(rtr: int) -> None:
    """Its IRD is 0, unless the initiator begins with a Read. proves: ISER-5.1.2-6"""
    a, b = start_up(mpa.MpaInitiator(ird=64, ord=1, rtr=rtr), mpa.MpaResponder(ird=0, ord=64))
    assert (a.ird, a.ord) == (64, 0)
    assert (b.ird, b.ord) == (0, 64)


@pytest.mark.parametrize("offered", range(8))
@pytest.mark.parametrize("supported", range(1, 8))
def test_rtr(offered: int, supported: int) -> None:
    initiator = mpa.MpaInitiator(rtr=offered)
    responder = mpa.MpaResponder(rtr=supported)
    if offered and not offered & supported:
        with pytest.raises(RemoteProtocolError) as caught:
            start_up(initiator, responder)
        assert caught.value.terminate == ddp.MPA_RTR
        terminate = decode_fpdu(initiator.data_to_send(), crc=True)
        assert terminate is not None
        assert terminate[0].header == ddp.UntaggedHeader(22, 0x4147, 0, 2, 1, 0)
        assert terminate[0].payload == bytes.fromhex("20070000")
        return
    a, b = start_up(initiator, responder)
    if not offered:
        assert a.rtr == b.rtr == mpa.RTR_NONE
        return
    assert a.rtr in (mpa.RTR_SEND, mpa.RTR_WRITE, mpa.RTR_READ)
    assert a.rtr & offered & supported & b.rtr


def test_revision_1_and_2_without_s() -> None:
    initiator = mpa.MpaInitiator(revision=1, private_data=b"pd")
    a, b = start_up(initiator, mpa.MpaResponder(), b"answer")
    for end in (a, b):
        assert (end.revision, end.enhanced, end.rtr) == (1, False, mpa.RTR_NONE)
        assert (end.peer_ird, end.peer_ord) == (None, None)
        assert (end.ird, end.ord) == (mpa.DEFAULT_DEPTH, mpa.UNDECLARED_ORD)
    assert (a.private_data, b.private_data) == (b"answer", b"pd")

    responder = mpa.MpaResponder()
    result = responder.receive_data(frame(REQUEST, 0, 2, b"pd"))
    assert result is not None and not result.enhanced and result.private_data == b"pd"
    responder.accept(b"answer")
    assert responder.data_to_send() == frame(REPLY, mpa.CRC, 2, b"answer")


def test_reply_of_revision_1_to_an_enhanced_request() -> None:
    initiator = mpa.MpaInitiator()
    result = initiator.receive_data(frame(REPLY, 0, 1, b"pd"))
    assert result is not None
    assert (result.revision, result.enhanced, result.private_data) == (1, False, b"pd")


# --- single replies and requests ---


@pytest.mark.parametrize(
    ("words", "crc", "ird", "ord_"),
    [((16, 16), False, 64, 16), ((0, 1), False, 64, 0), ((0x3FFF, 0x3FFF), True, 64, 64)],
)
def test_replies_of_a_client_server_target(
    words: tuple[int, int], crc: bool, ird: int, ord_: int
) -> None:
    initiator = mpa.MpaInitiator(crc=False)
    flags = mpa.ENHANCED_CONNECTION | (mpa.CRC if crc else 0)
    result = initiator.receive_data(frame(REPLY, flags, 2, enhanced(*words)))
    assert result is not None
    assert (result.crc, result.ird, result.ord) == (crc, ird, ord_)
    assert result.rtr == mpa.RTR_NONE


def test_request_without_negotiation_of_depths() -> None:
    responder = mpa.MpaResponder(ird=5, ord=6)
    request = frame(REQUEST, mpa.ENHANCED_CONNECTION, 2, enhanced(0x3FFF, 0x3FFF))
    result = responder.receive_data(request)
    assert result is not None and (result.ird, result.ord) == (5, 6)
    responder.accept()
    assert responder.data_to_send()[20:] == enhanced(0x3FFF, 0x3FFF)


def test_rtr_bits_without_peer_to_peer_are_ignored() -> None:
    responder = mpa.MpaResponder()
    request = frame(REQUEST, mpa.ENHANCED_CONNECTION, 2, enhanced(0x4010, 0xC010))
    result = responder.receive_data(request)
    assert result is not None and result.rtr == mpa.RTR_NONE
    responder.accept()
    assert responder.data_to_send()[20:] == enhanced(16, 16)


def test_peer_that_wants_markers() -> None:
    responder = mpa.MpaResponder()
    result = responder.receive_data(frame(REQUEST, mpa.MARKERS, 1))
    assert result is not None and result.markers
    responder.accept()
    assert responder.data_to_send()[16] & mpa.MARKERS == 0
    initiator = mpa.MpaInitiator()
    result = initiator.receive_data(frame(REPLY, mpa.MARKERS, 1))
    assert result is not None and result.markers


def test_reserved_bits_are_not_looked_at() -> None:
    assert mpa.MpaResponder().receive_data(frame(REQUEST, 0x0F | mpa.REJECT, 1)) is not None
    # S means nothing in revision 1.
    result = mpa.MpaResponder().receive_data(frame(REQUEST, mpa.ENHANCED_CONNECTION, 1))
    assert result is not None and not result.enhanced


def test_bytes_behind_the_reply_are_handed_on() -> None:
    initiator = mpa.MpaInitiator()
    result = initiator.receive_data(frame(REPLY, 0, 1, b"pd") + b"an FPDU")
    assert result is not None and result.leftover == b"an FPDU"


@pytest.mark.parametrize("at_once", [True, False])
def test_initiator_that_does_not_wait(at_once: bool) -> None:
    responder, request = mpa.MpaResponder(), frame(REQUEST, 0, 1)
    with pytest.raises(RemoteProtocolError, match="wait"):
        if at_once:
            responder.receive_data(request + b"x")
        responder.receive_data(request)
        responder.receive_data(b"x")


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        (frame(REPLY, mpa.REJECT, 1), "rejected"),
        (frame(REPLY, mpa.REJECT, 1, b"\x12\x34"), "12 34"),
        (frame(REPLY, mpa.REJECT | 0x10, 2, enhanced(0, 100)), "needs 100 RDMA Reads"),
        (frame(REQUEST, 0, 1), "acts as an MPA initiator"),
        (b"HTTP/1.1 400 Bad Request", "48 54 54 50"),
        (frame(REPLY, 0, 0), "revision 0"),
        (frame(REPLY, 0, 3), "revision 3"),
        (frame(REPLY, 0, 1, bytes(513)), "513 bytes of private data"),
        (frame(REPLY, mpa.ENHANCED_CONNECTION, 2, bytes(3)), "lacks"),
    ],
)
def test_replies_that_end_it(reply: bytes, text: str) -> None:
    initiator = mpa.MpaInitiator()
    initiator.data_to_send()
    with pytest.raises(RemoteProtocolError, match=text) as caught:
        initiator.receive_data(reply)
    assert caught.value.layer == "MPA"
    assert initiator.data_to_send() == b""


@pytest.mark.parametrize("markers", [0, mpa.MARKERS])
@pytest.mark.parametrize(
    ("word_ird", "word_ord", "rtr", "code"),
    [
        (64, 65, mpa.RTR_WRITE, ddp.MPA_IRD),
        (0x8040, 64, mpa.RTR_NONE, ddp.MPA_RTR),
        (0x8040, 0x4040, mpa.RTR_WRITE, ddp.MPA_RTR),
        (0x8040, 64, mpa.RTR_WRITE, ddp.MPA_RTR),
    ],
)
def test_replies_that_are_answered_with_a_terminate(
    word_ird: int, word_ord: int, rtr: int, code: tuple[int, int, int], markers: int
) -> None:
    initiator = mpa.MpaInitiator(rtr=rtr)
    initiator.data_to_send()
    flags = mpa.ENHANCED_CONNECTION | markers
    with pytest.raises(RemoteProtocolError) as caught:
        initiator.receive_data(frame(REPLY, flags, 2, enhanced(word_ird, word_ord)))
    assert caught.value.terminate == code
    sent = initiator.data_to_send()
    decoded = decode_fpdu(Unmarker(crc=True).feed(sent) if markers else sent, crc=True)
    assert decoded is not None and decoded[0].payload == bytes((0x20, code[2], 0, 0))


def test_reject_is_sent_and_understood() -> None:
    initiator, responder = mpa.MpaInitiator(), mpa.MpaResponder()
    responder.receive_data(initiator.data_to_send())
    responder.reject(b"no")
    reply = responder.data_to_send()
    assert reply[16] & mpa.REJECT
    with pytest.raises(RemoteProtocolError, match="rejected"):
        initiator.receive_data(reply)


# --- any chunking, any bytes ---


@pytest.mark.parametrize("size", [1, 2, 19, 20, 21, 27])
def test_frames_in_pieces(size: int) -> None:
    initiator, responder = mpa.MpaInitiator(private_data=b"four"), mpa.MpaResponder()
    for side, other in ((responder, initiator), (initiator, responder)):
        data = other.data_to_send()
        results = [side.receive_data(data[at : at + size]) for at in range(0, len(data), size)]
        assert results[-1] is not None
        assert not any(results[:-1])
        if side is responder:
            responder.accept(b"five")


@given(
    data=st.one_of(
        st.binary(max_size=600),
        st.builds(
            frame,
            st.sampled_from([REQUEST, REPLY]),
            st.integers(0, 255),
            st.integers(0, 4),
            st.binary(max_size=520),
        ),
    ),
    size=st.integers(1, 600),
)
def test_any_bytes(data: bytes, size: int) -> None:
    for side in (mpa.MpaInitiator(), mpa.MpaResponder()):
        try:
            for at in range(0, len(data), size):
                result = side.receive_data(data[at : at + size])
                if result is not None:
                    assert len(result.private_data) <= 512
                    assert result.ord <= mpa.DEFAULT_DEPTH
                    break
        except RemoteProtocolError as error:
            assert error.layer == "MPA"


def test_first_bytes_tell_mpa_from_iscsi() -> None:
    request = mpa.MpaInitiator().data_to_send()
    for end in range(16):
        assert mpa.looks_like_mpa(request[:end]) is None
    for end in range(16, len(request)):
        assert mpa.looks_like_mpa(request[:end]) is True
    assert mpa.looks_like_mpa(b"\x43\x87\0\0") is False
    assert mpa.looks_like_mpa(b"MPA ID Req Frams") is False
    assert mpa.looks_like_mpa(mpa.REPLY_KEY) is False
