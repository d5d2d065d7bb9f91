"""How a range of blocks is cut to what a LUN takes (SBC-4, Block Limits VPD page).

All arguments and results are logical blocks.
"""

from __future__ import annotations

from collections.abc import Iterator


def split_blocks(first: int, blocks: int, maximum: int) -> Iterator[tuple[int, int]]:
    """(first block, blocks) of adjoining pieces of at most ``maximum`` (1 or more) blocks."""
    end = first + blocks
    while first < end:
        count = min(maximum, end - first)
        yield first, count
        first += count


def align_inwards(first: int, blocks: int, granularity: int, alignment: int) -> tuple[int, int]:
    """The whole granules inside the range: those that begin at ``alignment`` + n * granularity.

    A granularity of 0 or 1 changes nothing. Returns (first block, 0) where no granule fits.
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
    """The range as UNMAP descriptors: whole granules, each of at most ``max_blocks``.

    Cuts fall between granules, too, so that no granule is lost between two descriptors; where
    ``max_blocks`` is less than one granule that cannot be had, and the LUN may ignore them.
    """
    first, blocks = align_inwards(first, blocks, granularity, alignment)
    step = max_blocks
    if 1 < granularity <= max_blocks:
        step -= max_blocks % granularity
    return split_blocks(first, blocks, step)
