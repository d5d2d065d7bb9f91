"""DDP over SCTP without sockets: order, session control, and how a session begins."""

from __future__ import annotations

import random
import struct
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iserblk.errors import LocalProtocolError, RemoteProtocolError
from iserblk.rcap.iwarp import mpa, sctp
from iserblk.rcap.iwarp.sctp import Arrivals, SessionInitiator, SessionResponder

# Written by hand from RFC 5043 section 5.2.3 and RFC 6581 sections 7 and 9: IRD 64, ORD 5, then
# iSER's private data.
ENHANCED_INITIATE = bytes.fromhex("0000 0005 0040 0005 80000000")
ENHANCED_ACCEPT = bytes.fromhex("0000 0006 0005 0040 c0000000")
INITIATE = bytes.fromhex("0000 0001 80000000")
TERMINATE = bytes.fromhex("0007 0004")


def segment(ssn: int, body: bytes = b"") -> bytes:
    return struct.pack(">H", ssn & 0xFFFF) + body


# --- order ---


@given(st.integers(1, 60), st.randoms(use_true_random=False))
def test_messages_come_back_in_order(count: int, rng: random.Random) -> None:
    arrivals = Arrivals()
    numbers = list(range(count))
    rng.shuffle(numbers)
    seen = []
    for first in numbers:
        number = first
        if arrivals.is_next(number):
            seen.append(number)
            while (kept := arrivals.pop()) is not None:
                number += 1
                assert kept == (sctp.PPID_SEGMENT, segment(number, b"body"))
                seen.append(number)
        else:
            arrivals.keep(sctp.PPID_SEGMENT, segment(number, b"body"))
    assert seen == list(range(count))


def test_the_numbers_wrap() -> None:
    arrivals = Arrivals()
    for number in range(65535):
        assert arrivals.is_next(number)
    arrivals.keep(16, segment(0, b"x"))
    assert arrivals.pop() is None
    assert arrivals.is_next(65535)
    assert arrivals.pop() == (16, segment(0, b"x"))
    assert arrivals.is_next(1)


@pytest.mark.parametrize("again", [0, 32769, 65535])
def test_a_number_that_was_there_is_refused(again: int) -> None:
    arrivals = Arrivals()
    assert arrivals.is_next(0)
    with pytest.raises(RemoteProtocolError, match="second time"):
        arrivals.keep(16, segment(again))


def test_a_kept_number_is_refused() -> None:
    arrivals = Arrivals()
    arrivals.keep(16, segment(3))
    with pytest.raises(RemoteProtocolError, match="second time"):
        arrivals.keep(16, segment(3))


def test_what_is_kept_has_a_limit() -> None:
    arrivals = Arrivals()
    body = bytes(65000)
    with pytest.raises(RemoteProtocolError, match="DDP-SSN 0 does not come"):
        for number in range(1, 1000):
            arrivals.keep(16, segment(number, body))
    assert number * len(body) < 2 * sctp.MAX_EARLY_BYTES
    arrivals.discard()


def test_small_messages_count_with_what_they_take() -> None:
    arrivals = Arrivals()
    for number in range(1, sctp.SSN_WINDOW):
        arrivals.keep(16, segment(number))
    before = sctp.EARLY.bytes
    assert before >= sctp.SSN_WINDOW * 200
    arrivals.discard()
    assert sctp.EARLY.bytes <= before - sctp.SSN_WINDOW * 200


def test_what_all_associations_keep_has_a_limit() -> None:
    """However many there are; and it takes nobody the little that an honest peer needs."""
    before = sctp.EARLY.bytes
    body = bytes(60000)
    many = []
    for _ in range(200):
        arrivals = Arrivals()
        many.append(arrivals)
        with suppress(RemoteProtocolError):  # it would be closed; its messages are kept until then
            for number in range(1, 270):
                arrivals.keep(16, segment(number, body))
    slack = 200 * (sctp.EARLY_BYTES_OF_EACH + 2 * len(body))
    assert sctp.EARLY.bytes - before <= sctp.MAX_EARLY_BYTES_IN_ALL + slack
    honest = Arrivals()
    honest.keep(16, segment(1, body))
    assert honest.is_next(0) and honest.pop() == (16, segment(1, body))
    for arrivals in many:
        arrivals.discard()
    assert sctp.EARLY.bytes == before


# --- control messages ---


def test_control_messages_are_as_the_text_has_them() -> None:
    initiator = SessionInitiator(private_data=b"\x80\0\0\0", ird=64, ord=5)
    assert sctp.pack_control(0, *initiator.request) == ENHANCED_INITIATE
    responder = SessionResponder(ird=64, ord=64)
    asked = responder.receive(*sctp.unpack_control_untrusted(ENHANCED_INITIATE))
    assert (asked.private_data, asked.ird, asked.ord) == (b"\x80\0\0\0", 5, 64)
    assert sctp.pack_control(0, *responder.accept(b"\xc0\0\0\0")) == ENHANCED_ACCEPT
    agreed = initiator.receive(*sctp.unpack_control_untrusted(ENHANCED_ACCEPT))
    assert (agreed.private_data, agreed.ird, agreed.ord) == (b"\xc0\0\0\0", 64, 5)
    assert sctp.pack_control(7, sctp.TERMINATE) == TERMINATE


