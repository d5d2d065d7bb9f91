"""MODE SENSE parameter data (SPC-4; the caching page and the disk's own bits: SBC-4).

header (6)  0 B MODE DATA LENGTH (what follows)   1 medium type   2 device-specific   3 B block
            descriptor length
header (10) 0 H MODE DATA LENGTH   2 medium type   3 device-specific   4 bit 0 LONGLBA   6 H block
            descriptor length
device-specific of a disk: bit 7 WP, bit 4 DPOFUA
block descriptor: short 4 I blocks, 4 I block length (24 bits); long Q blocks, I -, I block length
page: 0 bits 5-0 page code, bit 6 SPF; 1 B length of what follows (SPF: 1 subpage, 2 H length)
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from iserblk.errors import RemoteProtocolError

# Pages.
CACHING = 0x08
CONTROL = 0x0A
ALL = 0x3F

# Page control, bits 7-6 of byte 2 of the CDB.
PC_CURRENT = 0
PC_CHANGEABLE = 1
PC_DEFAULT = 2
PC_SAVED = 3

WP = 0x80
DPOFUA = 0x10

_HEADER6 = struct.Struct(">BBBB")
_HEADER10 = struct.Struct(">HBBBxH")
_LONGLBA = 0x01
_SHORT_DESCRIPTOR = struct.Struct(">II")
_LONG_DESCRIPTOR = struct.Struct(">Q4xI")
_SPF = 0x40
_WCE = 0x04
_TAS = 0x40


class Modes(NamedTuple):
    """The mode parameters of a disk that an initiator uses."""

    write_protected: bool
    write_cache: bool  # WCE
    dpofua: bool  # FUA in READ and WRITE is understood


# For a LUN without mode parameters: it may have a write cache, so flush it; and do not use FUA.
UNKNOWN = Modes(False, True, False)


def decode_sense6(data: bytes | memoryview) -> Modes:
    """Decode MODE SENSE(6) data. Raises RemoteProtocolError when the header is not complete.

    Without a caching page, or when the page ends before WCE, a write cache is assumed.
    """
    if len(data) < _HEADER6.size:
        raise RemoteProtocolError("SCSI", f"MODE SENSE(6) answered with {len(data)} bytes")
    length, _, specific, descriptors = _HEADER6.unpack_from(data)
    return _decode(data[: 1 + length], _HEADER6.size + descriptors, specific)


def _decode(data: bytes | memoryview, at: int, specific: int) -> Modes:
    write_cache = True
    while at + 3 <= len(data):
        code = data[at]
        if code & 0x3F == CACHING and not code & _SPF:
            write_cache = bool(data[at + 2] & _WCE)
            break
        if code & _SPF:
            if at + 4 > len(data):
                break
            at += 4 + (data[at + 2] << 8 | data[at + 3])
        else:
            at += 2 + data[at + 1]
    return Modes(bool(specific & WP), write_cache, bool(specific & DPOFUA))


# -- the device server's side ----------------------------------------------------------------------


def caching_page(write_cache: bool) -> bytes:
    return bytes((CACHING, 0x12, _WCE if write_cache else 0)) + bytes(17)


def control_page() -> bytes:
    """The control mode page: one task set for all I_T nexuses, commands may be reordered, fixed
    format sense data, and TAS: tasks that another nexus aborted end with TASK ABORTED."""
    return bytes((CONTROL, 0x0A, 0x00, 0x10, 0x00, _TAS)) + bytes(6)


def changeable(page: bytes) -> bytes:
    """``page`` for PC_CHANGEABLE: as there is no MODE SELECT, no bit can be changed."""
    return page[:2] + bytes(len(page) - 2)


def short_descriptor(blocks: int, block_size: int) -> bytes:
    return _SHORT_DESCRIPTOR.pack(min(blocks, 0xFFFFFFFF), block_size)


def long_descriptor(blocks: int, block_size: int) -> bytes:
    return _LONG_DESCRIPTOR.pack(blocks, block_size)


def encode_sense6(specific: int, descriptor: bytes, pages: bytes) -> bytes:
    length = _HEADER6.size - 1 + len(descriptor) + len(pages)
    return _HEADER6.pack(length, 0, specific, len(descriptor)) + descriptor + pages


def encode_sense10(specific: int, descriptor: bytes, pages: bytes) -> bytes:
    length = _HEADER10.size - 2 + len(descriptor) + len(pages)
    long_lba = _LONGLBA if len(descriptor) == _LONG_DESCRIPTOR.size else 0
    header = _HEADER10.pack(length, 0, specific, long_lba, len(descriptor))
    return header + descriptor + pages
