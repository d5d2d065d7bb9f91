"""The 8-byte LUN field, and REPORT LUNS parameter data (SAM-5, Logical unit number; SPC-4).

    byte 0     bits 7-6 address method: 00 peripheral device, 01 flat space
    peripheral byte 0 bits 5-0 bus (0: this target's own), byte 1 LUN 0 to 255
    flat       byte 0 bits 5-0 and byte 1: LUN 0 to 16383
    bytes 2-7  further levels: zero

Other methods (logical unit, extended, well-known) and more levels count as naming no LUN.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Final

from iserblk.errors import LocalProtocolError, RemoteProtocolError

MAXIMUM: Final = 0x3FFF
NONE: Final = -1  # the field names no LUN that can exist

_PERIPHERAL_LIMIT: Final = 256
_FLAT: Final = 0x4000
_ONE_LEVEL: Final = bytes(6)
_FIELD: Final = struct.Struct(">H6x")
_REPORT_HEADER: Final = struct.Struct(">I4x")


def encode(lun: int) -> bytes:
    """The field for ``lun`` (0..16383): peripheral up to 255, flat above, as targets report it."""
    if not 0 <= lun <= MAXIMUM:
        raise LocalProtocolError(f"LUN {lun} is not between 0 and {MAXIMUM}")
    return _FIELD.pack(lun if lun < _PERIPHERAL_LIMIT else _FLAT | lun)


def decode(field: bytes | memoryview) -> int:
    """The LUN that 8 bytes name, or NONE. Never raises."""
    octets = field if isinstance(field, bytes) else bytes(field)
    if len(octets) != 8 or octets[2:] != _ONE_LEVEL:
        return NONE
    first = octets[0] << 8 | octets[1]
    if first < _PERIPHERAL_LIMIT:
        return first
    return first & MAXIMUM if first >> 14 == 1 else NONE


def encode_report_luns(luns: Iterable[int]) -> bytes:
    """REPORT LUNS parameter data: LUN LIST LENGTH, reserved, 8 bytes each."""
    fields = b"".join(map(encode, sorted(luns)))
    return _REPORT_HEADER.pack(len(fields)) + fields


def length_of_report(data: bytes | memoryview) -> int:
    """Bytes of the complete answer of which ``data`` is the beginning; at least 8."""
    if len(data) < _REPORT_HEADER.size:
        return _REPORT_HEADER.size
    (length,) = _REPORT_HEADER.unpack_from(data)
    return _REPORT_HEADER.size + int(length)


def decode_report_luns(data: bytes | memoryview) -> list[int]:
    """The LUNs in REPORT LUNS parameter data, as far as ``data`` is complete. LUNs of other address
    methods are left out. Raises RemoteProtocolError when the header is not complete."""
    if len(data) < _REPORT_HEADER.size:
        raise RemoteProtocolError("SCSI", f"REPORT LUNS answered with {len(data)} bytes")
    (length,) = _REPORT_HEADER.unpack_from(data)
    end = min(len(data), _REPORT_HEADER.size + length)
    luns = [decode(data[at : at + 8]) for at in range(_REPORT_HEADER.size, end - 7, 8)]
    return [lun for lun in luns if lun != NONE]
