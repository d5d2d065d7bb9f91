"""LUN fields and REPORT LUNS."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iserblk.errors import LocalProtocolError, RemoteProtocolError
from iserblk.scsi import luns


@given(st.integers(0, luns.MAXIMUM))
def test_round_trip(lun: int) -> None:
    assert luns.decode(luns.encode(lun)) == lun


@pytest.mark.parametrize(
    ("field", "lun"),
    [
        ("0000000000000000", 0),
        ("00ff000000000000", 255),
        ("4100000000000000", 256),
        ("7fff000000000000", 16383),
        ("4005000000000000", 5),  # flat, though it would fit: LIO does that
        ("0105000000000000", luns.NONE),  # another bus
        ("8005000000000000", luns.NONE),  # logical unit addressing
        ("c101000000000000", luns.NONE),  # well-known: REPORT LUNS
        ("0005000100000000", luns.NONE),  # a second level
        ("00050000000000", luns.NONE),
    ],
)
def test_fields(field: str, lun: int) -> None:
    assert luns.decode(bytes.fromhex(field)) == lun
    assert luns.decode(memoryview(bytes.fromhex(field))) == lun


@pytest.mark.parametrize("lun", [-1, 16384])
def test_no_field_for_it(lun: int) -> None:
    with pytest.raises(LocalProtocolError, match=str(lun)):
        luns.encode(lun)


@given(st.sets(st.integers(0, luns.MAXIMUM), max_size=20))
def test_report_round_trip(some: set[int]) -> None:
    raw = luns.encode_report_luns(some)
    assert int.from_bytes(raw[:4], "big") == 8 * len(some) == len(raw) - 8
    assert luns.decode_report_luns(raw) == sorted(some)


def test_report_as_far_as_it_came() -> None:
    raw = luns.encode_report_luns([0, 1, 2])
    assert luns.decode_report_luns(raw[:-1]) == [0, 1]
    assert luns.decode_report_luns(raw[:8]) == []
    # The list ends where it says, and what names nothing is left out.
    assert luns.decode_report_luns(b"\0\0\0\x08" + raw[4:]) == [0]
    assert luns.decode_report_luns(b"\0\0\0\x10\0\0\0\0\xc1\1" + bytes(7) + b"\7" + bytes(6)) == [7]


@given(st.binary(max_size=100))
def test_hostile_bytes(data: bytes) -> None:
    with contextlib.suppress(RemoteProtocolError):
        assert all(0 <= lun <= luns.MAXIMUM for lun in luns.decode_report_luns(data))
