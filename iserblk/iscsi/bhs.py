"""The parts that all PDUs share: opcodes, flags, field offsets, segments (RFC 7143 section 11.2).

    0      opcode, I bit 0x40        20-23  opcode-specific (EDTL, Target Transfer Tag, …)
    1      flags, F bit 0x80         24-27  CmdSN (initiator), StatSN (target)
    2-3    opcode-specific           28-31  ExpStatSN (initiator), ExpCmdSN (target)
    4      TotalAHSLength, words     32-35  MaxCmdSN (target)
    5-7    DataSegmentLength         36-47  opcode-specific
    8-15   LUN or opcode-specific
    16-19  Initiator Task Tag

Functions that end in ``_untrusted`` raise RemoteProtocolError, and nothing else, for any bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, Final

from iserblk.errors import RemoteProtocolError
from iserblk.octets import packer, unpacker

BHS_LENGTH: Final = 48
OPCODE_MASK: Final = 0x3F
IMMEDIATE: Final = 0x40
NO_TAG: Final = 0xFFFFFFFF

# Initiator opcodes.
NOP_OUT: Final = 0x00
SCSI_COMMAND: Final = 0x01
TASK_MANAGEMENT_REQUEST: Final = 0x02
LOGIN_REQUEST: Final = 0x03
TEXT_REQUEST: Final = 0x04
DATA_OUT: Final = 0x05
LOGOUT_REQUEST: Final = 0x06
SNACK_REQUEST: Final = 0x10
# Target opcodes.
NOP_IN: Final = 0x20
SCSI_RESPONSE: Final = 0x21
TASK_MANAGEMENT_RESPONSE: Final = 0x22
LOGIN_RESPONSE: Final = 0x23
TEXT_RESPONSE: Final = 0x24
DATA_IN: Final = 0x25
LOGOUT_RESPONSE: Final = 0x26
R2T: Final = 0x31
ASYNC_MESSAGE: Final = 0x32
REJECT: Final = 0x3F

# SCSI Command flags (11.3.1).
FLAG_FINAL: Final = 0x80
FLAG_CONTINUE: Final = 0x40  # Login and Text
FLAG_READ: Final = 0x40
FLAG_WRITE: Final = 0x20
FLAGS_BIDIRECTIONAL: Final = FLAG_READ | FLAG_WRITE
ATTR_MASK: Final = 0x07
ATTR_SIMPLE: Final = 0x01
ATTR_ORDERED: Final = 0x02
ATTR_HEAD_OF_QUEUE: Final = 0x03
# SCSI Data-In flags (11.7.1).
DATA_IN_ACKNOWLEDGE: Final = 0x40
DATA_IN_STATUS: Final = 0x01
# SCSI Response flags (11.4.1).
BIDI_OVERFLOW: Final = 0x10
BIDI_UNDERFLOW: Final = 0x08
RESIDUAL_OVERFLOW: Final = 0x04
RESIDUAL_UNDERFLOW: Final = 0x02
RESIDUAL_FLAGS: Final = RESIDUAL_OVERFLOW | RESIDUAL_UNDERFLOW
BIDI_FLAGS: Final = BIDI_OVERFLOW | BIDI_UNDERFLOW

# AHSType, without its reserved bits (11.2.2.1).
_AHS_TYPE_MASK: Final = 0x3F
_EXTENDED_CDB: Final = 1
_BIDIRECTIONAL_READ_LENGTH: Final = 2
# A Bidirectional Read Expected Data Transfer Length AHS (11.2.2.4): AHSLength, AHSType, the length.
BIDIRECTIONAL_AHS: Final = struct.Struct(">HBxI")
_BIDIRECTIONAL_AHS_LENGTH: Final = 5

# Single fields, to patch or read them alone.
ITT_OFFSET: Final = 16
CMD_SN_OFFSET: Final = 24
CDB_OFFSET: Final = 32
EXP_DATA_SN_OFFSET: Final = 36  # of a SCSI Response, and of a Task Management Function Request
RESIDUAL_OFFSET: Final = 44
NO_LUN: Final[bytes] = bytes(8)  # where the field is reserved
ITT: Final = struct.Struct(">I")
CMD_SN_EXP_STAT_SN: Final = struct.Struct(">II")
LENGTHS: Final = struct.Struct(">I")
LENGTHS_OFFSET: Final = 4

# Layouts for the hot path. A SCSI Command: opcode, flags, TotalAHSLength (top byte) with
# DataSegmentLength, LUN, ITT, EDTL, CmdSN, ExpStatSN, CDB; and all but ExpStatSN, for the target.
SCSI_COMMAND_FIELDS: Final[struct.Struct] = struct.Struct(">BBxxI8sIIII16s")
SCSI_COMMAND_TAKEN: Final[struct.Struct] = struct.Struct(">BBxxI8sIII4x16s")
# A SCSI Data-Out: opcode, flags, lengths, LUN, ITT, TTT, ExpStatSN, DataSN, Buffer Offset.
DATA_OUT_FIELDS: Final[struct.Struct] = struct.Struct(">BBxxI8sII4xI4xII4x")
# A SCSI Data-In: opcode, flags, status, lengths, LUN, ITT, TTT, StatSN, ExpCmdSN, MaxCmdSN, DataSN,
# Buffer Offset, residual count; and of these only lengths, ITT, DataSN and Buffer Offset.
DATA_IN_FIELDS: Final[struct.Struct] = struct.Struct(">BBxBI8sIIIIIIII")
DATA_IN_PLACE: Final[struct.Struct] = struct.Struct(">4xI8xI16xII")
# A SCSI Response: opcode, flags, response and status as one word, lengths, ITT, StatSN, ExpCmdSN,
# MaxCmdSN, residual count. SNACK Tag, ExpDataSN and the bidirectional residual count are written as
# zeroes.
SCSI_RESPONSE_FIELDS: Final = struct.Struct(">II8xI4xIII8xI")

BIDI_RESIDUAL: Final = struct.Struct(">I")
BIDI_RESIDUAL_OFFSET: Final = 40

# The methods of these layouts, bound once, as compiled code looks a method up at each call; and the
# types of what they return, so that it has numbers and not objects.
unpack_scsi_command: Final[Callable[..., Any]] = unpacker(SCSI_COMMAND_TAKEN)
pack_scsi_command: Final[Callable[..., None]] = packer(SCSI_COMMAND_FIELDS)
unpack_scsi_response: Final[Callable[..., Any]] = unpacker(SCSI_RESPONSE_FIELDS)
unpack_data_in_place: Final[Callable[..., Any]] = unpacker(DATA_IN_PLACE)
pack_scsi_response: Final[Callable[..., None]] = packer(SCSI_RESPONSE_FIELDS)
ScsiCommandFields = tuple[int, int, int, bytes, int, int, int, bytes]
ScsiResponseFields = tuple[int, int, int, int, int, int, int]

MOST_SENSE: Final = 252  # bytes (SPC-4, Sense data: ADDITIONAL SENSE LENGTH is 244 at most)
_ANY_BUFFER = bytes | bytearray | memoryview


def check_untrusted(message: _ANY_BUFFER, at: int) -> None:
    """Check that a whole BHS is at ``message[at]``."""
    if len(message) - at < BHS_LENGTH:
        raise RemoteProtocolError("iSCSI", f"PDU of {max(0, len(message) - at)} bytes")


def data_segment_untrusted(message: memoryview, at: int = 0) -> memoryview:
    """The data segment of the PDU whose BHS is at ``message[at]``, as a view without padding. Bytes
    behind it are ignored: not all implementations send padding."""
    check_untrusted(message, at)
    (lengths,) = LENGTHS.unpack_from(message, at + LENGTHS_OFFSET)
    start = at + BHS_LENGTH + (lengths >> 24) * 4
    end = start + (lengths & 0xFFFFFF)
    if end > len(message):
        raise RemoteProtocolError("iSCSI", f"PDU of {len(message) - at} bytes declares {end - at}")
    return message[start:end]


def sense_of_untrusted(message: memoryview, at: int = 0) -> bytes:
    """The sense data of a SCSI Response: behind its 2-byte SenseLength (11.4.7.1).

    A SenseLength beyond the data segment is cut to the bytes that are there, and all to the most
    that sense data can have: each task keeps it for a while.
    """
    data = data_segment_untrusted(message, at)
    if len(data) < 2:
        return b""
    return bytes(data[2 : 2 + min(int.from_bytes(data[:2], "big"), MOST_SENSE)])


def additional_headers_untrusted(message: memoryview, at: int = 0) -> list[tuple[int, memoryview]]:
    """The AHSs of the PDU whose BHS is at ``message[at]``, in order: AHSType, and what follows it:
    AHSLength bytes, the reserved one included, without padding (11.2.2)."""
    check_untrusted(message, at)
    start = at + BHS_LENGTH
    end = start + message[at + LENGTHS_OFFSET] * 4
    if end > len(message):
        raise RemoteProtocolError("iSCSI", "additional header segments beyond the PDU")
    found = []
    while end - start >= 4:
        length = int.from_bytes(message[start : start + 2], "big")
        if start + 3 + length > end or length == 0:
            raise RemoteProtocolError("iSCSI", f"additional header segment of {length} bytes")
        kind = message[start + 2] & _AHS_TYPE_MASK
        found.append((kind, message[start + 3 : start + 3 + length]))
        start += (3 + length + 3) & ~3
    return found


def extended_cdb_untrusted(message: memoryview, at: int = 0) -> bytes:
    """The bytes of Extended CDB AHSs, which follow the 16 bytes of CDB in the BHS (11.2.2.3). Other
    AHSs are skipped."""
    cdb = b""
    for kind, content in additional_headers_untrusted(message, at):
        if kind == _EXTENDED_CDB:
            cdb += bytes(content[1:])
    return cdb


def bidirectional_read_length_untrusted(message: memoryview, at: int = 0) -> int:
    """The Bidirectional Read Expected Data Transfer Length, in bytes (11.2.2.4); 0 where the PDU
    has no such AHS. Other AHSs are skipped."""
    read_length = 0
    for kind, content in additional_headers_untrusted(message, at):
        if kind == _BIDIRECTIONAL_READ_LENGTH:
            if len(content) != _BIDIRECTIONAL_AHS_LENGTH:
                raise RemoteProtocolError(
                    "iSCSI", f"bidirectional read length in an AHS of {len(content)} bytes"
                )
            read_length = int.from_bytes(content[1:], "big")
    return read_length


def pack_bidirectional_read_length(buffer: memoryview, read_length: int) -> int:
    """Write the AHS of a bidirectional command to the begin of ``buffer``, behind the BHS; returns
    its length in bytes. TotalAHSLength is that in words, in the top byte of the lengths."""
    BIDIRECTIONAL_AHS.pack_into(
        buffer, 0, _BIDIRECTIONAL_AHS_LENGTH, _BIDIRECTIONAL_READ_LENGTH, read_length
    )
    return BIDIRECTIONAL_AHS.size
