"""Segments of a PDU, the serial arithmetic, and the layouts of the hot path."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iserblk.errors import RemoteProtocolError
from iserblk.iscsi import bhs, pdu
from iserblk.iscsi.serial import serial_lt

MASK = 0xFFFFFFFF


def message(data: bytes = b"", ahs: bytes = b"", length: int | None = None) -> bytes:
    """A SCSI Command with these segments; ``length``: what DataSegmentLength says instead."""
    header = bytearray(bhs.BHS_LENGTH)
    header[0] = bhs.SCSI_COMMAND
    lengths = len(ahs) // 4 << 24 | (len(data) if length is None else length)
    bhs.LENGTHS.pack_into(header, bhs.LENGTHS_OFFSET, lengths)
    return bytes(header) + ahs + data


def at(whole: bytes) -> memoryview:
    return memoryview(whole)


@pytest.mark.parametrize("size", [0, 1, 3, 4, 5, 511, 8192])
@pytest.mark.parametrize("trailing", [0, 1, 3, 100])
@pytest.mark.parametrize("offset", [0, 28])
def test_data_segment(size: int, trailing: int, offset: int) -> None:
    """DataSegmentLength bounds it, at any place of the BHS and with any bytes behind it."""
    data = bytes(i & 255 for i in range(size))
    whole = bytes(offset) + message(data) + b"\xee" * trailing
    assert bhs.data_segment_untrusted(at(whole), offset) == data


def test_data_segment_is_behind_the_ahs() -> None:
    ahs = bytes.fromhex("0005020000001000")
    assert bhs.data_segment_untrusted(at(message(b"data", ahs))) == b"data"  # type: ignore[comparison-overlap]


@pytest.mark.parametrize("cut", range(1, 57))
def test_cut_anywhere(cut: int) -> None:
    """A PDU that ends before its segments do is refused at every byte."""
    whole = message(b"data", bytes.fromhex("00020100"))
    with pytest.raises(RemoteProtocolError):
        bhs.data_segment_untrusted(at(whole[:-cut]))


@pytest.mark.parametrize(
    ("ahs", "cdb"),
    [
        ("", ""),
        ("00020100aa000000", "aa"),  # 3 bytes of padding
        ("0005010011223344", "11223344"),
        ("0005020000001000", ""),  # bidirectional read length: not a CDB
        ("00050200000010000005010055667788", "55667788"),
        ("0005410011223344", "11223344"),  # reserved bits of AHSType
    ],
)
def test_extended_cdb(ahs: str, cdb: str) -> None:
    whole = message(b"data", bytes.fromhex(ahs))
    assert bhs.extended_cdb_untrusted(at(whole)) == bytes.fromhex(cdb)


@pytest.mark.parametrize(
    ("ahs", "length"),
    [
        ("", 0),
        ("0005020000001000", 4096),
        ("00050200ffffffff", 0xFFFFFFFF),
        ("00050100556677880005020000000001", 1),  # behind an Extended CDB
        ("0005420000001000", 4096),  # reserved bits of AHSType
        ("0005010011223344", 0),
        ("0005030011223344", 0),  # a reserved AHSType
    ],
)
def test_bidirectional_read_length(ahs: str, length: int) -> None:
    """RFC 7143 section 11.2.2.4: AHSLength 5, AHSType 2, a reserved byte, the length."""
    whole = message(b"data", bytes.fromhex(ahs))
    assert bhs.bidirectional_read_length_untrusted(at(whole)) == length
    if length and len(ahs) == 16 and ahs[4:6] == "02":
        packed = memoryview(bytearray(9))
        assert bhs.pack_bidirectional_read_length(packed, length) == 8
        assert bytes(packed) == bytes.fromhex(ahs) + b"\0"


@pytest.mark.parametrize("ahs", ["00010200", "0004020000001000", "000902000000100000000000"])
def test_a_bidirectional_read_length_of_another_size(ahs: str) -> None:
    with pytest.raises(RemoteProtocolError):
        bhs.bidirectional_read_length_untrusted(at(message(ahs=bytes.fromhex(ahs))))


@pytest.mark.parametrize("ahs", ["00000100", "00020100", "ffff0100", "000501001122334400ff0200"])
def test_bad_ahs(ahs: str) -> None:
    with pytest.raises(RemoteProtocolError):
        bhs.extended_cdb_untrusted(at(message(ahs=bytes.fromhex(ahs))))


@pytest.mark.parametrize(
    ("data", "sense"),
    [
        (b"", b""),
        (b"\0", b""),
        (b"\0\0", b""),
        (b"\0\3abc", b"abc"),
        (b"\0\3abcrest of the response data", b"abc"),
        (b"\xff\xffabc", b"abc"),
    ],
)
def test_sense(data: bytes, sense: bytes) -> None:
    assert bhs.sense_of_untrusted(at(message(data))) == sense


def test_sense_data_is_no_longer_than_it_can_be() -> None:
    """Each task keeps it: a target does not make that 64 KiB each."""
    data = (0xFFFF).to_bytes(2, "big") + bytes(0xFFFF)
    assert len(bhs.sense_of_untrusted(at(message(data)))) == bhs.MOST_SENSE


@given(st.binary(max_size=200), st.integers(0, 60))
def test_any_bytes(data: bytes, offset: int) -> None:
    """No decoder raises anything but RemoteProtocolError, for any bytes at any place."""
    view = memoryview(data)
    for decode in (
        bhs.data_segment_untrusted,
        bhs.sense_of_untrusted,
        bhs.extended_cdb_untrusted,
        bhs.additional_headers_untrusted,
    ):
        with contextlib.suppress(RemoteProtocolError):
            assert len(decode(view, offset)) <= len(data)
    with contextlib.suppress(RemoteProtocolError):
        assert 0 <= bhs.bidirectional_read_length_untrusted(view, offset) < 1 << 32
    for kind in (*pdu.BY_OPCODE.values(), pdu.TargetHeader):
        with contextlib.suppress(RemoteProtocolError):
            assert len(kind.unpack_from(view, offset).pack()) == bhs.BHS_LENGTH  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("a", "b", "before"),
    [
        (0, 0, False),
        (0, 1, True),
        (1, 0, False),
        (MASK, 0, True),
        (0, MASK, False),
        (MASK - 5, 5, True),
        (0, 0x7FFFFFFF, True),
        (0, 0x80000000, False),  # RFC 1982 leaves this pair undefined: no order either way
        (0x80000000, 0, False),
        (0, 0x80000001, False),
    ],
)
def test_serial_lt(a: int, b: int, before: bool) -> None:
    assert serial_lt(a, b) is before


@given(st.integers(0, MASK), st.integers(1, 0x7FFFFFFF))
def test_serial_lt_everywhere(start: int, distance: int) -> None:
    end = (start + distance) & MASK
    assert serial_lt(start, end)
    assert not serial_lt(end, start)


WORD = st.integers(0, MASK)
BYTE = st.integers(0, 255)


@given(BYTE, BYTE, st.binary(min_size=8, max_size=8), WORD, WORD, WORD, WORD)
def test_hot_command_is_the_command(
    opcode: int, flags: int, lun: bytes, itt: int, edtl: int, cmd_sn: int, exp_stat_sn: int
) -> None:
    """What the hot path writes is what the codec reads, and what the target's hot path reads."""
    raw = bytearray(bhs.BHS_LENGTH)
    cdb = bytearray(range(16))
    bhs.SCSI_COMMAND_FIELDS.pack_into(
        raw, 0, opcode, flags, 512, lun, itt, edtl, cmd_sn, exp_stat_sn, cdb
    )
    command = pdu.ScsiCommand.unpack_from(raw)
    assert command == pdu.ScsiCommand(
        opcode=opcode,
        flags=flags,
        data_length=512,
        lun=lun,
        itt=itt,
        edtl=edtl,
        cmd_sn=cmd_sn,
        exp_stat_sn=exp_stat_sn,
        cdb=bytes(range(16)),
    )
    fields = (opcode, flags, 512, lun, itt, edtl, cmd_sn, exp_stat_sn, command.cdb)
    assert bhs.SCSI_COMMAND_FIELDS.unpack_from(raw) == fields
    assert bhs.ITT.unpack_from(raw, bhs.ITT_OFFSET) == (itt,)
    assert bhs.CMD_SN_EXP_STAT_SN.unpack_from(raw, bhs.CMD_SN_OFFSET) == (cmd_sn, exp_stat_sn)


