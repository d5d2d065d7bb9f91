"""iSER headers and connection-management flags (RFC 7145 section 9; wire values as in actual use).

control-type PDU, 28-byte form          private data in connection management
0     opcode 1 | WSV 0x08 | RSV 0x04    0    flags 0x80 ZBVA, 0x40 Send with Invalidate:
1-3   reserved                               "not supported" (request), "not used" (reply)
4-7   Write STag                        1-3  reserved
8-15  Write Base Offset
16-19 Read STag                         control-type PDU, 12-byte form (RFC 5046 section 9.2)
20-27 Read Base Offset                  0-3  as in the other form
                                        4-7  Write STag
                                        8-11 Read STag

The 12-byte form has no Base Offsets: each STag is zero-based, the first byte of its buffer has the
Tagged Offset 0. The two forms cannot be told apart on the wire; both ends are told which it is.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from iserblk.errors import RemoteProtocolError
from iserblk.octets import packer, unpacker

CONTROL: Final = 0x10
WSV: Final = 0x08
RSV: Final = 0x04
HELLO: Final = 0x20
HELLO_REPLY: Final = 0x30

HEADER_LENGTH: Final = 28
BHS_LENGTH: Final = 48
MINIMUM_LENGTH: Final = HEADER_LENGTH + BHS_LENGTH

ZBVA_NOT_SUPPORTED: Final = 0x80
SEND_INVALIDATE_NOT_SUPPORTED: Final = 0x40

# ControlHeader for the hot path: flags, Write STag, Write Base, Read STag, Read Base.
CONTROL_LAYOUT: Final = struct.Struct(">BxxxIQIQ")
# TotalAHSLength (top byte) and DataSegmentLength as one word (RFC 7143 section 11.2.1).
LENGTHS: Final = struct.Struct(">I")
LENGTHS_OFFSET: Final = HEADER_LENGTH + 4
# Both in one: the fields of CONTROL_LAYOUT and LENGTHS; and the first and the last of them.
MESSAGE_LAYOUT: Final = struct.Struct(">BxxxIQIQ4xI")
MESSAGE_ENDS: Final = struct.Struct(">B31xI")

# The methods of these layouts, bound once, as compiled code looks a method up at each call; and the
# types of what they return, so that it has numbers and not objects.
pack_control: Final[Callable[..., None]] = packer(CONTROL_LAYOUT)
unpack_message: Final[Callable[..., Any]] = unpacker(MESSAGE_LAYOUT)
unpack_ends: Final[Callable[..., Any]] = unpacker(MESSAGE_ENDS)
MessageFields = tuple[int, int, int, int, int, int]
MessageEnds = tuple[int, int]

ZERO_BASED_LENGTH: Final = 12
ZERO_BASED_MINIMUM: Final = ZERO_BASED_LENGTH + BHS_LENGTH
# Flags, Write STag, Read STag.
ZERO_BASED_LAYOUT: Final = struct.Struct(">BxxxII")
ZERO_BASED_LENGTHS_OFFSET: Final = ZERO_BASED_LENGTH + 4


class ControlHeader(NamedTuple):
    """The header of a control-type PDU, for tests and tools; the hot path uses CONTROL_LAYOUT."""

    flags: int
    write_stag: int
    write_base: int
    read_stag: int
    read_base: int

    def pack_into(self, buffer: memoryview, offset: int = 0) -> None:
        CONTROL_LAYOUT.pack_into(buffer, offset, *self)

    @classmethod
    def unpack_from(cls, buffer: memoryview | bytes, offset: int = 0) -> ControlHeader:
        """Read a header. Raises RemoteProtocolError when it is not a control-type header."""
        if len(buffer) - offset < HEADER_LENGTH:
            raise RemoteProtocolError("iSER", f"header of {len(buffer) - offset} bytes")
        header = cls(*CONTROL_LAYOUT.unpack_from(buffer, offset))
        if header.flags & 0xF0 != CONTROL:
            raise RemoteProtocolError("iSER", f"opcode {header.flags >> 4} is not a control PDU")
        return header


def check_message_untrusted(message: memoryview) -> bool:
    """Check that a received message is a control-type PDU with a whole BHS, AHS and data segment.

    Trailing bytes (padding) are allowed. Returns False for a Hello or a HelloReply, in which
    nothing is checked. Raises RemoteProtocolError.
    """
    length = len(message)
    if length < MINIMUM_LENGTH or message[0] & 0xF0 != CONTROL:
        return _is_control_untrusted(message)
    word: int = LENGTHS.unpack_from(message, LENGTHS_OFFSET)[0]
    if length_behind(word) > length - MINIMUM_LENGTH:
        raise _incomplete(word, length - MINIMUM_LENGTH)
    return True


def length_behind(lengths: int) -> int:
    """Bytes of AHS and data that the word of lengths declares behind the BHS, without padding."""
    return (lengths >> 24) * 4 + (lengths & 0xFFFFFF)


def check_zero_based_untrusted(message: memoryview) -> bool:
    """The same for the 12-byte header."""
    length = len(message)
    if length < ZERO_BASED_MINIMUM or message[0] & 0xF0 != CONTROL:
        return _is_control_untrusted(message)
    word: int = LENGTHS.unpack_from(message, ZERO_BASED_LENGTHS_OFFSET)[0]
    if length_behind(word) > length - ZERO_BASED_MINIMUM:
        raise _incomplete(word, length - ZERO_BASED_MINIMUM)
    return True


def _is_control_untrusted(message: memoryview) -> bool:
    """False for a Hello or a HelloReply. Raises RemoteProtocolError for everything else: it is too
    short for its header and a BHS, or its opcode is not assigned."""
    opcode = message[0] & 0xF0 if len(message) else CONTROL
    if opcode in (HELLO, HELLO_REPLY):
        return False
    if opcode != CONTROL:
        raise RemoteProtocolError("iSER", f"unexpected reserved message (byte 0 {message[0]:#04x})")
    raise RemoteProtocolError("iSER", f"message of {len(message)} bytes, shorter than a header")


def _incomplete(word: int, behind: int) -> RemoteProtocolError:
    return RemoteProtocolError(
        "iSER",
        f"PDU declares {(word >> 24) * 4} bytes of AHS and {word & 0xFFFFFF} of data, "
        f"but the message has {behind} behind the BHS",
    )


class ConnectionFlags(NamedTuple):
    """The 4 bytes of private data (IBTA annex A12; implementations use them on every RCaP)."""

    flags: int

    @property
    def send_invalidate(self) -> bool:
        """Whether Send with Invalidate may be used towards the sender of these flags."""
        return not self.flags & SEND_INVALIDATE_NOT_SUPPORTED

    def pack(self) -> bytes:
        return bytes((self.flags, 0, 0, 0))

    @classmethod
    def unpack(cls, private_data: bytes) -> ConnectionFlags:
        """Read the flags. Never raises: without private data nothing counts as supported, as Linux
        targets assume; bytes behind the first are ignored."""
        if not private_data:
            return cls(ZBVA_NOT_SUPPORTED | SEND_INVALIDATE_NOT_SUPPORTED)
        return cls(private_data[0])
