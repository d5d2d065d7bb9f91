"""The parts of a PDU that are found by length: AHS, data segment, sense data; all untrusted.

    0   BHS, 48 bytes; byte 4 TotalAHSLength in words of 4 bytes, bytes 5-7 DataSegmentLength
    48  AHS: length 2 | type 1 | specific ..., each padded to 4 bytes
        data segment, padded to 4 bytes on the wire; the padding may be missing, and is not counted

``at`` is where the BHS starts in ``message``. RFC 7143 sections 11.2.1, 11.2.2, 11.4.7.
"""

from __future__ import annotations

import struct

from iserblk.errors import RemoteProtocolError
from iserblk.iscsi.pdu.constants import AHS_EXTENDED_CDB, AHS_TYPE_MASK, BHS_LENGTH

Buffer = bytes | bytearray | memoryview

LENGTHS = struct.Struct(">I")  # TotalAHSLength << 24 | DataSegmentLength
LENGTHS_OFFSET = 4
DATA_LENGTH_MASK = 0xFFFFFF
MAX_DATA_LENGTH = DATA_LENGTH_MASK

_SENSE_LENGTH = struct.Struct(">H")
_AHS_HEADER = struct.Struct(">HB")
_CDB_IN_BHS = 16


def check_bhs_untrusted(message: Buffer, at: int) -> None:
    """A whole BHS is there. Raises RemoteProtocolError."""
    if len(message) - at < BHS_LENGTH:
        raise RemoteProtocolError("iSCSI", f"PDU of {max(0, len(message) - at)} bytes")


def padding(length: int) -> int:
    """Bytes of padding behind a segment of ``length`` bytes."""
    return -length & 3


def data_segment_untrusted(message: Buffer, at: int = 0) -> memoryview:
    """The data segment, without padding; it shares ``message``'s memory and life.

    Raises RemoteProtocolError when it is longer than the message.
    """
    check_bhs_untrusted(message, at)
    (lengths,) = LENGTHS.unpack_from(message, at + LENGTHS_OFFSET)
    start = at + BHS_LENGTH + (lengths >> 24) * 4
    end = start + (lengths & DATA_LENGTH_MASK)
    if end > len(message):
        raise RemoteProtocolError(
            "iSCSI", f"PDU declares {end - at} bytes, but has {len(message) - at}"
        )
    return memoryview(message)[start:end]


def ahs_untrusted(message: Buffer, at: int = 0) -> list[tuple[int, bytes]]:
    """The Additional Header Segments as (AHSType, AHS-Specific bytes without padding)."""
    check_bhs_untrusted(message, at)
    position = at + BHS_LENGTH
    end = position + message[at + LENGTHS_OFFSET] * 4
    if end > len(message):
        raise RemoteProtocolError("iSCSI", "TotalAHSLength reaches past the PDU")
    found: list[tuple[int, bytes]] = []
    while position < end:
        # A segment has at least 4 bytes: TotalAHSLength counts whole words.
        length, kind = _AHS_HEADER.unpack_from(message, position)
        position += _AHS_HEADER.size
        if position + length > end:
            raise RemoteProtocolError("iSCSI", f"AHS of {length} bytes reaches past the header")
        found.append((kind & AHS_TYPE_MASK, bytes(message[position : position + length])))
        position += length + padding(_AHS_HEADER.size + length)
    return found


def extended_cdb_untrusted(message: Buffer, at: int = 0) -> bytes:
    """What a CDB has beyond the 16 bytes in the BHS; b"" when there is no Extended CDB AHS."""
    extended = [
        specific for kind, specific in ahs_untrusted(message, at) if kind == AHS_EXTENDED_CDB
    ]
    if not extended:
        return b""
    # AHSLength is CDBLength - 15: one reserved byte, then at least one byte of CDB.
    if len(extended) > 1 or len(extended[0]) < 2:
        raise RemoteProtocolError("iSCSI", "bad Extended CDB AHS")
    return extended[0][1:]


def extended_cdb_ahs(cdb: bytes) -> bytes:
    """The AHS for a CDB of more than 16 bytes, padded; b"" for a shorter one."""
    rest = cdb[_CDB_IN_BHS:]
    if not rest:
        return b""
    segment = _AHS_HEADER.pack(len(rest) + 1, AHS_EXTENDED_CDB) + b"\0" + rest
    return segment + bytes(padding(len(segment)))


def sense_of_untrusted(message: Buffer, at: int = 0) -> bytes:
    """The sense data in a SCSI Response or Async Message: SenseLength 2 | sense | the rest.

    b"" when there is none. Raises RemoteProtocolError when SenseLength does not fit.
    """
    data = data_segment_untrusted(message, at)
    if not data:
        return b""
    if len(data) < _SENSE_LENGTH.size:
        raise RemoteProtocolError("iSCSI", "response data of one byte")
    (length,) = _SENSE_LENGTH.unpack_from(data)
    if _SENSE_LENGTH.size + length > len(data):
        raise RemoteProtocolError(
            "iSCSI", f"SenseLength {length} in response data of {len(data)} bytes"
        )
    return bytes(data[_SENSE_LENGTH.size : _SENSE_LENGTH.size + length])