@given(BYTE, BYTE, BYTE, WORD, WORD, WORD, WORD, WORD)
def test_hot_response_is_the_response(
    flags: int,
    response: int,
    status: int,
    itt: int,
    stat_sn: int,
    exp_cmd_sn: int,
    max_cmd_sn: int,
    residual: int,
) -> None:
    opcode = bhs.SCSI_RESPONSE
    whole = pdu.ScsiResponse(
        flags=flags,
        response=response,
        status=status,
        data_length=20,
        itt=itt,
        snack_tag=1,
        stat_sn=stat_sn,
        exp_cmd_sn=exp_cmd_sn,
        max_cmd_sn=max_cmd_sn,
        exp_data_sn=2,
        bidi_residual=3,
        residual=residual,
    )
    numbers = (stat_sn, exp_cmd_sn, max_cmd_sn)
    word = int.from_bytes((opcode, flags, response, status), "big")
    fields = (word, 20, itt, *numbers, residual)
    assert bhs.SCSI_RESPONSE_FIELDS.unpack_from(whole.pack()) == fields
    raw = bytearray(b"\xff" * bhs.BHS_LENGTH)
    bhs.SCSI_RESPONSE_FIELDS.pack_into(raw, 0, *fields)
    assert raw == replace(whole, snack_tag=0, exp_data_sn=0, bidi_residual=0).pack()
