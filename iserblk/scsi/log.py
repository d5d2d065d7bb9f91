"""LOG SENSE: CDB and log pages (SPC-4; the logical block provisioning page: SBC-3).

CDB (10)   1 bit 0 SP   2 bits 7-6 PC, bits 5-0 page code   3 subpage code   5 H PARAMETER POINTER
           7 H allocation length
page       0 bit 7 DS, bit 6 SPF, bits 5-0 page code   1 subpage code   2 H length of what follows
page 00h   page codes, one byte each; 00h/FFh: page code and subpage code of each
parameter  0 H code   2 control   3 length of what follows   4 value
page 0Ch   codes 0001h available, 0002h used: 4 I RESOURCE COUNT, in threshold sets (VPD page B2h)
           8 bits 1-0 SCOPE   9 3 bytes -
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

from iserblk.errors import RemoteProtocolError
from iserblk.scsi import opcodes

# Log pages, and their subpages.
SUPPORTED_PAGES = 0x00
LOGICAL_BLOCK_PROVISIONING = 0x0C
ALL_SUBPAGES = 0xFF

# Page control, bits 7-6 of byte 2 of the CDB.
PC_CUMULATIVE = 1

# Parameters of LOGICAL_BLOCK_PROVISIONING, and their scopes.
AVAILABLE_RESOURCE = 0x0001
USED_RESOURCE = 0x0002
SCOPE_DEDICATED = 1
SCOPE_SHARED = 2

# The parser of the device server uses this layout, too.
CDB = struct.Struct(">BBBBxHHx")
_HEADER = struct.Struct(">BBH")
_RESOURCE = struct.Struct(">HBBIB3x")
_PARAMETER = struct.Struct(">HBB")
_BINARY_LIST = 0x03  # FORMAT AND LINKING of a bounded or unbounded binary list parameter
_SPF = 0x40
_MOST = 0xFFFFFFFF


def log_sense(page: int, subpage: int = 0, pointer: int = 0, allocation: int = 512) -> bytes:
    """LOG SENSE for cumulative values."""
    return CDB.pack(opcodes.LOG_SENSE, 0, PC_CUMULATIVE << 6 | page, subpage, pointer, allocation)


def encode_supported(pages: Iterable[int]) -> bytes:
    """Page 00h."""
    codes = bytes(pages)
    return _HEADER.pack(SUPPORTED_PAGES, 0, len(codes)) + codes


def encode_supported_subpages(pages: Iterable[tuple[int, int]]) -> bytes:
    """Page 00h, subpage FFh: pairs of page code and subpage code."""
    codes = b"".join(map(bytes, pages))
    return _HEADER.pack(_SPF | SUPPORTED_PAGES, ALL_SUBPAGES, len(codes)) + codes


def encode_provisioning(resources: Iterable[tuple[int, int, int]]) -> bytes:
    """Page 0Ch: triples (parameter code, RESOURCE COUNT, SCOPE). A count that has no room is told
    as the largest that has."""
    body = b"".join(
        _RESOURCE.pack(code, _BINARY_LIST, _RESOURCE.size - 4, min(count, _MOST), scope)
        for code, count, scope in resources
    )
    return _HEADER.pack(LOGICAL_BLOCK_PROVISIONING, 0, len(body)) + body


def decode_parameters(data: bytes | memoryview) -> Iterator[tuple[int, bytes]]:
    """The parameters of a log page, as far as they are complete: (code, value). Raises
    RemoteProtocolError when the header is not complete."""
    raw = bytes(data)
    if len(raw) < _HEADER.size:
        raise RemoteProtocolError("SCSI", f"LOG SENSE answered with {len(raw)} bytes")
    _, _, length = _HEADER.unpack_from(raw)
    at, end = _HEADER.size, min(len(raw), _HEADER.size + length)
    while at + _PARAMETER.size <= end:
        code, _, size = _PARAMETER.unpack_from(raw, at)
        at += _PARAMETER.size
        if at + size > end:
            return
        yield code, raw[at : at + size]
        at += size
