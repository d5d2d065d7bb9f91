"""How ranges are cut, and how GET LBA STATUS reads."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iserblk.disk.lun.geometry import Geometry
from iserblk.errors import RemoteProtocolError
from iserblk.scsi.cdb import write_same16
from iserblk.scsi.lba import encode_lba_status


def geometry(**limits: int) -> Geometry:
    return Geometry(block=512, long_cdbs=True, zero_when_unmapped=True, **limits)  # type: ignore[arg-type]


@given(
    offset=st.integers(0, 1 << 40),
    length=st.integers(0, 1 << 34),
    granularity=st.integers(0, 64),
    alignment=st.integers(0, 63),
    maximum=st.integers(0, 1 << 20),
)
def test_unmap_stays_inside(
    offset: int, length: int, granularity: int, alignment: int, maximum: int
) -> None:
    """No block outside the range, no command above the limit, and ascending addresses."""
    cut = geometry(
        unmap_granularity=granularity,
        unmap_alignment=alignment % max(granularity, 1),
        max_unmap_blocks=maximum and max(maximum, granularity, length // 512 // 1000 + 1),
    )
    position = -(-offset // 512)
    for first, blocks in cut.unmap_ranges(position, (offset + length) // 512 - position):
        assert first >= position and blocks > 0
        assert blocks <= (cut.max_unmap_blocks or 0xFFFFFFFF)
        position = first + blocks
        assert position * 512 <= offset + length


@pytest.mark.parametrize("blocks", [1, 0xFFFF, 0x10000, 0xFFFFFFFF, 0x100000000, 0x100000001])
def test_write_same_is_cut_at_what_a_cdb_holds(blocks: int) -> None:
    """Sizes around powers of two: no block is left out, none comes twice."""
    pieces = list(geometry().write_same_ranges(7, blocks))
    assert pieces[0][0] == 7 and sum(count for _, count in pieces) == blocks
    assert all(count <= 0xFFFFFFFF for _, count in pieces)


@pytest.mark.parametrize("most", [0xFFFFFFFF, 0x100000000, 1 << 40, (1 << 64) - 1])
def test_a_write_same_limit_of_64_bits(most: int) -> None:
    """MAXIMUM WRITE SAME LENGTH may be more than any CDB can say."""
    pieces = list(geometry(max_write_same_blocks=most).write_same_ranges(0, (1 << 32) + 5))
    for first, blocks in pieces:
        assert write_same16(first, blocks, False, True)[10:14] == blocks.to_bytes(4, "big")
    assert sum(blocks for _, blocks in pieces) == (1 << 32) + 5


@pytest.mark.parametrize("status", range(16))
def test_only_deallocated_and_anchored_are_holes(status: int) -> None:
    """SBC-4 has two statuses more than SBC-3 (mapped, and unknown); the rest is reserved."""
    answer = encode_lba_status([(0, 8, 0), (8, 8, status), (16, 8, 0)])
    got = geometry().extents_untrusted(memoryview(answer), 0, 24 * 512, 24)
    if status in (1, 2):
        assert got == [(0, 4096, 0), (4096, 4096, 3), (8192, 4096, 0)]
    else:
        assert got == [(0, 24 * 512, 0)]


def test_extents_follow_the_descriptors() -> None:
    answer = encode_lba_status([(0, 8, 0), (8, 8, 1), (16, 100, 0)])
    got = geometry().extents_untrusted(memoryview(answer), 512, 20 * 512, 116)
    assert got == [(512, 7 * 512, 0), (8 * 512, 8 * 512, 3), (16 * 512, 5 * 512, 0)]


def test_extents_merge_equal_neighbours() -> None:
    answer = encode_lba_status([(0, 8, 1), (8, 8, 2), (16, 4, 1)])
    assert geometry().extents_untrusted(memoryview(answer), 0, 20 * 512, 20) == [(0, 20 * 512, 3)]


@pytest.mark.parametrize(
    "descriptors",
    [
        [],
        [(8, 8, 1)],  # behind the block that was asked for
        [(0, 4, 1)],  # before it
        [(32, 64, 1)],  # the same, in blocks of another size
        [(4, 0, 1)],
        [(4, 4, 0), (9, 8, 1)],  # a gap
        [(4, 4, 0), (6, 8, 1)],  # both, at LBA 6
        [(4, 4, 1), (4, 4, 0)],
        [(4, 4, 0), (8, 56, 1), (60, 4, 0)],  # behind what was asked for
        [(4, 61, 1)],  # behind the end of the LUN
        [(4, 4, 0), (8, 1 << 31, 1)],
    ],
)
def test_nothing_is_believed_of_what_cannot_be(descriptors: list[tuple[int, int, int]]) -> None:
    answer = encode_lba_status(descriptors)
    with pytest.raises(RemoteProtocolError, match="GET LBA STATUS"):
        geometry().extents_untrusted(memoryview(answer), 4 * 512, 16 * 512, 64)


def test_an_extent_may_begin_before_and_descriptors_may_be_padded() -> None:
    answer = encode_lba_status([(0, 8, 1), (8, 4, 0), (0, 0, 0)])
    got = geometry().extents_untrusted(memoryview(answer), 4 * 512, 16 * 512, 64)
    assert got == [(4 * 512, 4 * 512, 3), (8 * 512, 4 * 512, 0)]


@given(st.binary(max_size=200), st.integers(0, 100), st.integers(1, 1000))
def test_any_answer(data: bytes, offset: int, length: int) -> None:
    try:
        extents = geometry().extents_untrusted(memoryview(data), offset, length, 1 << 32)
    except RemoteProtocolError:
        return
    position = offset
    for start, size, _ in extents:
        assert start == position and size > 0
        position += size
    assert position <= offset + length
