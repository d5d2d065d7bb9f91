"""Sense data: why a command failed (SPC-4, Sense data).

Fixed format (response code 70h current, 71h deferred), 18 bytes as sent here:

    0    bit 7 VALID, bits 6-0 response code     8-11  COMMAND-SPECIFIC INFORMATION
    2    bits 3-0 sense key                      12    ASC
    3-6  INFORMATION (when VALID)                13    ASCQ
    7    additional length                       15-17 SENSE KEY SPECIFIC: bit 7 SKSV, bit 6 C/D
                                                       (in the CDB), bit 3 BPV, bits 2-0 bit;
                                                       16-17 FIELD POINTER

Descriptor format (72h, 73h): 1 key, 2 ASC, 3 ASCQ, 7 additional length, then descriptors of
(type, additional length, …): type 0 INFORMATION (VALID in byte 2, 8 bytes at 4), type 2 SENSE KEY
SPECIFIC (3 bytes at 4).
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from iserblk.scsi.sense_words import ASC_WORDS, ASCQ_WORDS, KEY_WORDS

# Sense keys.
NO_SENSE = 0x0
RECOVERED_ERROR = 0x1
NOT_READY = 0x2
MEDIUM_ERROR = 0x3
HARDWARE_ERROR = 0x4
ILLEGAL_REQUEST = 0x5
UNIT_ATTENTION = 0x6
DATA_PROTECT = 0x7
BLANK_CHECK = 0x8
VENDOR_SPECIFIC = 0x9
COPY_ABORTED = 0xA
ABORTED_COMMAND = 0xB
VOLUME_OVERFLOW = 0xD
MISCOMPARE = 0xE
COMPLETED = 0xF

FIXED = 0x70
FIXED_DEFERRED = 0x71
DESCRIPTOR = 0x72
DESCRIPTOR_DEFERRED = 0x73

NO_ADDITIONAL_SENSE = 0x0000
# Additional sense codes on which programs decide: ASC << 8 | ASCQ.
BECOMING_READY = 0x0401
# NOT READY for a reason that ends by itself (SPC-4, ASC 04h): becoming ready; rebuild,
# recalculation, an operation, a long write, a self-test in progress; asymmetric access state
# transition; a security session in progress; NOTIFY (ENABLE SPINUP) required, which the transport
# sends; SA creation, space allocation, START STOP UNIT in progress; power not granted yet;
# configuration in progress. Not format, sanitize and depopulation: these take hours, and destroy
# data.
READY_SOON = frozenset(
    0x0400 | ascq for ascq in (1, 5, 6, 7, 8, 9, 0x0A, 0x0E, 0x11, 0x13, 0x14, 0x1A, 0x1C, 0x1D)
)
COMMUNICATION_TIMEOUT = 0x0801
UNREACHABLE_COPY_TARGET = 0x0804
WRITE_ERROR = 0x0C00
THIRD_PARTY_DEVICE_FAILURE = 0x0D01
COPY_TARGET_NOT_REACHABLE = 0x0D02
INVALID_FIELD_IN_COMMAND_IU = 0x0E03
UNRECOVERED_READ_ERROR = 0x1100
OPERATION_IN_PROGRESS = 0x0016
PARAMETER_LIST_LENGTH_ERROR = 0x1A00
MISCOMPARE_DURING_VERIFY = 0x1D00
INVALID_OPERATION_CODE = 0x2000
LBA_OUT_OF_RANGE = 0x2100
INVALID_FIELD_IN_CDB = 0x2400
LUN_NOT_SUPPORTED = 0x2500
INVALID_FIELD_IN_PARAMETER_LIST = 0x2600
INVALID_RELEASE = 0x2604
TOO_MANY_TARGET_DESCRIPTORS = 0x2606
UNSUPPORTED_TARGET_DESCRIPTOR = 0x2607
TOO_MANY_SEGMENT_DESCRIPTORS = 0x2608
UNSUPPORTED_SEGMENT_DESCRIPTOR = 0x2609
UNEXPECTED_INEXACT_SEGMENT = 0x260A
INLINE_DATA_LENGTH_EXCEEDED = 0x260B
WRITE_PROTECTED = 0x2700
SPACE_ALLOCATION_FAILED = 0x2707
POWER_ON_OR_RESET = 0x2900
LUN_RESET = 0x2903
NEXUS_LOST = 0x2907
COMMANDS_CLEARED = 0x2F00
POWER_LOSS_EXPECTED = 0x2F01
COMMANDS_CLEARED_BY_DEVICE_SERVER = 0x2F02
# Unit attentions after which cached data is lost: power on, reset, or bus reset occurred; power on
# occurred; SCSI bus reset occurred; device internal reset; or is about to be lost.
POWER_LOST = (POWER_ON_OR_RESET, 0x2901, 0x2902, 0x2904, POWER_LOSS_EXPECTED)
MODE_PARAMETERS_CHANGED = 0x2A01
RESERVATIONS_PREEMPTED = 0x2A03
RESERVATIONS_RELEASED = 0x2A04
REGISTRATIONS_PREEMPTED = 0x2A05
CAPACITY_CHANGED = 0x2A09
SOFT_THRESHOLD_REACHED = 0x3807
SAVING_NOT_SUPPORTED = 0x3900
INQUIRY_DATA_CHANGED = 0x3F03
DEVICE_IDENTIFIER_CHANGED = 0x3F05
REPORTED_LUNS_CHANGED = 0x3F0E
FAILED_SELF_TEST = 0x3E03
INTERNAL_TARGET_FAILURE = 0x4400
COMMANDS_CLEARED_BY_PROTOCOL = 0x477F
# Unit attentions with which the target may have ended commands of this initiator without a status:
# those of POWER_LOST, and a reset by task management; loss of the I_T nexus; CLEAR TASK SET of
# another initiator, or by the device server; some commands cleared by an iSCSI protocol event.
TASKS_ENDED = (
    *POWER_LOST,
    LUN_RESET,
    NEXUS_LOST,
    COMMANDS_CLEARED,
    COMMANDS_CLEARED_BY_DEVICE_SERVER,
    COMMANDS_CLEARED_BY_PROTOCOL,
)
INVALID_MESSAGE_ERROR = 0x4900
NO_ROOM_FOR_REGISTRATION = 0x5504

_RESET = 0x29  # power on, reset, or loss of the nexus: ASC of all of these
_PERHAPS_ANOTHER = (
    CAPACITY_CHANGED,
    INQUIRY_DATA_CHANGED,
    DEVICE_IDENTIFIER_CHANGED,
    REPORTED_LUNS_CHANGED,
)

_FIXED = struct.Struct(">BxBIBIBBBBH")
_INFORMATION = struct.Struct(">BBBxQ")
_KEY_SPECIFIC = struct.Struct(">BBxxBHx")
_SKSV = 0x80
_IN_CDB = 0x40
_BPV = 0x08
_FIXED_INFORMATION_MAXIMUM = 0xFFFFFFFF


class Sense(NamedTuple):
    """Decoded sense data. ``information`` and ``field`` are None where the data has none."""

    response: int  # FIXED, …; 0 when there were no bytes
    key: int
    asc: int
    ascq: int
    information: int | None = None
    field: int | None = None  # byte of the CDB or parameter list that is wrong
    field_in_cdb: bool = False

    @property
    def code(self) -> int:
        """ASC << 8 | ASCQ."""
        return self.asc << 8 | self.ascq

    @property
    def is_deferred(self) -> bool:
        """Whether it belongs to an earlier command; the command that carried it was not
        executed."""
        return self.response in (FIXED_DEFERRED, DESCRIPTOR_DEFERRED)

    @property
    def is_unit_attention(self) -> bool:
        return self.key == UNIT_ATTENTION

    @property
    def is_perhaps_another(self) -> bool:
        """Whether another LUN may have the number from now on: there is none, or the target was
        reset, or it says that the size, the LUN's data or identifier, or the list have changed."""
        if self.is_unit_attention:
            return self.asc == _RESET or self.code in _PERHAPS_ANOTHER
        return self.key == ILLEGAL_REQUEST and self.code == LUN_NOT_SUPPORTED

    @property
    def is_ready_soon(self) -> bool:
        """Whether the LUN is not ready, but becomes ready by itself."""
        return self.key == NOT_READY and self.code in READY_SOON

    @property
    def is_unknown_command(self) -> bool:
        """Whether the LUN does not know the command of this sense data."""
        return (
            self.key == ILLEGAL_REQUEST
            and self.code == INVALID_OPERATION_CODE
            and not self.is_deferred
        )

    @property
    def is_invalid_field(self) -> bool:
        """Whether the LUN knows the command of this sense data, but refuses a field of its CDB or
        parameter list. (The other codes of ASC 24h are about keys, nonces and XCDBs.)"""
        return (
            self.key == ILLEGAL_REQUEST
            and (self.code == INVALID_FIELD_IN_CDB or self.asc == 0x26)
            and not self.is_deferred
        )

    @property
    def is_not_there(self) -> bool:
        """Whether the LUN does not have what was asked for (a command, a page)."""
        return self.key == ILLEGAL_REQUEST and self.code in (
            INVALID_OPERATION_CODE,
            INVALID_FIELD_IN_CDB,
        )

    def __str__(self) -> str:
        key = KEY_WORDS.get(self.key) or f"sense key {self.key:#x}"
        # Where the ASCQ is not known, the general meaning of the ASC still helps.
        meaning = ASCQ_WORDS.get(self.code) or ASC_WORDS.get(self.asc)
        numbers = f"{self.key:x}/{self.asc:02x}/{self.ascq:02x}"
        text = f"{key}: {meaning} ({numbers})" if meaning else f"{key} ({numbers})"
        if self.field is not None:
            text += f", byte {self.field} of the {'CDB' if self.field_in_cdb else 'parameters'}"
        return f"{text}, of an earlier command" if self.is_deferred else text


