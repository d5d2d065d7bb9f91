"""iSER headers and connection flags: layouts, and what is refused."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iserblk.datamover.iser import (
    ConnectionFlags,
    ControlHeader,
    check_message_untrusted,
    check_zero_based_untrusted,
)
from iserblk.errors import RemoteProtocolError

# From a READ of the Linux initiator: RSV, Read STag and its base; then of a WRITE: WSV.
CASES = [
    (
        bytes.fromhex("14000000 00000000 0000000000000000 00000101 0000000000000000"),
        ControlHeader(0x14, 0, 0, 0x101, 0),
    ),
    (
        bytes.fromhex("18000000 a0030100 0000000000020000 00000000 0000000000000000"),
        ControlHeader(0x18, 0xA0030100, 0x20000, 0, 0),
    ),
    (bytes.fromhex("10" + "00" * 27), ControlHeader(0x10, 0, 0, 0, 0)),
]


@pytest.mark.parametrize(("data", "header"), CASES)
def test_header_both_ways(data: bytes, header: ControlHeader) -> None:
    """proves: ISER-9.2-1, ISER-7145-9.1-1, ISER-RC-1"""
    assert ControlHeader.unpack_from(data) == header
    assert ControlHeader.unpack_from(b"xx" + data + b"trailing", 2) == header
    out = bytearray(28)
    header.pack_into(memoryview(out))
    assert out == data


@given(st.binary(max_size=80))
def test_any_bytes_as_header(data: bytes) -> None:
    try:
        header = ControlHeader.unpack_from(data)
    except RemoteProtocolError:
        assert len(data) < 28 or data[0] >> 4 != 1
    else:
        assert header.flags >> 4 == 1


FORMS = [(28, check_message_untrusted), (12, check_zero_based_untrusted)]
Check = Callable[[memoryview], bool]


def message(header: int, length_word: int, behind: int, first: int = 0x10) -> memoryview:
    bhs = struct.pack(">BBxxI40x", 0x21, 0x80, length_word)
    return memoryview(bytes([first]) + bytes(header - 1) + bhs + bytes(behind))


@pytest.mark.parametrize(("header", "check"), FORMS)
@pytest.mark.parametrize(
    ("word", "behind"), [(0, 0), (0, 3), (5, 5), (5, 8), (0x01000000, 4), (0x02000005, 13)]
)
def test_whole_messages(header: int, check: Check, word: int, behind: int) -> None:
    """A data segment may end with its padding, or without. proves: ISER-RC-12"""
    assert check(message(header, word, behind))


@pytest.mark.parametrize(("header", "check"), FORMS)
@pytest.mark.parametrize(
    ("word", "behind", "first", "words"),
    [
        (5, 4, 0x10, "5 of data"),
        (0x01000000, 3, 0x10, "4 bytes of AHS"),
        (0xFFFFFFFF, 100, 0x10, "declares"),
        (0, 0, 0x40, "reserved"),
        (0, 0, 0x00, "reserved"),
    ],
)
def test_broken_messages(
    header: int, check: Check, word: int, behind: int, first: int, words: str
) -> None:
    """Illegal opcodes, and lengths that do not fit to each other.

    proves: ISER-9.1-2, ISER-10.1.3.3-1, ISER-RC-13
    """
    with pytest.raises(RemoteProtocolError, match=words):
        check(message(header, word, behind, first))


@pytest.mark.parametrize(("header", "check"), FORMS)
@pytest.mark.parametrize("first", [0x20, 0x2F, 0x30, 0x31])
@pytest.mark.parametrize("size", [1, 12, 28, 76, 100])
def test_a_greeting_is_no_pdu(header: int, check: Check, first: int, size: int) -> None:
    """Of whatever length: only who awaits one can say what is wrong with it. proves: ISER-9.1-2"""
    assert not check(memoryview(bytes((first,)).ljust(size, b"\0")))


@pytest.mark.parametrize(("header", "check"), FORMS)
def test_short_messages(header: int, check: Check) -> None:
    for size in (0, 1, header, header + 47):
        with pytest.raises(RemoteProtocolError, match="shorter"):
            check(message(header, 0, 0)[:size])


@pytest.mark.parametrize(("header", "check"), FORMS)
@given(data=st.binary(max_size=200))
def test_any_bytes_as_message(header: int, check: Check, data: bytes) -> None:
    try:
        whole = check(memoryview(data))
    except RemoteProtocolError:
        return
    assert data[0] >> 4 == 1 and len(data) >= header + 48 if whole else data[0] >> 4 in (2, 3)


# shows: SYSTEM-18
@pytest.mark.parametrize(
    ("data", "send_invalidate"),
    [
        (b"", False),
        (b"\x80\0\0\0", True),
        (b"\xc0\0\0\0", False),
        (b"\x40", False),
        (b"\0" * 9, True),
    ],
)
def test_connection_flags(data: bytes, send_invalidate: bool) -> None:
    assert ConnectionFlags.unpack(data).send_invalidate is send_invalidate


# shows: SYSTEM-18
def test_connection_flags_packed() -> None:
    """proves: ISER-RC-3, ISER-RC-4"""
    assert ConnectionFlags(0xC0).pack() == b"\xc0\0\0\0"