@pytest.mark.parametrize("size", [0, 1, 3, 517])
def test_a_control_message_of_a_wrong_size(size: int) -> None:
    with pytest.raises(RemoteProtocolError):
        sctp.unpack_control_untrusted(bytes(size) if size < 4 else bytes(4 + size))


def test_private_data_has_512_bytes_at_most() -> None:
    assert len(SessionInitiator(private_data=bytes(508)).request[1]) == 512
    with pytest.raises(LocalProtocolError):
        SessionInitiator(private_data=bytes(509))
    responder = SessionResponder()
    responder.receive(sctp.INITIATE, b"")
    assert responder.accept(bytes(512)) == (sctp.ACCEPT, bytes(512))


def test_a_plain_initiate_has_a_plain_answer() -> None:
    responder = SessionResponder()
    asked = responder.receive(*sctp.unpack_control_untrusted(INITIATE))
    assert (asked.private_data, asked.ord, asked.enhanced) == (b"\x80\0\0\0", 1, False)
    assert responder.accept(b"yes") == (sctp.ACCEPT, b"yes")
    assert responder.reject(b"no") == (sctp.REJECT, b"no")


def test_a_plain_answer_declares_no_ird() -> None:
    agreed = SessionInitiator(ird=8, ord=8).receive(sctp.ACCEPT, b"data")
    assert (agreed.ird, agreed.ord, agreed.private_data) == (8, 1, b"data")


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (sctp.REJECT, "rejected the session"),
        (sctp.ENHANCED_REJECT, r"rejected the session \(private data 00 00 00 00\)"),
        (sctp.TERMINATE, "takes no session"),
        (sctp.INITIATE, "Function Code 1"),
        (0, "Function Code 0"),
        (9, "Function Code 9"),
    ],
)
def test_the_session_is_refused(function: int, words: str) -> None:
    data = bytes(4) if function == sctp.ENHANCED_REJECT else b""
    with pytest.raises(RemoteProtocolError, match=words):
        SessionInitiator().receive(function, data)


def test_a_responder_that_wants_too_many_reads() -> None:
    with pytest.raises(RemoteProtocolError, match="9 RDMA Reads"):
        SessionInitiator(ird=8).receive(6, mpa.enhanced_words(8, 9, mpa.RTR_NONE))


def test_rtr_kinds_are_answered() -> None:
    responder = SessionResponder()
    asked = responder.receive(5, mpa.enhanced_words(4, 0, mpa.RTR_WRITE | mpa.RTR_READ))
    assert asked.rtr == mpa.RTR_WRITE | mpa.RTR_READ
    assert asked.ird == 1  # for the Read that is the RTR
    function, data = responder.accept()
    word_ird, word_ord = mpa.ENHANCED.unpack(data)
    assert function == sctp.ENHANCED_ACCEPT
    assert mpa.rtr_kinds(word_ird, word_ord) == asked.rtr


def test_no_negotiation_stays_that() -> None:
    none = mpa.NOT_NEGOTIATED
    responder = SessionResponder(ird=7, ord=7)
    asked = responder.receive(5, mpa.ENHANCED.pack(none, none))
    assert (asked.ird, asked.ord) == (7, 1)
    assert responder.accept()[1] == mpa.ENHANCED.pack(none, none)


def test_an_answer_needs_a_question() -> None:
    with pytest.raises(LocalProtocolError):
        SessionResponder().accept()


@given(st.integers(0, 0xFFFF), st.binary(max_size=520), st.booleans())
def test_any_bytes_cause_the_one_error(function: int, data: bytes, initiator: bool) -> None:
    side = SessionInitiator() if initiator else SessionResponder()
    try:
        code, rest = sctp.unpack_control_untrusted(struct.pack(">HH", 0, function) + data)
        agreed = side.receive(code, rest)
    except RemoteProtocolError:
        return
    assert 0 <= agreed.ird < mpa.NOT_NEGOTIATED
    assert 0 <= agreed.ord < mpa.NOT_NEGOTIATED


# --- sizes ---


@pytest.mark.parametrize(
    ("fragmentation_point", "size"),
    [(65484, 65452), (1452, 1420), (100, 518), (200_000, 65537)],
)
def test_size_of_a_message(fragmentation_point: int, size: int) -> None:
    """RFC 5043 section 9: below what one packet takes, but never below 516 bytes of segment."""
    assert sctp.message_size(fragmentation_point) == size
