"""MODE SENSE parameter data."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iserblk.errors import RemoteProtocolError
from iserblk.scsi import mode
from iserblk.scsi.mode import Modes
from tests.scsi.modes import as_sense6

DESCRIPTORS = st.sampled_from([b"", mode.short_descriptor(100, 512), mode.long_descriptor(1, 512)])
# A page before the caching page, in both forms, must be stepped over.
BEFORE = st.sampled_from([b"", mode.control_page(), b"\x7f\x01\x00\x03abc"])


@given(st.booleans(), st.booleans(), st.booleans(), DESCRIPTORS, BEFORE)
def test_round_trip(wp: bool, wce: bool, dpofua: bool, descriptor: bytes, before: bytes) -> None:
    specific = (mode.WP if wp else 0) | (mode.DPOFUA if dpofua else 0)
    pages = before + mode.caching_page(wce)
    six = mode.encode_sense6(specific, descriptor, pages)
    ten = mode.encode_sense10(specific, descriptor, pages)
    assert six[0] == len(six) - 1
    assert int.from_bytes(ten[:2], "big") == len(ten) - 2
    assert mode.decode_sense6(six) == Modes(wp, wce, dpofua)
    assert mode.decode_sense6(as_sense6(ten)) == Modes(wp, wce, dpofua)


def test_golden() -> None:
    raw = mode.encode_sense6(mode.DPOFUA, b"", mode.caching_page(True))
    assert raw == bytes.fromhex("17 00 10 00 08 12 04") + bytes(17)
    raw = mode.encode_sense10(mode.WP, mode.long_descriptor(1 << 33, 4096), b"")
    assert raw == bytes.fromhex("0016 00 80 01 00 0010 0000000200000000 00000000 00001000")
    assert mode.short_descriptor(1 << 33, 4096) == bytes.fromhex("ffffffff 00001000")


@pytest.mark.parametrize("pages", [b"", mode.control_page(), mode.caching_page(False)[:2]])
def test_a_write_cache_is_assumed_where_nothing_is_told(pages: bytes) -> None:
    assert mode.decode_sense6(mode.encode_sense6(0, b"", pages)).write_cache


def test_what_lies_behind_the_data_length_does_not_count() -> None:
    raw = mode.encode_sense6(0, b"", mode.control_page()) + mode.caching_page(False)
    assert mode.decode_sense6(raw).write_cache


def test_only_wce_is_changeable() -> None:
    assert mode.changeable(mode.caching_page(True)) == b"\x08\x12\x04" + bytes(17)
    for page in (mode.control_page(), mode.error_recovery_page(True), mode.exceptions_page()):
        assert mode.changeable(page) == page[:2] + bytes(10)
    assert mode.changeable(mode.provisioning_page(5)) == b"\x5c\x02\0\x14" + bytes(20)


def test_select_in_both_forms() -> None:
    page = mode.caching_page(False)
    short = bytes((0, 0, 0, 8)) + mode.short_descriptor(100, 512) + b"\x88" + page[1:]
    assert mode.decode_select(short, False) == (100, 512, [(12, page)]), "without PS"
    long = bytes((0, 0, 0, 0, 1, 0, 0, 16)) + mode.long_descriptor(1 << 33, 4096)
    sub = mode.provisioning_page(0)
    assert mode.decode_select(long + page + sub, True) == (
        1 << 33, 4096, [(24, page), (24 + len(page), sub)],
    )  # fmt: skip
    assert mode.decode_select(bytes(4), False) == (None, None, [])


@pytest.mark.parametrize(
    "raw", ["000000", "0000000800", "0000000100", "0000000008", "000000000801"]
)
def test_select_lists_that_contradict_themselves(raw: str) -> None:
    with pytest.raises(RemoteProtocolError):
        mode.decode_select(bytes.fromhex(raw), False)


@given(st.binary(max_size=300))
def test_hostile_bytes(data: bytes) -> None:
    with contextlib.suppress(RemoteProtocolError):
        mode.decode_sense6(data)


def test_too_short_for_a_header() -> None:
    with pytest.raises(RemoteProtocolError, match="3 bytes"):
        mode.decode_sense6(b"\3\0\0")


def test_the_control_page_tells_of_task_aborted() -> None:
    """TAS: what another nexus aborts is answered."""
    assert mode.control_page().hex() == "0a0a00100040000000000000"
    assert mode.control_page(tas=False).hex() == "0a0a00100000000000000000"