def decode(data: bytes | memoryview) -> Sense:
    """Decode sense data of any format and length. Missing bytes count as zero. Never raises."""
    raw = bytes(data[:260])
    if not raw:
        return Sense(0, NO_SENSE, 0, 0)
    response = raw[0] & 0x7F
    if response in (DESCRIPTOR, DESCRIPTOR_DEFERRED):
        return _decode_descriptor(response, raw)
    raw = raw.ljust(18, b"\0")
    _, key, information, _, _, asc, ascq, _, specific, pointer = _FIXED.unpack_from(raw)
    valid = raw[0] & 0x80
    return Sense(
        response,
        key & 0x0F,
        asc,
        ascq,
        information if valid else None,
        *_field(specific, pointer, key & 0x0F),
    )


def tells_of_success(data: bytes) -> bool:
    """Whether a command that ended with CHECK CONDITION and these bytes was carried out: its sense
    key is RECOVERED ERROR or NO SENSE (SPC-4, Sense key and sense code definitions).

    False where the sense key is missing; for a deferred error, as the command that carried it was
    not executed; and with FILEMARK, EOM or ILI, which tell that less was done than asked.
    """
    if len(data) > 2 and data[0] & 0x7F == FIXED:
        return data[2] & 0xEF in (NO_SENSE, RECOVERED_ERROR)  # bit 4 is SDAT_OVFL
    if len(data) > 1 and data[0] & 0x7F == DESCRIPTOR:
        return data[1] & 0x0F in (NO_SENSE, RECOVERED_ERROR)
    return False


