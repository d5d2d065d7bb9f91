"""UNMAP parameter lists and GET LBA STATUS data."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iserblk.errors import RemoteProtocolError
from iserblk.scsi import lba

RANGES = st.lists(
    st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 0xFFFFFFFF)),
    max_size=20,
)


@given(RANGES)
def test_unmap_round_trip(ranges: list[tuple[int, int]]) -> None:
    raw = lba.unmap_parameters(ranges)
    assert len(raw) == 8 + 16 * len(ranges)
    assert lba.decode_unmap_parameters(raw) == ranges
    assert lba.decode_unmap_parameters(memoryview(raw)) == ranges


def test_unmap_golden() -> None:
    raw = lba.unmap_parameters([(0x0102030405060708, 0x0A0B0C0D)])
    assert raw == bytes.fromhex("0016 0010 00000000 0102030405060708 0a0b0c0d 00000000")


def test_the_most_descriptors_fit_their_length_fields() -> None:
    raw = lba.unmap_parameters([(0, 1)] * lba.MAXIMUM_UNMAP_DESCRIPTORS)
    assert len(lba.decode_unmap_parameters(raw)) == lba.MAXIMUM_UNMAP_DESCRIPTORS


@pytest.mark.parametrize(
    "data",
    [
        "00160010000000",  # no header
        "0016001000000000" + "00" * 15,  # less data than it says
        "0015001000000000" + "00" * 16,  # lengths that contradict each other
        "0006001000000000" + "00" * 16,
    ],
)
def test_unmap_lists_that_cannot_be(data: str) -> None:
    with pytest.raises(RemoteProtocolError):
        lba.decode_unmap_parameters(bytes.fromhex(data))


def test_unmap_ignores_part_of_a_descriptor() -> None:
    raw = bytearray(lba.unmap_parameters([(7, 1)]) + b"x" * 8)
    raw[:4] = bytes.fromhex("001e0018")
    assert lba.decode_unmap_parameters(raw) == [(7, 1)]  # type: ignore[arg-type]


STATUSES = st.lists(
    st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 0xFFFFFFFF), st.integers(0, 15)),
    max_size=20,
)


@given(STATUSES)
def test_lba_status_round_trip(ranges: list[tuple[int, int, int]]) -> None:
    raw = lba.encode_lba_status(ranges)
    assert int.from_bytes(raw[:4], "big") == len(raw) - 4
    assert list(lba.decode_lba_status(raw)) == ranges
    if ranges:
        assert list(lba.decode_lba_status(raw[:-1])) == ranges[:-1]


@given(st.binary(max_size=100))
def test_hostile_bytes(data: bytes) -> None:
    with contextlib.suppress(RemoteProtocolError):
        list(lba.decode_lba_status(data))
    with contextlib.suppress(RemoteProtocolError):
        lba.decode_unmap_parameters(data)


def test_lba_status_without_a_header() -> None:
    with pytest.raises(RemoteProtocolError, match="7 bytes"):
        list(lba.decode_lba_status(bytes(7)))
