"""EXTENDED COPY(LID1) and RECEIVE COPY RESULTS, byte by byte as SPC-4 has them."""

from __future__ import annotations

import pytest

from iserblk.errors import RemoteProtocolError
from iserblk.scsi import third_party
from iserblk.scsi.third_party import CopyList, Cscd, Limits, Segment

LIMITS = Limits(cscds=16, segments=256, segment_length=256 << 20, concurrent=16, granularity=9)
NAA = bytes.fromhex("3123456789abcdef")

# Parameter list: LIST IDENTIFIER, LIST ID USAGE and PRIORITY, CSCD DESCRIPTOR LIST LENGTH (32),
# reserved, SEGMENT DESCRIPTOR LIST LENGTH (28), INLINE DATA LENGTH.
HEADER = bytes.fromhex("07 00 0020 00000000 0000001c 00000000")
# Identification descriptor CSCD descriptor: E4h, disk, relative initiator port identifier, code set
# binary, association LUN and type NAA, reserved, DESIGNATOR LENGTH, 20 bytes; PAD, block length.
CSCD = bytes.fromhex("e4 00 0000 01 03 00 08") + NAA + bytes(12) + bytes.fromhex("00 000200")
# Block to block: 02h, DC, DESCRIPTOR LENGTH, source, destination, reserved, number of blocks,
# source LBA, destination LBA.
SEGMENT = bytes.fromhex("02 02 0018 0000 0001 0000 1234 0102030405060708 1112131415161718")


def test_commands() -> None:
    assert third_party.extended_copy(0x4C) == bytes.fromhex("83 00 0000000000000000 0000004c 00 00")
    assert third_party.receive_copy_results(3, 7, 0x200) == bytes.fromhex(
        "84 03 07 00000000000000 00000200 00 00"
    )


def test_parameter_list() -> None:
    copy = CopyList(
        7,
        [Cscd(0xE4, designator=NAA)],
        [Segment(2, third_party.DC, 0, 1, 0x1234, 0x0102030405060708, 0x1112131415161718)],
    )
    assert third_party.encode_copy_list(copy) == HEADER + CSCD + SEGMENT
    assert third_party.decode_copy_list(HEADER + CSCD + SEGMENT) == copy
    assert third_party.decode_copy_list(bytes(16)) == CopyList(0, [], [])


def test_descriptors_of_other_types_are_told_by_their_type() -> None:
    other = bytes((0xE0,)) + CSCD[1:]
    stream = bytes.fromhex("00 00 0014") + bytes(20)
    head = bytes.fromhex("00 00 0020 00000000 00000018 00000000")
    found = third_party.decode_copy_list(head + other + stream)
    assert [each.kind for each in found.cscds] == [0xE0]
    assert [each.kind for each in found.segments] == [0x00]


@pytest.mark.parametrize(
    "raw",
    [
        HEADER[:15],
        HEADER + CSCD + SEGMENT[:-1],
        HEADER[:3] + b"\x1f" + HEADER[4:] + CSCD + SEGMENT,  # no multiple of 32 bytes
        HEADER[:12] + bytes.fromhex("00000001") + CSCD + SEGMENT,  # inline data that is not there
        HEADER + CSCD[:7] + b"\x15" + CSCD[8:] + SEGMENT,  # a designator of 21 bytes
        HEADER + CSCD + SEGMENT[:2] + b"\x00\x19" + SEGMENT[4:],  # longer than the list
        HEADER + CSCD + SEGMENT[:2] + b"\x00\x14" + SEGMENT[4:],  # too short for its type
    ],
)
def test_lists_whose_lengths_contradict_each_other(raw: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        third_party.decode_copy_list(raw)


def test_operating_parameters() -> None:
    """AVAILABLE DATA, SNLID, counts 16 and 256, the longest list 16 * 32 + 256 * 28 bytes, a
    segment of 256 MiB, no inline and held data, 16 copies at a time, granules of 2^9 bytes; the
    descriptor type codes in ascending order."""
    assert third_party.encode_operating_parameters(LIMITS) == bytes.fromhex(
        "0000002a 01000000 0010 0100 00001e00 10000000 00000000 00000000 00000000"
        "0000 0010 10 09 00 00 000000 02 02 e4"
    )


def test_copy_status() -> None:
    """Bytes of SPC-4; a count that has no room is in larger units."""
    status = third_party.CopyStatus(third_party.COMPLETED, 3, 0x12345678)
    data = third_party.encode_copy_status(status)
    assert data == bytes.fromhex("00000008 01 0003 00 12345678")
    assert third_party.decode_copy_status(data) == status
    large = third_party.CopyStatus(third_party.FAILED, 256, 64 << 30)
    data = third_party.encode_copy_status(large)
    assert data == bytes.fromhex("00000008 02 0100 01 04000000")
    assert third_party.decode_copy_status(data) == large
    with pytest.raises(RemoteProtocolError):
        third_party.decode_copy_status(data[:11])


def test_vpd_page() -> None:
    """Third-party Copy VPD page: Supported Commands, Parameter Data, Supported Descriptors, General
    Copy Operations, each padded to a multiple of 4 bytes."""
    body = bytes.fromhex(
        "0001 0008 07 830100 84020003"
        "0004 001c 00000000 0010 0100 00001e00 00000000 000000000000000000000000"
        "0008 0004 02 02e4 00"
        "8001 0020 00000010 00000010 10000000 09 00 000000000000000000000000000000000000"
    )
    page = third_party.encode_vpd(LIMITS)
    assert page == bytes((0, 0x8F)) + len(body).to_bytes(2, "big") + body