def _decode_descriptor(response: int, raw: bytes) -> Sense:
    head = raw.ljust(8, b"\0")
    key, information, field, in_cdb = head[1] & 0x0F, None, None, False
    at = 8
    while at + 2 <= len(raw):
        kind, length = raw[at], raw[at + 1]
        part = raw[at : at + 2 + length]
        if kind == 0 and len(part) >= _INFORMATION.size:
            _, _, valid, value = _INFORMATION.unpack_from(part)
            information = value if valid & 0x80 else None
        elif kind == 2 and len(part) >= _KEY_SPECIFIC.size:
            _, _, specific, pointer = _KEY_SPECIFIC.unpack_from(part)
            field, in_cdb = _field(specific, pointer, key)
        at += 2 + length
    return Sense(response, key, head[2], head[3], information, field, in_cdb)


def _field(specific: int, pointer: int, key: int) -> tuple[int | None, bool]:
    if specific & _SKSV and key == ILLEGAL_REQUEST:
        return pointer, bool(specific & _IN_CDB)
    return None, False


def _specific(field: int | None, bit: int | None, in_cdb: bool) -> tuple[int, int]:
    if field is None:
        return 0, 0
    first = _SKSV | (_IN_CDB if in_cdb else 0)
    return (first if bit is None else first | _BPV | bit), field


def encode_fixed(
    key: int,
    asc: int,
    ascq: int,
    information: int | None = None,
    field: int | None = None,
    bit: int | None = None,
    field_in_cdb: bool = True,
) -> bytes:
    """18 bytes of fixed format sense data.

    ``information`` that does not fit into 32 bits is left out, as SPC-4 demands. ``field``,
    ``bit``: the byte, and the bit in it, that an ILLEGAL REQUEST is about.
    """
    valid = information is not None and 0 <= information <= _FIXED_INFORMATION_MAXIMUM
    specific, pointer = _specific(field, bit, field_in_cdb)
    first = FIXED | (0x80 if valid else 0)
    shown = information if valid else 0
    return _FIXED.pack(first, key, shown, 10, 0, asc, ascq, 0, specific, pointer)


def encode_descriptor(
    key: int,
    asc: int,
    ascq: int,
    information: int | None = None,
    field: int | None = None,
    bit: int | None = None,
    field_in_cdb: bool = True,
) -> bytes:
    """Descriptor format sense data, with the descriptors that are needed."""
    descriptors = b""
    if information is not None:
        descriptors += _INFORMATION.pack(0, 0x0A, 0x80, information)
    if field is not None:
        specific, pointer = _specific(field, bit, field_in_cdb)
        descriptors += _KEY_SPECIFIC.pack(2, 0x06, specific, pointer)
    return bytes((DESCRIPTOR, key, asc, ascq, 0, 0, 0, len(descriptors))) + descriptors
