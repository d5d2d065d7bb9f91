"""EXTENDED COPY(LID1) and RECEIVE COPY RESULTS (SPC-4, Third-party copy).

EXTENDED COPY CDB (16)   1 bits 4-0 service action 00h   10 I parameter list length
RECEIVE COPY RESULTS (16)   1 bits 4-0 service action   2 LIST IDENTIFIER   10 I allocation length
parameter list
    0 LIST IDENTIFIER   1 bits 4-3 LIST ID USAGE, bits 2-0 PRIORITY   2 H CSCD DESCRIPTOR LIST
    LENGTH   8 I SEGMENT DESCRIPTOR LIST LENGTH   12 I INLINE DATA LENGTH   16 the three
CSCD descriptor E4h, 32 bytes (CSCD: copy source and copy destination)
    0 E4h   1 bits 4-0 device type   4 bits 3-0 code set   5 bits 5-4 association, bits 3-0
    designator type   7 DESIGNATOR LENGTH   8 designator (20 bytes)   29 3 bytes block length
segment descriptor 02h (block device to block device), 28 bytes
    0 02h   1 bit 1 DC, bit 0 CAT   2 H length of what follows (24)   4 H source   6 H destination,
    both an index of CSCD descriptors   10 H BLOCK DEVICE NUMBER OF BLOCKS, of the destination's
    size with DC, else of the source's   12 Q source LBA   20 Q destination LBA
COPY STATUS
    0 I AVAILABLE DATA (8)   4 bit 7 HDD, bits 6-0 COPY MANAGER STATUS   5 H SEGMENTS PROCESSED
    7 TRANSFER COUNT UNITS (n: 1024 to the power of n bytes)   8 I TRANSFER COUNT
OPERATING PARAMETERS
    0 I AVAILABLE DATA (what follows)   4 bit 0 SNLID   8 H, 10 H most CSCD and segment descriptors
    12 I longest descriptor list   16 I longest segment   20 I longest inline data   24 I HELD DATA
    LIMIT   28 I stream transfer   34 H TOTAL CONCURRENT COPIES   36 MAXIMUM CONCURRENT COPIES
    37 DATA SEGMENT GRANULARITY (log2)   38, 39 granularities   43 number of descriptor type codes
    44 the codes
VPD page 8Fh
    third-party copy descriptors of H type, H length of what follows, in multiples of 4 bytes
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from iserblk.errors import RemoteProtocolError
from iserblk.scsi import inquiry, opcodes

# Service actions.
EXTENDED_COPY_LID1 = 0x00
COPY_STATUS = 0x00  # of RECEIVE COPY RESULTS, as the next
OPERATING_PARAMETERS = 0x03

# LIST ID USAGE, and COPY MANAGER STATUS.
NO_LIST_ID = 3
IN_PROGRESS = 0
COMPLETED = 1
FAILED = 2

# Descriptor type codes.
BLOCK_TO_BLOCK = 0x02
IDENTIFICATION = 0xE4

DC = 0x02

HEADER_LENGTH = 16
CSCD_LENGTH = 32
MAXIMUM_DESIGNATOR = 20
SEGMENT_LENGTH = 28

VPD_PAGE = 0x8F

# The parser of the device server uses these layouts, too.
COPY_CDB = struct.Struct(">BB8xI2x")
RESULTS_CDB = struct.Struct(">BBB7xI2x")
_HEADER = struct.Struct(">BBH4xII")
_CSCD = struct.Struct(">BB2xBBxB20sxBH")
_SEGMENT = struct.Struct(">BBHHH2xHQQ")
_OPERATING = struct.Struct(">IB3xHHIIIII2xHBBBB3xB")
_STATUS = struct.Struct(">IBHBI")
_COMMANDS = 0x0001
_PARAMETER_DATA = 0x0004
_DESCRIPTORS = 0x0008
_GENERAL = 0x8001
_PARAMETERS = struct.Struct(">4xHHII12x")
_OPERATIONS = struct.Struct(">IIIBB18x")


class Cscd(NamedTuple):
    """A CSCD descriptor. ``kind`` is its type code; the others have a meaning for E4h only."""

    kind: int
    association: int = inquiry.ASSOCIATION_LUN
    designator_type: int = inquiry.TYPE_NAA
    code_set: int = inquiry.BINARY
    designator: bytes = b""
    block: int = 512


class Segment(NamedTuple):
    """A segment descriptor. ``kind`` is its type code; the others have a meaning for 02h only."""

    kind: int
    flags: int = 0
    source: int = 0  # index of its CSCD descriptor
    destination: int = 0
    blocks: int = 0
    source_lba: int = 0
    destination_lba: int = 0


class CopyList(NamedTuple):
    """The parameter list of EXTENDED COPY(LID1). ``inline``: bytes of inline data. ``usage``: LIST
    ID USAGE."""

    list_id: int
    cscds: list[Cscd]
    segments: list[Segment]
    inline: int = 0
    usage: int = 0


class CopyStatus(NamedTuple):
    """What COPY STATUS tells of a copy. ``state``: COPY MANAGER STATUS. ``segments``: that were
    processed. ``transferred``: bytes; decoded, they may be rounded down."""

    state: int
    segments: int = 0
    transferred: int = 0


class Limits(NamedTuple):
    """What a copy manager can do. Lengths are bytes; ``granularity`` is a log2."""

    cscds: int
    segments: int
    segment_length: int
    concurrent: int
    granularity: int

    @property
    def descriptors_length(self) -> int:
        return self.cscds * CSCD_LENGTH + self.segments * SEGMENT_LENGTH


def extended_copy(length: int) -> bytes:
    """EXTENDED COPY(LID1). ``length``: bytes of the parameter list, which is the Data-Out."""
    return COPY_CDB.pack(opcodes.EXTENDED_COPY, EXTENDED_COPY_LID1, length)


def receive_copy_results(action: int, list_id: int = 0, allocation: int = 512) -> bytes:
    return RESULTS_CDB.pack(opcodes.RECEIVE_COPY_RESULTS, action, list_id, allocation)


def encode_copy_list(copy: CopyList) -> bytes:
    """The parameter list, of descriptors E4h and 02h, without inline data."""
    cscds = b"".join(
        _CSCD.pack(
            each.kind,
            0,
            each.code_set,
            each.association << 4 | each.designator_type,
            len(each.designator),
            each.designator,
            each.block >> 16,
            each.block & 0xFFFF,
        )
        for each in copy.cscds
    )
    segments = b"".join(
        _SEGMENT.pack(each.kind, each.flags, SEGMENT_LENGTH - 4, *each[2:])
        for each in copy.segments
    )
    return (
        _HEADER.pack(copy.list_id, copy.usage << 3, len(cscds), len(segments), 0) + cscds + segments
    )


def decode_copy_list(data: bytes | memoryview) -> CopyList:
    """Decode the parameter list. Raises RemoteProtocolError for lengths that contradict each other;
    the device server answers that with PARAMETER LIST LENGTH ERROR."""
    raw = bytes(data)
    if len(raw) < HEADER_LENGTH:
        raise RemoteProtocolError("SCSI", f"EXTENDED COPY with {len(raw)} bytes")
    list_id, flags, cscd_length, segment_length, inline = _HEADER.unpack_from(raw)
    end = HEADER_LENGTH + cscd_length + segment_length
    if cscd_length % CSCD_LENGTH or end + inline > len(raw):
        raise RemoteProtocolError("SCSI", f"EXTENDED COPY lists {end + inline} of {len(raw)} bytes")
    cscds = [
        _cscd(raw, at) for at in range(HEADER_LENGTH, HEADER_LENGTH + cscd_length, CSCD_LENGTH)
    ]
    segments = _segments(raw[HEADER_LENGTH + cscd_length : end])
    return CopyList(list_id, cscds, segments, inline, flags >> 3 & 3)


def _cscd(raw: bytes, at: int) -> Cscd:
    if raw[at] != IDENTIFICATION:
        return Cscd(raw[at])
    kind, _, code_set, naming, length, designator, high, low = _CSCD.unpack_from(raw, at)
    if length > MAXIMUM_DESIGNATOR:
        raise RemoteProtocolError("SCSI", f"a designator of {length} bytes in a CSCD descriptor")
    return Cscd(
        kind,
        naming >> 4 & 3,
        naming & 0x0F,
        code_set & 0x0F,
        designator[:length],
        high << 16 | low,
    )


def _segments(raw: bytes) -> list[Segment]:
    found = []
    at = 0
    while at < len(raw):
        if at + 4 > len(raw):
            raise RemoteProtocolError("SCSI", "a segment descriptor that is cut off")
        end = at + 4 + int.from_bytes(raw[at + 2 : at + 4], "big")
        if end > len(raw):
            raise RemoteProtocolError("SCSI", "a segment descriptor that is cut off")
        if raw[at] != BLOCK_TO_BLOCK:
            found.append(Segment(raw[at]))
        elif end - at != SEGMENT_LENGTH:
            raise RemoteProtocolError("SCSI", f"a segment descriptor 02h of {end - at} bytes")
        else:
            kind, flags, _, *rest = _SEGMENT.unpack_from(raw, at)
            found.append(Segment(kind, flags, *rest))
        at = end
    return found


def encode_copy_status(status: CopyStatus) -> bytes:
    """The data of RECEIVE COPY RESULTS for COPY STATUS. Large counts are rounded down."""
    units, count = 0, status.transferred
    while count >> 32:
        units, count = units + 1, count >> 10
    return _STATUS.pack(_STATUS.size - 4, status.state, status.segments, units, count)


def decode_copy_status(data: bytes | memoryview) -> CopyStatus:
    """Raises RemoteProtocolError when it is cut short."""
    if len(data) < _STATUS.size:
        raise RemoteProtocolError("SCSI", f"COPY STATUS of {len(data)} bytes")
    _, state, segments, units, count = _STATUS.unpack_from(data)
    return CopyStatus(state & 0x7F, segments, count << 10 * min(units, 8))


def encode_operating_parameters(limits: Limits) -> bytes:
    """The data of RECEIVE COPY RESULTS for OPERATING PARAMETERS: a copy manager of the descriptors
    02h and E4h, without inline and held data."""
    codes = bytes((BLOCK_TO_BLOCK, IDENTIFICATION))
    return (
        _OPERATING.pack(
            _OPERATING.size - 4 + len(codes),
            1,  # SNLID: a list may go without an identifier
            limits.cscds,
            limits.segments,
            limits.descriptors_length,
            limits.segment_length,
            0,
            0,
            0,
            limits.concurrent,
            min(limits.concurrent, 0xFF),
            limits.granularity,
            0,
            0,
            len(codes),
        )
        + codes
    )


def encode_vpd(limits: Limits) -> bytes:
    """VPD page 8Fh of the same copy manager."""
    commands = bytes(
        (
            *(opcodes.EXTENDED_COPY, 1, EXTENDED_COPY_LID1),
            *(opcodes.RECEIVE_COPY_RESULTS, 2, COPY_STATUS, OPERATING_PARAMETERS),
        )
    )
    codes = bytes((BLOCK_TO_BLOCK, IDENTIFICATION))
    parts: Sequence[tuple[int, bytes]] = (
        (_COMMANDS, bytes((len(commands),)) + commands),
        (
            _PARAMETER_DATA,
            _PARAMETERS.pack(limits.cscds, limits.segments, limits.descriptors_length, 0),
        ),
        (_DESCRIPTORS, bytes((len(codes),)) + codes),
        (
            _GENERAL,
            _OPERATIONS.pack(
                limits.concurrent,
                limits.concurrent,
                limits.segment_length,
                limits.granularity,
                0,
            ),
        ),
    )
    body = b""
    for kind, content in parts:
        padded = content + bytes(-len(content) % 4)
        body += struct.pack(">HH", kind, len(padded)) + padded
    return inquiry.encode_page(VPD_PAGE, body)
