"""How ranges are cut: nothing lost, nothing beyond the range, nothing above a limit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iserblk.scsi import limits

NEAR_POWERS = st.builds(
    lambda power, delta: max(0, (1 << power) + delta), st.integers(0, 33), st.integers(-1, 1)
)
# Enough pieces to see every kind of cut, few enough to count.
LIMITS = st.builds(
    lambda power, delta: (1 << power) + delta, st.integers(28, 33), st.integers(-1, 1)
)


@given(NEAR_POWERS, NEAR_POWERS, LIMITS)
def test_split_covers_exactly(first: int, blocks: int, maximum: int) -> None:
    position = first
    for start, count in limits.split_blocks(first, blocks, maximum):
        assert start == position
        assert 0 < count <= maximum
        position += count
    assert position == first + blocks


@pytest.mark.parametrize("power", range(1, 12))
@pytest.mark.parametrize("delta", [-1, 0, 1])
def test_split_around_powers_of_two(power: int, delta: int) -> None:
    size = (1 << power) + delta
    pieces = list(limits.split_blocks(10, size, 1 << power))
    assert pieces == ([(10, 1 << power), (10 + (1 << power), 1)] if delta > 0 else [(10, size)])


def test_split_of_nothing() -> None:
    assert list(limits.split_blocks(5, 0, 8)) == []


@given(
    st.integers(0, 3000),
    st.integers(0, 3000),
    st.integers(0, 64),
    st.integers(0, 200),
)
def test_align_inwards_keeps_every_whole_granule(
    first: int, blocks: int, granularity: int, alignment: int
) -> None:
    start, count = limits.align_inwards(first, blocks, granularity, alignment)
    step = max(granularity, 1)
    # By definition: the granules that lie inside the range, one by one.
    inside = [
        granule
        for granule in range(alignment % step, first + blocks, step)
        if granule >= first and granule + step <= first + blocks
    ]
    if count:
        assert list(range(start, start + count, step)) == inside
    else:
        assert inside == []


@given(
    st.integers(0, 3000),
    st.integers(0, 3000),
    st.integers(1, 500),
    st.integers(0, 64),
    st.integers(0, 64),
)
def test_unmap_ranges_lose_no_granule(
    first: int, blocks: int, maximum: int, granularity: int, alignment: int
) -> None:
    pieces = list(
        limits.unmap_ranges(
            first, blocks, max_blocks=maximum, granularity=granularity, alignment=alignment
        )
    )
    start, count = limits.align_inwards(first, blocks, granularity, alignment)
    assert sum(each for _, each in pieces) == count
    position = start
    for lba, each in pieces:
        assert lba == position
        assert 0 < each <= maximum
        if 1 < granularity <= maximum:
            assert (lba - alignment) % granularity == 0
            assert each % granularity == 0
        position += each


def test_unmap_smaller_than_a_granule_is_nothing() -> None:
    assert list(limits.unmap_ranges(1, 14, max_blocks=100, granularity=8, alignment=0)) == []
    assert list(limits.unmap_ranges(1, 15, max_blocks=100, granularity=8, alignment=0)) == [(8, 8)]
    assert list(limits.unmap_ranges(1, 14, max_blocks=100, granularity=8, alignment=1)) == [(1, 8)]
