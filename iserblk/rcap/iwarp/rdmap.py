"""RDMA Protocol: opcodes, and the layouts of Read Request and Terminate (RFC 5040 section 4).

RDMAP control   0xc0 RV, version 1 (0x40) | 0x30 reserved | 0x0f opcode
Read Request    Sink STag 4 | Sink TO 8 | Size 4 | Source STag 4 | Source TO 8         (4.4)
Terminate       layer, etype (4 bits each) 1 | code 1 | HdrCt 0xe0 1 | reserved 1
                [DDP segment length 2 [DDP header 14 or 18 [Read Request 28]]]         (4.8)
"""

from __future__ import annotations

from struct import Struct
from typing import Final, NamedTuple

from iserblk.errors import RemoteProtocolError

WRITE: Final = 0
READ_REQUEST: Final = 1
READ_RESPONSE: Final = 2
SEND: Final = 3
SEND_INVALIDATE: Final = 4
SEND_SE: Final = 5
SEND_SE_INVALIDATE: Final = 6
TERMINATE: Final = 7

VERSION_MASK: Final = 0xC0
VERSION: Final = 0x40
OPCODE_MASK: Final = 0x0F

READ_REQUEST_HEADER: Final = Struct(">IQIIQ")
READ_REQUEST_SIZE: Final = 28

# Terminate codes of RDMAP itself, as (layer, error type, error code).
INVALID_STAG: Final = (0, 1, 0)
BASE_OR_BOUNDS: Final = (0, 1, 1)
ACCESS_RIGHTS: Final = (0, 1, 2)
TO_WRAP: Final = (0, 1, 4)
CANNOT_INVALIDATE: Final = (0, 1, 9)
INVALID_VERSION: Final = (0, 2, 5)
UNEXPECTED_OPCODE: Final = (0, 2, 6)

# HdrCt of RFC 5040, in the third byte; siw (a bit field on little-endian) has 0x01, 0x02, 0x04.
HDRCT_LENGTH: Final = 0x80
HDRCT_DDP: Final = 0x40
HDRCT_RDMAP: Final = 0x20

_WORDS: dict[tuple[int, int, int], str] = {
    (0, 1, 0): "invalid STag",
    (0, 1, 1): "base or bounds violation",
    (0, 1, 2): "access rights violation",
    (0, 1, 3): "STag not associated with this stream",
    (0, 1, 4): "Tagged Offset wraps",
    (0, 1, 9): "STag cannot be invalidated",
    (0, 1, 255): "unspecified protection error",
    (0, 2, 5): "invalid RDMAP version",
    (0, 2, 6): "unexpected opcode",
    (0, 2, 7): "catastrophic error of this stream",
    (0, 2, 8): "catastrophic error of the device",
    (0, 2, 9): "STag cannot be invalidated",
    (0, 2, 255): "unspecified operation error",
    (1, 1, 0): "invalid STag",
    (1, 1, 1): "base or bounds violation",
    (1, 1, 2): "STag not associated with this stream",
    (1, 1, 3): "Tagged Offset wraps",
    (1, 1, 4): "invalid DDP version",
    (1, 2, 1): "invalid queue number",
    (1, 2, 2): "no buffer for the message",
    (1, 2, 3): "message sequence number out of range",
    (1, 2, 4): "invalid message offset",
    (1, 2, 5): "message too long for its buffer",
    (1, 2, 6): "invalid DDP version",
    (2, 0, 1): "TCP connection lost",
    (2, 0, 2): "CRC mismatch",
    (2, 0, 3): "marker and ULPDU length disagree",
    (2, 0, 4): "invalid MPA request or reply",
    (2, 0, 5): "local catastrophic error",
    (2, 0, 6): "insufficient IRD",
    (2, 0, 7): "no matching RTR option",
}
_LAYERS: Final = {0: "RDMAP", 1: "DDP", 2: "MPA"}


