"""DDP's headers and the sizes of FPDUs, against RFC 5041 and RFC 5044."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iserblk.rcap.iwarp import ddp


@pytest.mark.parametrize(
    ("ulpdu", "size"), [(0, 8), (1, 8), (2, 8), (3, 12), (14, 20), (1458, 1464), (65535, 65544)]
)
def test_the_size_of_an_fpdu(ulpdu: int, size: int) -> None:
    """RFC 5044 section 4.1: length, ULPDU, pad to a multiple of four, CRC."""
    assert ddp.fpdu_size(ulpdu) == size


def test_a_tagged_header() -> None:
    """RFC 5041 section 4.2: T, L and DV, the ULP's byte, STag, TO."""
    header = ddp.TaggedHeader(0x0102, 0xC140, 0x0A0B0C0D, 0x1122334455667788)
    assert header.pack().hex() == "0102c1400a0b0c0d1122334455667788"


def test_an_untagged_header() -> None:
    """RFC 5041 section 4.3: the ULP's five bytes, QN, MSN, MO."""
    header = ddp.UntaggedHeader(0x0102, 0x4143, 0x0A0B0C0D, 0, 1, 0x10)
    assert header.pack().hex() == "010241430a0b0c0d000000000000000100000010"


WORD = st.sampled_from([0, 1, 2**31 - 1, 2**31, 2**32 - 1]) | st.integers(0, 2**32 - 1)
LONG = st.sampled_from([0, 2**32, 2**62 - 1, 2**62, 2**63, 2**64 - 1]) | st.integers(0, 2**64 - 1)
HALF = st.integers(0, 2**16 - 1)


@given(HALF, HALF, WORD, LONG, WORD)
def test_a_header_of_either_kind(length: int, control: int, stag: int, to: int, word: int) -> None:
    """As the receive side takes it, which learns from it of which kind it is."""
    tagged = ddp.TaggedHeader(length, control, stag, to).pack()
    fields = (length, control, stag, to, word)
    assert ddp.HEADER.unpack_from(b"\xff" + tagged + word.to_bytes(4, "big"), 1) == fields
    assert tagged == ddp.pack_tagged(length, control, stag, to)
    qn, msn = to >> 32, to & ddp.MASK32
    untagged = ddp.UntaggedHeader(length, control, stag, qn, msn, word).pack()
    assert ddp.HEADER.unpack_from(untagged) == fields


@given(st.binary(max_size=100), st.integers(1, 2**32 - 1))
def test_the_crc_of_bytes_with_their_crc(data: bytes, error: int) -> None:
    """It is the same for all bytes, and another one with any other CRC behind them."""
    crc = ddp.crc_of(data)
    assert ddp.crc_of(data + ddp.pack_crc(crc)) == ddp.GOOD_CRC
    assert ddp.crc_of(data + ddp.pack_crc(crc ^ error)) != ddp.GOOD_CRC


@pytest.mark.parametrize("crc", [True, False])
def test_an_encoded_fpdu_is_padded_and_ends_in_its_crc(crc: bool) -> None:
    header = ddp.TaggedHeader(14 + 5, 0xC140, 1, 2)
    data = ddp.encode_fpdu(header, b"12345", crc=crc)
    assert len(data) == ddp.fpdu_size(14 + 5)
    assert data[:16] == header.pack() and data[16:21] == b"12345"
    assert data[21:-4] == bytes(len(data) - 25)
    assert (data[-4:] != bytes(4)) is crc


@pytest.mark.parametrize(
    ("emss", "crc", "markers", "most"),
    [
        (1460, True, False, 1454),  # a segment without its length field and CRC
        (1462, True, False, 1454),  # and without the bytes that a pad could need
        (1460, True, True, 1442),  # three markers of four bytes in it
        (1460, False, True, 1442),
        (60, True, False, 128),  # RFC 5044 section 4.5: never less
        (1460, False, False, ddp.MAX_ULPDU),  # nothing ties a frame to a segment
    ],
)
def test_the_largest_ulpdu_that_is_sent(emss: int, crc: bool, markers: bool, most: int) -> None:
    assert ddp.mulpdu(emss, crc=crc, markers=markers) == most
