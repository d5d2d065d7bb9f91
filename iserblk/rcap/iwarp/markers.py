"""Insertion of MPA markers, for peers that ask for them (RFC 5044 sections 4.3 and 4.4).

    marker        0x0000 2 | FPDUPTR 2

A marker stands at every 512th byte of the stream, the first before the first FPDU. FPDUPTR counts
the bytes from the FPDU's ULPDU_Length to the marker. It is 0 for a marker between two FPDUs, which
belongs to the second FPDU. The CRC covers the markers of its FPDU, also a marker right behind the
pad.
"""

from __future__ import annotations

from collections.abc import Iterable
from struct import Struct
from typing import Final

from iserblk.crc import crc32c
from iserblk.rcap.iwarp import ddp

INTERVAL: Final = 512
MARKER: Final = Struct(">HH")


class MarkerFramer:
    """Builds FPDUs with markers. It copies the payload, because markers cut it up anyway.

    ``position``: bytes of the stream so far, markers included.
    """

    __slots__ = ("_crc", "position")

    def __init__(self, *, crc: bool) -> None:
        self._crc = crc
        self.position = 0

    def frame(self, pieces: Iterable[bytes | memoryview]) -> bytes:
        """Build the next FPDU of the stream. ``pieces`` begin with its ULPDU_Length.

        Pad, markers and CRC are added. With them the FPDU must not exceed 65535 bytes.
        """
        body = b"".join(pieces)
        body += bytes(-len(body) & 3)
        position = self.position
        out = bytearray()
        if position % INTERVAL == 0:
            out += MARKER.pack(0, 0)
        start = position + len(out)  # where the ULPDU_Length is in the stream
        done = 0
        while done < len(body):
            here = position + len(out)
            take = min(-here % INTERVAL or INTERVAL, len(body) - done)
            out += body[done : done + take]
            done += take
            here += take
            if here % INTERVAL == 0:  # right behind the pad, too: that belongs to this FPDU
                out += MARKER.pack(0, here - start)
        out += ddp.CRC.pack(crc32c(out) if self._crc else 0)
        self.position = position + len(out)
        return bytes(out)
