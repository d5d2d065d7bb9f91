"""MODE SENSE and MODE SELECT parameter data (SPC-4; the pages of disks: SBC-3 and SBC-4).

header (6)  0 B MODE DATA LENGTH (what follows)   1 medium type   2 device-specific   3 B block
            descriptor length
header (10) 0 H MODE DATA LENGTH   2 medium type   3 device-specific   4 bit 0 LONGLBA   6 H block
            descriptor length
device-specific of a disk: bit 7 WP, bit 4 DPOFUA
block descriptor: short 4 I blocks, 4 I block length (24 bits); long Q blocks, I -, I block length
page: 0 bits 5-0 page code, bit 6 SPF, bit 7 PS; 1 B length of what follows (SPF: 1 subpage,
2 H length)
In MODE SELECT the MODE DATA LENGTH and PS are reserved, and WP and DPOFUA have no effect.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from iserblk.errors import RemoteProtocolError

# Pages.
READ_WRITE_ERROR_RECOVERY = 0x01
CACHING = 0x08
CONTROL = 0x0A
INFORMATIONAL_EXCEPTIONS = 0x1C
ALL = 0x3F
PAGE_CODE = 0x3F  # bits of byte 0

# Subpages of INFORMATIONAL_EXCEPTIONS.
LOGICAL_BLOCK_PROVISIONING = 0x02

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
_PS = 0x80
_SPF = 0x40
_WCE = 0x04
_TAS = 0x40
_LBPERE = 0x80
_DEXCPT = 0x08
_ENABLED = 0x80
_ARMED_INCREASING = 0x01
_USED_RESOURCE = 0x02
_PROVISIONING_PAGE = struct.Struct(">BBHB11x")
_THRESHOLD = struct.Struct(">BB2xI")


class Modes(NamedTuple):
    """The mode parameters of a disk that an initiator uses."""

    write_protected: bool
    write_cache: bool  # WCE
    dpofua: bool  # FUA in READ and WRITE is understood
    tells_cache: bool = True  # False: there was no WCE, and ``write_cache`` is an assumption


# For a LUN without mode parameters: it may have a write cache, so flush it; and do not use FUA.
UNKNOWN = Modes(False, True, False, False)


def decode_sense6(data: bytes | memoryview) -> Modes:
    """Decode MODE SENSE(6) data. Raises RemoteProtocolError when the header is not complete.

    Without a caching page, or when the page ends before WCE, a write cache is assumed.
    """
    if len(data) < _HEADER6.size:
        raise RemoteProtocolError("SCSI", f"MODE SENSE(6) answered with {len(data)} bytes")
    length, _, specific, descriptors = _HEADER6.unpack_from(data)
    return _decode(data[: 1 + length], _HEADER6.size + descriptors, specific)


def _decode(data: bytes | memoryview, at: int, specific: int) -> Modes:
    write_cache, tells_cache = True, False
    while at + 3 <= len(data):
        code = data[at]
        if code & 0x3F == CACHING and not code & _SPF:
            write_cache, tells_cache = bool(data[at + 2] & _WCE), True
            break
        if code & _SPF:
            if at + 4 > len(data):
                break
            at += 4 + (data[at + 2] << 8 | data[at + 3])
        else:
            at += 2 + data[at + 1]
    return Modes(bool(specific & WP), write_cache, bool(specific & DPOFUA), tells_cache)


# -- the device server's side ----------------------------------------------------------------------


def caching_page(write_cache: bool) -> bytes:
    return bytes((CACHING, 0x12, _WCE if write_cache else 0)) + bytes(17)


def control_page(tas: bool = True) -> bytes:
    """The control mode page: one task set for all I_T nexuses, commands may be reordered, fixed
    format sense data. ``tas``: tasks that another nexus aborts end with TASK ABORTED."""
    return bytes((CONTROL, 0x0A, 0x00, 0x10, 0x00, _TAS if tas else 0)) + bytes(6)


def error_recovery_page(thresholds: bool) -> bytes:
    """The read-write error recovery page: no error is hidden and nothing is retried on the
    initiator's behalf. ``thresholds``: LBPERE, a unit attention tells of a threshold that was
    reached."""
    last = _LBPERE if thresholds else 0
    return bytes((READ_WRITE_ERROR_RECOVERY, 0x0A, 0, 0, 0, 0, 0, last)) + bytes(4)


def exceptions_page() -> bytes:
    """The informational exceptions page: DEXCPT, the LUN predicts no failures."""
    return bytes((INFORMATIONAL_EXCEPTIONS, 0x0A, _DEXCPT)) + bytes(9)


def provisioning_page(threshold: int) -> bytes:
    """The logical block provisioning page (SBC-3), with one threshold descriptor: a soft threshold
    (type 0) of the used resource, armed while the use increases. ``threshold``: in threshold sets
    (VPD page B2h); 0: the descriptor is not enabled."""
    kind = (_ENABLED if threshold else 0) | _ARMED_INCREASING
    descriptor = _THRESHOLD.pack(kind, _USED_RESOURCE, threshold)
    length = _PROVISIONING_PAGE.size - 4 + len(descriptor)
    head = _PROVISIONING_PAGE.pack(
        _SPF | INFORMATIONAL_EXCEPTIONS, LOGICAL_BLOCK_PROVISIONING, length, 0
    )
    return head + descriptor


def subpage(page: bytes) -> int:
    return page[1] if page[0] & _SPF else 0


def head_length(page: bytes) -> int:
    """Bytes in front of the parameters of a page."""
    return 4 if page[0] & _SPF else 2


def is_same_page(one: bytes, other: bytes) -> bool:
    """Whether page code and subpage code agree."""
    return one[0] == other[0] and subpage(one) == subpage(other)


def changeable(page: bytes) -> bytes:
    """``page`` for PC_CHANGEABLE: a 1 for each bit that MODE SELECT may change. That is WCE, and
    nothing else."""
    head = head_length(page)
    if page[0] == CACHING:
        return page[:head] + bytes((_WCE,)) + bytes(len(page) - head - 1)
    return page[:head] + bytes(len(page) - head)


def savable(page: bytes) -> bytes:
    """``page`` with PS: its parameters can be saved."""
    return bytes((page[0] | _PS,)) + page[1:]


class Selected(NamedTuple):
    """What a MODE SELECT parameter list asks for. ``blocks``, ``block_size``: of the block
    descriptor, None without one. ``pages``: (offset in the list, page), PS cleared."""

    blocks: int | None
    block_size: int | None
    pages: list[tuple[int, bytes]]


def decode_select(data: bytes | memoryview, long_header: bool) -> Selected:
    """Decode the parameter list of MODE SELECT(6), with ``long_header`` of MODE SELECT(10). Raises
    RemoteProtocolError for a list that is cut short, or whose lengths contradict each other; the
    device server answers that with PARAMETER LIST LENGTH ERROR."""
    raw = bytes(data)
    header = _HEADER10 if long_header else _HEADER6
    if len(raw) < header.size:
        raise RemoteProtocolError("SCSI", f"MODE SELECT with {len(raw)} bytes")
    if long_header:
        _, _, _, long_lba, length = _HEADER10.unpack_from(raw)
    else:
        long_lba, length = 0, raw[3]
    descriptor = _LONG_DESCRIPTOR if long_lba & _LONGLBA else _SHORT_DESCRIPTOR
    at = header.size + length
    if length not in (0, descriptor.size) or len(raw) < at:
        raise RemoteProtocolError("SCSI", f"MODE SELECT with {length} bytes of block descriptors")
    blocks = block_size = None
    if length:
        blocks, block_size = descriptor.unpack_from(raw, header.size)
        if descriptor is _SHORT_DESCRIPTOR:
            block_size &= 0xFFFFFF  # byte 4 is the density code
    pages = []
    while at < len(raw):
        head = 4 if raw[at] & _SPF else 2
        if at + head > len(raw):
            raise RemoteProtocolError("SCSI", "MODE SELECT ends within the head of a page")
        end = at + head + int.from_bytes(raw[at + head // 2 : at + head], "big")
        if end > len(raw):
            raise RemoteProtocolError("SCSI", "MODE SELECT ends within a page")
        pages.append((at, bytes((raw[at] & (_SPF | PAGE_CODE),)) + raw[at + 1 : end]))
        at = end
    return Selected(blocks, block_size, pages)


def has_write_cache(page: bytes) -> bool:
    """WCE of a caching page."""
    return bool(page[2] & _WCE)


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
