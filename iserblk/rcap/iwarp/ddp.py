"""Direct Data Placement over MPA: the layouts of segment headers and of the FPDU around them.

    FPDU          ULPDU_Length 2 | ULPDU | pad 0..3 zero bytes | CRC32c 4      RFC 5044 section 4.1
    tagged        control 1 | RsvdULP 1 | STag 4 | TO 8                        RFC 5041 section 4.2
    untagged      control 1 | RsvdULP 5 | QN 4 | MSN 4 | MO 4                  RFC 5041 section 4.3

    control       0x80 Tagged | 0x40 Last | 0x3c reserved | 0x03 DV, version 1
    RsvdULP       RDMAP's control byte (``rdmap``); in untagged segments the Invalidate STag follows

ULPDU_Length counts the bytes behind it, without pad and CRC. An FPDU is a multiple of 4 bytes. The
CRC covers everything before it, and its least significant byte is sent first. Other numbers are
big-endian. The layouts here include ULPDU_Length. They take the control bytes of DDP and RDMAP as
one 16-bit ``control``, whose lower half is RDMAP's.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import Final, NamedTuple

from iserblk.crc import crc32c

TAGGED: Final = 0x8000
LAST: Final = 0x4000
VERSION_MASK: Final = 0x0300
VERSION: Final = 0x0100

TAGGED_HEADER: Final = Struct(">HHIQ")  # ULPDU_Length, control, STag, TO
UNTAGGED_HEADER: Final = Struct(">HHIIII")  # ULPDU_Length, control, Invalidate STag, QN, MSN, MO
UNTAGGED_REST: Final = Struct(">IIII")  # the last four, from byte 4 of the FPDU on
# Bytes 0..19 of an FPDU whose kind is not known yet: ULPDU_Length and control, then
# tagged: STag, TO, and four bytes of what follows
# untagged: Invalidate STag, QN and MSN as one number, MO
HEADER: Final = Struct(">HHIQI")
LENGTH: Final = Struct(">H")
CRC: Final = Struct("<I")

TAGGED_SIZE: Final = 16
UNTAGGED_SIZE: Final = 20
LENGTH_SIZE: Final = 2
CRC_SIZE: Final = 4
MAX_ULPDU: Final = 65535
MAX_FPDU: Final = 65544
MAX_TO: Final = (1 << 64) - 1
MASK32: Final = 0xFFFFFFFF

# What the CRC is of bytes that end with their own CRC, if that is right.
GOOD_CRC: Final = 0x48674BC7

QN_SEND: Final = 0
QN_READ_REQUEST: Final = 1
QN_TERMINATE: Final = 2

# Terminate codes of the layers below RDMAP, as (layer, error type, error code).
INVALID_STAG: Final = (1, 1, 0)
BASE_OR_BOUNDS: Final = (1, 1, 1)
TO_WRAP: Final = (1, 1, 3)
TAGGED_VERSION: Final = (1, 1, 4)
INVALID_QN: Final = (1, 2, 1)
NO_BUFFER: Final = (1, 2, 2)
MSN_RANGE: Final = (1, 2, 3)
INVALID_MO: Final = (1, 2, 4)
MESSAGE_TOO_LONG: Final = (1, 2, 5)
UNTAGGED_VERSION: Final = (1, 2, 6)
MPA_CRC: Final[tuple[int, int, int]] = (2, 0, 2)
MPA_LENGTH: Final[tuple[int, int, int]] = (2, 0, 3)
MPA_LOCAL: Final = (2, 0, 5)
MPA_IRD: Final = (2, 0, 6)
MPA_RTR: Final = (2, 0, 7)


# What each frame needs, bound once. A compiled module looks up a method of a layout, or a name that
# it has imported from a module that is not compiled, at each call.
pack_tagged: Final = TAGGED_HEADER.pack
pack_crc: Final = CRC.pack
crc_of: Final[Callable[..., int]] = crc32c

Header = tuple[int, int, int, int, int]
"""The fields of HEADER: with types, so that compiled code has numbers and not objects."""


class TaggedHeader(NamedTuple):
    """Bytes 0..15 of an FPDU with a tagged segment."""

    length: int
    control: int
    stag: int
    to: int

    def pack(self) -> bytes:
        return TAGGED_HEADER.pack(*self)


class UntaggedHeader(NamedTuple):
    """Bytes 0..19 of an FPDU with an untagged segment."""

    length: int
    control: int
    invalidate: int
    qn: int
    msn: int
    mo: int

    def pack(self) -> bytes:
        return UNTAGGED_HEADER.pack(*self)


def fpdu_size(ulpdu_length: int) -> int:
    """Bytes of an FPDU on a stream without markers."""
    return ((ulpdu_length + LENGTH_SIZE + 3) & ~3) + CRC_SIZE


def encode_fpdu(header: TaggedHeader | UntaggedHeader, payload: bytes, *, crc: bool) -> bytes:
    """Build one FPDU. ``header.length`` is used as it is.

    Without ``crc`` the CRC field is zero; MPA leaves its value open (RFC 5044 section 7.1.1).
    """
    body = header.pack() + payload
    body += bytes(-len(body) & 3)
    return body + CRC.pack(crc32c(body) if crc else 0)


def mulpdu(emss: int, *, crc: bool, markers: bool) -> int:
    """Bytes of the largest ULPDU (MULPDU) that we send at a TCP segment size of ``emss`` bytes.

    By RFC 5044 section 4.5, with and without markers; never below 128. Without CRC and markers an
    FPDU need not fit into a TCP segment, so it is as large as its length field allows.
    """
    if markers:
        return max(128, emss - (6 + 4 * -(-emss // 512) + emss % 4))
    if not crc:
        return MAX_ULPDU
    return max(128, emss - (6 + emss % 4))
