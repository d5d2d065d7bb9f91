"""DDP and RDMAP codecs: example FPDUs, Terminates in both bit orders, any bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iserblk.errors import RemoteProtocolError
from iserblk.rcap.iwarp import ddp, rdmap
from tests.rcap.fpdu import decode_fpdu

EXAMPLES = {
    "Hello, 12 bytes, IRD 4": (
        "001e4145 00000000 00000000 00000001 00000000 20110004 0000000000000000 f880f8da"
    ),
    "Hello, 28 bytes, IRD 4": (
        "002e4145 00000000 00000000 00000001 00000000 20aa0004" + "00" * 24 + "03f3f5fa"
    ),
    "HelloReply, 28 bytes, ORD 4": (
        "002e4145 00000000 00000000 00000001 00000000 30aa0004" + "00" * 24 + "291a16ff"
    ),
    "RDMA Write": "0012c140 11223344 0000000000001000 aaaaaaaa 816cc970",
    "RDMA Read Request": (
        "002e4141 00000000 00000001 00000001 00000000 00000055 0000000000000000 00000200"
        "11223344 0000000000002000 8b171144"
    ),
    "RDMA Read Response": "0012c142 00000055 0000000000000000 bbbbbbbb d6ff13fb",
    "RTR Write": "000ec140 00000001 0000000000000000 ebd34c5f",
    "RTR Read Request": (
        "002e4141 00000000 00000001 00000001 00000000 00000001 0000000000000000 00000000"
        "00000001 0000000000000000 27dbd7e7"
    ),
    "RTR Read Response": "000ec142 00000001 0000000000000000 21a3e83e",
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_decode_and_encode_again(name: str) -> None:
    data = bytes.fromhex(EXAMPLES[name])
    decoded = decode_fpdu(data, crc=True)
    assert decoded is not None
    frame, size = decoded
    assert size == len(data)
    assert frame.header.length == int.from_bytes(data[:2], "big")
    assert ddp.encode_fpdu(frame.header, frame.payload, crc=True) == data


def test_fields_of_a_read_request() -> None:
    decoded = decode_fpdu(bytes.fromhex(EXAMPLES["RDMA Read Request"]), crc=True)
    assert decoded is not None
    assert decoded[0].header == ddp.UntaggedHeader(46, 0x4141, 0, 1, 1, 0)
    request = rdmap.ReadRequest.unpack_untrusted(decoded[0].payload)
    assert request == (0x55, 0, 0x200, 0x11223344, 0x2000)


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_cut_is_incomplete_and_every_flipped_bit_refused(name: str) -> None:
    data = bytes.fromhex(EXAMPLES[name])
    for end in range(len(data)):
        assert decode_fpdu(data[:end], crc=True) is None
    for bit in range(16, 8 * len(data)):  # not in the length: that may ask for more bytes
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(RemoteProtocolError):
            decode_fpdu(bytes(flipped) + bytes(8), crc=True)


@given(data=st.binary(max_size=200), crc=st.booleans())
def test_any_bytes_as_an_fpdu(data: bytes, crc: bool) -> None:
    try:
        decoded = decode_fpdu(data, crc=crc)
    except RemoteProtocolError:
        return
    if decoded is not None:
        frame, size = decoded
        again = ddp.encode_fpdu(frame.header, frame.payload, crc=crc)
        assert again[:-4] == data[: size - 4]


@given(data=st.binary(max_size=60))
def test_any_bytes_as_a_terminate_or_read_request(data: bytes) -> None:
    try:
        terminate = rdmap.Terminate.unpack_untrusted(data)
        assert terminate.pack() == data
        assert terminate.words()
    except RemoteProtocolError:
        assert len(data) < 4
    try:
        assert rdmap.ReadRequest.unpack_untrusted(data).pack() == data
    except RemoteProtocolError:
        assert len(data) != 28


@pytest.mark.parametrize(
    ("control", "expected", "swapped"),
    [
        # As siw sends them: error type before layer, header bits from below.
        ("02020000", (2, 0, 2), True),
        ("21030300", (1, 2, 3), True),
        ("21010300", (1, 2, 1), True),
        ("21060300", (1, 2, 6), True),
        ("20050300", (0, 2, 5), True),
        ("11000300", (1, 1, 0), True),
        ("10000700", (0, 1, 0), True),
        ("20090300", (0, 2, 9), True),
        # As RFC 5040 has them.
        ("2002 0000", (2, 0, 2), False),
        ("1203 c000", (1, 2, 3), False),
        ("0205 c000", (0, 2, 5), False),
        ("1100 c000", (1, 1, 0), False),
        ("0100 e000", (0, 1, 0), False),
        ("0205 0000", (0, 2, 5), False),
        # Neither reading is defined: RFC 5040's.
        ("7711 0000", (7, 7, 0x11), False),
    ],
)
def test_terminate_in_both_bit_orders(
    control: str, expected: tuple[int, int, int], swapped: bool
) -> None:
    data = bytes.fromhex(control)
    terminate = rdmap.Terminate.unpack_untrusted(data + b"rest")
    assert terminate[:3] == expected
    assert terminate.swapped is swapped
    assert terminate.rest == b"rest"
    assert terminate.pack() == data + b"rest"


def test_words_for_every_code() -> None:
    for layer in range(16):
        for etype in range(16):
            for code in (*range(10), 255):
                assert rdmap.terminate_words(layer, etype, code)
    assert rdmap.terminate_words(2, 0, 7) == "MPA: no matching RTR option"
    assert rdmap.terminate_words(0, 0, 77) == "RDMAP: local catastrophic error"
    assert rdmap.terminate_words(5, 1, 2) == "layer 5: error type 1, code 2"


HEADER = bytes(range(14))


@pytest.mark.parametrize(
    ("code", "request_copy", "expected"),
    [
        # RFC 5040 figure 10: what each layer and error type copies.
        (ddp.MPA_CRC, b"", "20020000"),
        (ddp.INVALID_STAG, b"", "1100c000 0063" + HEADER.hex()),
        (rdmap.UNEXPECTED_OPCODE, bytes(28), "0206c000 0063" + HEADER.hex()),
        (rdmap.INVALID_STAG, bytes(28), "0100e000 0063" + HEADER.hex() + "00" * 28),
        (rdmap.CANNOT_INVALIDATE, b"", "0109c000 0063" + HEADER.hex()),
    ],
)
def test_what_a_terminate_copies(
    code: tuple[int, int, int], request_copy: bytes, expected: str
) -> None:
    assert rdmap.terminate_for(code, HEADER, 0x63, request_copy) == bytes.fromhex(expected)


def test_terminate_without_a_segment_to_blame() -> None:
    assert rdmap.terminate_for(ddp.MPA_RTR) == bytes.fromhex("20070000")
