"""READ CAPACITY parameter data."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iserblk.errors import RemoteProtocolError
from iserblk.scsi import capacity
from iserblk.scsi.capacity import Capacity


@given(
    st.integers(1, (1 << 47) - 1),
    st.integers(9, 16),
    st.integers(0, 15),
    st.booleans(),
    st.booleans(),
)
def test_16_round_trip(blocks: int, shift: int, exponent: int, lbpme: bool, lbprz: bool) -> None:
    made = Capacity(blocks, 1 << shift, 1 << shift + exponent, lbpme, lbprz)
    raw = capacity.encode16(made)
    assert len(raw) == 32
    assert capacity.decode16(raw) == made
    assert capacity.decode16(raw[:16]) == made


def test_16_golden() -> None:
    raw = capacity.encode16(Capacity(0x20000, 512, 4096, True, True))
    assert raw == bytes.fromhex("000000000001ffff 00000200 00 03 c000") + bytes(16)


@pytest.mark.parametrize(
    ("blocks", "told", "understood"),
    [
        (1, 0, 1),
        (0xFFFFFFFF, 0xFFFFFFFE, 0xFFFFFFFF),
    ],
)
def test_10(blocks: int, told: int, understood: int) -> None:
    raw = capacity.encode10(blocks, 512)
    assert raw == told.to_bytes(4, "big") + (512).to_bytes(4, "big")
    assert capacity.decode10(raw) == (understood, 512, 512, False, False)


@pytest.mark.parametrize("blocks", [0x100000000, 0x100000001])
def test_10_cannot_tell_more(blocks: int) -> None:
    raw = capacity.encode10(blocks, 512)
    assert raw == b"\xff" * 4 + (512).to_bytes(4, "big")
    with pytest.raises(capacity.UntoldCapacity, match=r"READ CAPACITY\(16\)"):
        capacity.decode10(raw)


@pytest.mark.parametrize("size", [0, 1, 256, 520, 4104, 1 << 17, 0xFFFFFFFF])
def test_block_lengths_that_cannot_be_used(size: int) -> None:
    with pytest.raises(capacity.UnusableCapacity, match="block length"):
        capacity.decode16(bytes(8) + size.to_bytes(4, "big") + bytes(20))
    with pytest.raises(capacity.UnusableCapacity, match="block length"):
        capacity.decode10(bytes(4) + size.to_bytes(4, "big"))


def test_a_size_that_no_offset_can_hold() -> None:
    with pytest.raises(capacity.UnusableCapacity, match="too large"):
        capacity.decode16(b"\xff" * 8 + (512).to_bytes(4, "big") + bytes(20))


@given(st.binary(max_size=40))
def test_hostile_bytes(data: bytes) -> None:
    for decode in (capacity.decode10, capacity.decode16):
        with contextlib.suppress(RemoteProtocolError):
            found = decode(data)
            assert found.blocks > 0
