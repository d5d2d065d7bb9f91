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
from iserblk.scsi.limits import MAXIMUM_BLOCKS

LBA_STATUS_DESCRIPTORS = 1024  # asked for with one command


@dataclass(slots=True)
class Geometry:
    """Limits of one LUN, in logical blocks; 0 means that the LUN reported none."""

    block: int  # bytes
    long_cdbs: bool  # READ(16), WRITE(16), SYNCHRONIZE CACHE(16)
    max_unmap_blocks: int = 0
    max_unmap_descriptors: int = 0
    unmap_granularity: int = 0
    unmap_alignment: int = 0
    max_write_same_blocks: int = 0
    ndob: bool = True  # WRITE SAME without data: until the LUN refuses it
    prefetch: bool = True  # PRE-FETCH: until the LUN refuses it
    zero_when_unmapped: bool = False  # LBPRZ
    tells_cache: bool = True  # whether there is a write cache; else one is assumed

    def unmap_ranges(
        self, first: int, blocks: int, most: int = MAXIMUM_BLOCKS
    ) -> Iterator[tuple[int, int]]:
        """(first block, blocks) of whole granules inside the range, as UNMAP takes them, each of at
        most ``most`` blocks."""
        return limits.unmap_ranges(
            first,
            blocks,
            max_blocks=min(self.max_unmap_blocks or MAXIMUM_BLOCKS, most),
            granularity=self.unmap_granularity,
            alignment=self.unmap_alignment,
        )

    def write_same_ranges(
        self, first: int, blocks: int, most: int = MAXIMUM_BLOCKS
    ) -> Iterator[tuple[int, int]]:
        """(first block, blocks) as WRITE SAME(16) takes them, each of at most ``most`` blocks.
        (MAXIMUM WRITE SAME LENGTH has 64 bits, the CDB's own field 32.)"""
        most = min(self.max_write_same_blocks or MAXIMUM_BLOCKS, most)
        return limits.split_blocks(first, blocks, most)

    def half(self, blocks: int) -> int:
        """Half as many blocks, in whole granules where that leaves one or more."""
        half = blocks // 2
        granule = self.unmap_granularity
        return half - half % granule if 1 < granule <= half else half

    @property
    def lba_status_length(self) -> int:
        """Allocation length for GET LBA STATUS, bytes."""
        return lba_data.LBA_STATUS_HEADER + LBA_STATUS_DESCRIPTORS * lba_data.LBA_STATUS_DESCRIPTOR

    def extents_untrusted(
        self, answer: memoryview, offset: int, length: int, blocks: int
    ) -> list[Extent]:
        """GET LBA STATUS parameter data as extents of the byte range; they may end before it does.
        Blocks of an unknown status count as data: a reader then reads them. ``blocks``: of the LUN.

        Raises RemoteProtocolError where the descriptors cannot be about the blocks that were asked
        for, and nothing of the answer may be believed: the first is about other blocks, or has
        none; one does not begin where that before it ends; or one leaves the LUN. (A target that
        counts in blocks of another size shows it so.)
        """
        hole = EXTENT_HOLE | (EXTENT_ZERO if self.zero_when_unmapped else 0)
        end = offset + length
        position = offset
        lba = offset // self.block  # that the next descriptor has to be about
        extents: list[Extent] = []
        for first, count, status in lba_data.decode_lba_status(answer):
            if extents and not count:
                break  # what a target may have behind its descriptors
            fits = first == lba if extents else first <= lba < first + count
            if not fits or first + count > blocks:
                raise RemoteProtocolError(
                    "SCSI",
                    f"GET LBA STATUS described {count} blocks at LBA {first} in place of LBA {lba}",
                )
            lba = first + count
            if position == end:
                continue  # it has to fit as well
            stop = min(lba * self.block, end)
            flags = hole if status in lba_data.HOLES else EXTENT_DATA
            if extents and extents[-1][2] == flags:
                extents[-1] = (extents[-1][0], stop - extents[-1][0], flags)
            else:
                extents.append((position, stop - position, flags))
            position = stop
        if not extents:
            raise RemoteProtocolError("SCSI", "GET LBA STATUS described no blocks")
        return extents
