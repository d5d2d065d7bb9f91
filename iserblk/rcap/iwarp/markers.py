"""MPA markers, for peers that ask for them: RFC 5044 sections 4.3 and 4.4.

A marker is 0x0000 | FPDUPTR 2, at every 512th byte of the stream, the first before the first FPDU.
FPDUPTR counts from the FPDU's ULPDU_Length to the marker; 0 for a marker between two FPDUs, which
belongs to the second one. The CRC covers the markers of its FPDU, one right behind the pad too.
"""

from __future__ import annotations

from collections.abc import Iterable
from struct import Struct

from iserblk.crc import crc32c
from iserblk.rcap.iwarp import ddp

INTERVAL = 512
MARKER = Struct(">HH")
MARKER_SIZE = 4


class MarkerFramer:
    """Frames FPDUs with markers; copies, because markers cut the payload anyway.

    ``position``: bytes of the stream so far, markers included.
    """

    __slots__ = ("_crc", "position")

    def __init__(self, *, crc: bool) -> None:
        self._crc = crc
        self.position = 0

    def frame(self, pieces: Iterable[bytes | memoryview]) -> bytes:
        """The next FPDU of the stream, from its ULPDU_Length on, which ``pieces`` start with.

        Pad, markers and CRC are added. The FPDU must not exceed 65535 bytes with them.
        """
        body = b"".join(pieces)
        body += bytes(-len(body) & 3)
        position = self.position
        out = bytearray()
        if position % INTERVAL == 0:
            out += MARKER.pack(0, 0)
        start = position + len(out)  # of the ULPDU_Length in the stream
        done = 0
        while done < len(body):
            here = position + len(out)
            take = min(-here % INTERVAL or INTERVAL, len(body) - done)
            out += body[done : done + take]
            done += take
            here += take
            if here % INTERVAL == 0:  # also right behind the pad: still this FPDU's
                out += MARKER.pack(0, here - start)
        out += ddp.CRC.pack(crc32c(out) if self._crc else 0)
        self.position = position + len(out)
        return bytes(out)
