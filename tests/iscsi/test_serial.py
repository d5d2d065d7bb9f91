"""The order of sequence numbers that wrap (RFC 1982)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iserblk.iscsi.serial import MASK32, serial_lt, window_size

NUMBERS = st.integers(0, MASK32)
HALF = 1 << 31


@pytest.mark.parametrize(
    ("a", "b", "before"),
    [
        (0, 1, True),
        (1, 0, False),
        (7, 7, False),
        (MASK32, 0, True),  # across the wrap
        (0, MASK32, False),
        (0, HALF - 1, True),
        (0, HALF, False),  # half the space apart: no order
        (HALF, 0, False),
        (0, HALF + 1, False),
    ],
)
def test_order(a: int, b: int, before: bool) -> None:
    assert serial_lt(a, b) is before


@given(NUMBERS, st.integers(1, HALF - 1))
def test_what_is_less_than_half_the_space_ahead_comes_behind(a: int, distance: int) -> None:
    b = (a + distance) & MASK32
    assert serial_lt(a, b) and not serial_lt(b, a)


@pytest.mark.parametrize(
    ("cmd_sn", "max_cmd_sn", "size"),
    [
        (1, 1, 1),
        (1, 0, 0),
        (1, 128, 128),
        (0, MASK32, 0),
        (MASK32, 0, 2),
        (5, 2, -2),
        (1, MASK32, -1),
    ],
)
def test_window_size(cmd_sn: int, max_cmd_sn: int, size: int) -> None:
    assert window_size(cmd_sn, max_cmd_sn) == size