def terminate_words(layer: int, etype: int, code: int) -> str:
    """The meaning of a Terminate in words. Accepts any three numbers."""
    name = _LAYERS.get(layer, f"layer {layer}")
    if layer in (0, 1) and etype == 0:
        return f"{name}: local catastrophic error"
    words = _WORDS.get((layer, etype, code))
    return f"{name}: {words}" if words else f"{name}: error type {etype}, code {code}"


def _known(layer: int, etype: int, code: int) -> bool:
    return (layer, etype, code) in _WORDS or (layer in (0, 1) and etype == 0)


class ReadRequest(NamedTuple):
    """The 28 bytes after the DDP header of an RDMA Read Request (RFC 5040 section 4.4)."""

    sink_stag: int
    sink_to: int
    size: int
    source_stag: int
    source_to: int

    def pack(self) -> bytes:
        return READ_REQUEST_HEADER.pack(*self)

    @classmethod
    def unpack_untrusted(cls, data: bytes) -> ReadRequest:
        if len(data) != READ_REQUEST_SIZE:
            raise RemoteProtocolError(
                "RDMAP", f"a Read Request of {len(data)} bytes", UNEXPECTED_OPCODE
            )
        return cls(*READ_REQUEST_HEADER.unpack(data))


class Terminate(NamedTuple):
    """The payload of a Terminate Message.

    ``swapped``: the control word has the order that siw sends, nibbles and bits reversed. ``hdrct``
    and ``reserved`` are bytes 2 and 3 as on the wire. ``rest`` is what follows: a copy of the
    headers that the peer objected to, as HdrCt says.
    """

    layer: int
    etype: int
    code: int
    hdrct: int = 0
    reserved: int = 0
    rest: bytes = b""
    swapped: bool = False

    def pack(self) -> bytes:
        high, low = (self.etype, self.layer) if self.swapped else (self.layer, self.etype)
        return bytes((high << 4 | low, self.code, self.hdrct, self.reserved)) + self.rest

    @classmethod
    def unpack_untrusted(cls, data: bytes) -> Terminate:
        """Read a Terminate payload in either bit order. Any control word is accepted.

        The HdrCt bits show the order. Where none is set, the order that gives a defined error is
        taken, that of RFC 5040 first. Raises RemoteProtocolError, without a Terminate to send, when
        the control word is not complete: no Terminate answers a Terminate.
        """
        if len(data) < 4:
            raise RemoteProtocolError("RDMAP", f"a Terminate of {len(data)} bytes")
        high, low, code, hdrct = data[0] >> 4, data[0] & 15, data[1], data[2]
        if hdrct & 0xE0:
            swapped = False
        elif hdrct & 0x07:
            swapped = True
        else:
            swapped = not _known(high, low, code) and _known(low, high, code)
        layer, etype = (low, high) if swapped else (high, low)
        return cls(layer, etype, code, hdrct, data[3], bytes(data[4:]), swapped)

    def words(self) -> str:
        return terminate_words(self.layer, self.etype, self.code)


def terminate_for(
    code: tuple[int, int, int], header: bytes = b"", length: int = 0, read_request: bytes = b""
) -> bytes:
    """The payload of the Terminate that answers a bad incoming segment.

    ``header``: the DDP header of the segment (14 or 18 bytes; b"" when no segment is to blame).
    ``length``: its ULPDU_Length. ``read_request``: the 28 bytes of a Read Request. Which of these
    are copied follows from figure 10 of RFC 5040: errors of DDP and RDMAP copy the header, RDMAP
    protection errors also the Read Request.
    """
    layer, etype, number = code
    if not header or layer == 2 or etype == 0:
        return Terminate(layer, etype, number).pack()
    hdrct = HDRCT_LENGTH | HDRCT_DDP
    if read_request and layer == 0 and etype == 1:
        hdrct |= HDRCT_RDMAP
    else:
        read_request = b""
    rest = length.to_bytes(2, "big") + header + read_request
    return Terminate(layer, etype, number, hdrct, 0, rest).pack()
