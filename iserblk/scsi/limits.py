"""Splitting ranges of blocks to the limits of a LUN (SBC-4, Block Limits VPD page).

All arguments and results are logical blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

MAXIMUM_BLOCKS: Final = 0xFFFFFFFF  # what the length field of a 16-byte CDB holds


def split_blocks(first: int, blocks: int, maximum: int) -> Iterator[tuple[int, int]]:
    """Split a range into adjoining pieces (first block, blocks) of at most ``maximum`` blocks (1 or
    more)."""
    end = first + blocks
    while first < end:
        count = min(maximum, end - first)
        yield first, count
        first += count


def align_inwards(first: int, blocks: int, granularity: int, alignment: int) -> tuple[int, int]:
    """The part of a range that consists of whole granules, as (first block, blocks).

    Granules begin at ``alignment`` + n * ``granularity``. A granularity of 0 or 1 changes nothing.
    Returns (first block, 0) where no granule fits.
    """
    if granularity <= 1:
        return first, blocks
    start = first + (alignment - first) % granularity
    stop = first + blocks
    stop -= (stop - alignment) % granularity
    return (start, stop - start) if start < stop else (first, 0)


def unmap_ranges(
    first: int, blocks: int, *, max_blocks: int, granularity: int, alignment: int
) -> Iterator[tuple[int, int]]:
    """The range as UNMAP descriptors (first block, blocks) of at most ``max_blocks`` blocks each.

    Only whole granules are included. Each descriptor has whole granules, too, as the LUN may ignore
    parts of granules. Where ``max_blocks`` is less than a granule, that is impossible, and the LUN
    may ignore the descriptors.
    """
    first, blocks = align_inwards(first, blocks, granularity, alignment)
    step = max_blocks
    if 1 < granularity <= max_blocks:
        step -= max_blocks % granularity
    return split_blocks(first, blocks, step)
