"""Sets of blocks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from iserblk.disk.durability.block_sets import Blocks

BLOCKS = 24
RANGES = st.tuples(st.integers(0, BLOCKS - 1), st.integers(1, 6)).map(
    lambda pair: (pair[0], min(pair[0] + pair[1], BLOCKS) - 1)
)


@given(st.lists(RANGES, max_size=12), RANGES)
def test_a_set_of_blocks(ranges: list[tuple[int, int]], asked: tuple[int, int]) -> None:
    """What is new of a range comes in order, and no part of it is empty."""
    blocks, model = Blocks(()), set[int]()
    for first, last in [*ranges, asked]:
        missing = blocks.missing(first, last)
        assert all(low <= high for low, high in missing)
        found = [at for low, high in missing for at in range(low, high + 1)]
        assert found == [at for at in range(first, last + 1) if at not in model]
        assert blocks.add(first, last) == missing
        model.update(range(first, last + 1))
    inside = [at for low, high in blocks.ranges for at in range(low, high + 1)]
    assert inside == sorted(model)
