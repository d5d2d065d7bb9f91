"""Parameter data that lists block ranges: UNMAP, and GET LBA STATUS (SBC-4).

UNMAP parameter list                      GET LBA STATUS parameter data
    0  H  UNMAP DATA LENGTH (what follows)    0  I  PARAMETER DATA LENGTH (what follows)
    2  H  BLOCK DESCRIPTOR DATA LENGTH        4  -  reserved
    4  -  reserved                            8     descriptors of 16 bytes:
    8     descriptors of 16 bytes:                  Q  LBA
          Q  LBA                                    I  NUMBER OF LOGICAL BLOCKS
          I  NUMBER OF LOGICAL BLOCKS               B  PROVISIONING STATUS (bits 3-0)
          -  reserved                               -  reserved
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence

from iserblk.errors import RemoteProtocolError

# Provisioning status. SBC-3 defines 0 to 2. SBC-4 adds 3 and 4; 0 then means either of these.
MAPPED = 0  # or unknown
DEALLOCATED = 1
ANCHORED = 2
MAPPED_FOR_SURE = 3
UNKNOWN = 4
HOLES = frozenset((DEALLOCATED, ANCHORED))  # no data was written there

LBA_STATUS_HEADER = 8
LBA_STATUS_DESCRIPTOR = 16
UNMAP_HEADER = 8
UNMAP_DESCRIPTOR = 16
MAXIMUM_UNMAP_DESCRIPTORS = (0xFFFF - 6) // UNMAP_DESCRIPTOR

_UNMAP_HEADER = struct.Struct(">HH4x")
_UNMAP_DESCRIPTOR = struct.Struct(">QI4x")
_STATUS_HEADER = struct.Struct(">I4x")
_STATUS_DESCRIPTOR = struct.Struct(">QIB3x")


def unmap_parameters(ranges: Sequence[tuple[int, int]]) -> bytes:
    """UNMAP parameter list for at most 4095 pairs (first block, blocks)."""
    data = bytearray(UNMAP_HEADER + UNMAP_DESCRIPTOR * len(ranges))
    _UNMAP_HEADER.pack_into(data, 0, len(data) - 2, len(data) - UNMAP_HEADER)
    for index, (lba, blocks) in enumerate(ranges):
        _UNMAP_DESCRIPTOR.pack_into(data, UNMAP_HEADER + UNMAP_DESCRIPTOR * index, lba, blocks)
    return bytes(data)


def decode_unmap_parameters(data: bytes | memoryview) -> list[tuple[int, int]]:
    """The pairs (first block, blocks) of an UNMAP parameter list.

    Raises RemoteProtocolError for a list whose lengths contradict each other; the device server
    answers that with PARAMETER LIST LENGTH ERROR.
    """
    if len(data) < UNMAP_HEADER:
        raise RemoteProtocolError("SCSI", f"UNMAP parameter list of {len(data)} bytes")
    length, descriptors = _UNMAP_HEADER.unpack_from(data)
    # Bytes behind the last whole descriptor are ignored, as SBC-4 has it.
    descriptors -= descriptors % UNMAP_DESCRIPTOR
    if length + 2 < UNMAP_HEADER + descriptors or len(data) < UNMAP_HEADER + descriptors:
        raise RemoteProtocolError(
            "SCSI", f"UNMAP lists {descriptors} bytes of ranges in {len(data)} bytes"
        )
    return list(_UNMAP_DESCRIPTOR.iter_unpack(data[UNMAP_HEADER : UNMAP_HEADER + descriptors]))


def encode_lba_status(ranges: Iterable[tuple[int, int, int]]) -> bytes:
    """GET LBA STATUS parameter data for triples (first block, blocks, status)."""
    descriptors = b"".join(_STATUS_DESCRIPTOR.pack(*each) for each in ranges)
    return _STATUS_HEADER.pack(4 + len(descriptors)) + descriptors


def decode_lba_status(data: bytes | memoryview) -> Iterator[tuple[int, int, int]]:
    """The triples (first block, blocks, status) of the descriptors that are complete in ``data``.

    Raises RemoteProtocolError when the header is not complete.
    """
    if len(data) < LBA_STATUS_HEADER:
        raise RemoteProtocolError("SCSI", f"GET LBA STATUS answered with {len(data)} bytes")
    (length,) = _STATUS_HEADER.unpack_from(data)
    end = min(len(data), 4 + length)
    for at in range(LBA_STATUS_HEADER, end - LBA_STATUS_DESCRIPTOR + 1, LBA_STATUS_DESCRIPTOR):
        lba, blocks, status = _STATUS_DESCRIPTOR.unpack_from(data, at)
        yield lba, blocks, status & 0x0F
