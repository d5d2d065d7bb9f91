"""What a LUN's limits mean for a range of bytes: how requests are cut, and how answers are read.

Sources: SBC-4 (VPD B0h Block Limits, B2h Logical Block Provisioning, GET LBA STATUS).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from iserblk.disk.seam import EXTENT_DATA, EXTENT_HOLE, EXTENT_ZERO, Extent
from iserblk.errors import RemoteProtocolError
from iserblk.scsi import lba as lba_data
from iserblk.scsi import limits

MAXIMUM_BLOCKS = 0xFFFFFFFF  # what the length field of a 16-byte CDB holds
LBA_STATUS_DESCRIPTORS = 1024  # asked for with one command


@dataclass(slots=True)
class Geometry:
    """Limits of one LUN, in logical blocks; 0 means that the LUN reported none."""

    block: int  # bytes
    long_cdbs: bool  # READ(16), WRITE(16), SYNCHRONIZE CACHE(16)
    max_unmap_blocks: int = 0
    unmap_granularity: int = 0
    unmap_alignment: int = 0
    max_write_same_blocks: int = 0
    ndob: bool = True  # WRITE SAME without data: until the LUN refuses it
    prefetch: bool = True  # PRE-FETCH: until the LUN refuses it
    zero_when_unmapped: bool = False  # LBPRZ

    def unmap_ranges(self, offset: int, length: int) -> Iterator[tuple[int, int]]:
        """(first block, blocks) of whole granules inside the byte range, as UNMAP takes them."""
        first = -(-offset // self.block)
        last = (offset + length) // self.block
        return limits.unmap_ranges(
            first,
            last - first,
            max_blocks=self.max_unmap_blocks or MAXIMUM_BLOCKS,
            granularity=self.unmap_granularity,
            alignment=self.unmap_alignment,
        )

    def write_same_ranges(self, first: int, blocks: int) -> Iterator[tuple[int, int]]:
        """(first block, blocks) as WRITE SAME(16) takes them. (MAXIMUM WRITE SAME LENGTH has 64
        bits, the CDB's own field 32.)"""
        most = min(self.max_write_same_blocks or MAXIMUM_BLOCKS, MAXIMUM_BLOCKS)
        return limits.split_blocks(first, blocks, most)

    @property
    def lba_status_length(self) -> int:
        """Allocation length for GET LBA STATUS, bytes."""
        return lba_data.LBA_STATUS_HEADER + LBA_STATUS_DESCRIPTORS * lba_data.LBA_STATUS_DESCRIPTOR

    def extents_untrusted(self, answer: memoryview, offset: int, length: int) -> list[Extent]:
        """GET LBA STATUS parameter data as extents of the byte range; they may end before it does.
        Blocks of an unknown status count as data: a reader then reads them.

        Raises RemoteProtocolError when the descriptors do not begin at the range, or leave gaps.
        """
        hole = EXTENT_HOLE | (EXTENT_ZERO if self.zero_when_unmapped else 0)
        end = offset + length
        position = offset
        extents: list[Extent] = []
        for first, blocks, status in lba_data.decode_lba_status(answer):
            start, stop = first * self.block, (first + blocks) * self.block
            if stop <= position:
                continue
            if start > position:
                raise RemoteProtocolError("SCSI", f"GET LBA STATUS left a gap at byte {position}")
            stop = min(stop, end)
            flags = hole if status in lba_data.HOLES else EXTENT_DATA
            if extents and extents[-1][2] == flags:
                extents[-1] = (extents[-1][0], stop - extents[-1][0], flags)
            else:
                extents.append((position, stop - position, flags))
            position = stop
            if position >= end:
                break
        return extents
