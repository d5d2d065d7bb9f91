"""Sense data and status: both formats, whole, cut and hostile."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iserblk.scsi import sense

KEYS = st.integers(0, 15)
BYTES = st.integers(0, 255)
FIELDS = st.none() | st.integers(0, 0xFFFF)


@given(KEYS, BYTES, BYTES, st.none() | st.integers(0, 0xFFFFFFFF), FIELDS, st.booleans())
def test_fixed_round_trip(
    key: int, asc: int, ascq: int, information: int | None, field: int | None, in_cdb: bool
) -> None:
    raw = sense.encode_fixed(key, asc, ascq, information, field, 3, in_cdb)
    found = sense.decode(raw)
    assert len(raw) == 18
    assert found[:5] == (sense.FIXED, key, asc, ascq, information)
    if key == sense.ILLEGAL_REQUEST and field is not None:
        assert (found.field, found.field_in_cdb) == (field, in_cdb)
    else:
        assert found.field is None
    assert found.response == sense.FIXED and not found.is_deferred


@given(KEYS, BYTES, BYTES, st.none() | st.integers(0, 2**64 - 1), FIELDS, st.booleans())
def test_descriptor_round_trip(
    key: int, asc: int, ascq: int, information: int | None, field: int | None, in_cdb: bool
) -> None:
    raw = sense.encode_descriptor(key, asc, ascq, information, field, 3, in_cdb)
    found = sense.decode(raw)
    assert raw[7] == len(raw) - 8
    assert found[:5] == (sense.DESCRIPTOR, key, asc, ascq, information)
    if key == sense.ILLEGAL_REQUEST and field is not None:
        assert (found.field, found.field_in_cdb) == (field, in_cdb)
    assert found.response == sense.DESCRIPTOR


@given(st.binary(max_size=300))
def test_any_bytes_decode(data: bytes) -> None:
    found = sense.decode(data)
    assert 0 <= found.key <= 15
    assert str(found)
    assert sense.decode(memoryview(data)) == found


def test_golden_bytes() -> None:
    """5/24/00 that points at bit 3 of byte 1 of the CDB."""
    raw = sense.encode_fixed(sense.ILLEGAL_REQUEST, 0x24, 0x00, field=1, bit=3)
    assert raw.hex(" ") == "70 00 05 00 00 00 00 0a 00 00 00 00 24 00 00 cb 00 01"
    raw = sense.encode_descriptor(sense.MISCOMPARE, 0x1D, 0, information=0x1234)
    assert raw.hex(" ") == ("72 0e 1d 00 00 00 00 0c" + " 00 0a 80 00" + " 00 00 00 00 00 00 12 34")


def test_cut_short_tells_what_is_there() -> None:
    raw = sense.encode_fixed(sense.MEDIUM_ERROR, 0x11, 0x04)
    assert sense.decode(raw[:3])[:4] == (sense.FIXED, sense.MEDIUM_ERROR, 0, 0)
    assert sense.decode(raw[:13])[:4] == (sense.FIXED, sense.MEDIUM_ERROR, 0x11, 0)
    assert sense.decode(raw[:14])[:4] == (sense.FIXED, sense.MEDIUM_ERROR, 0x11, 0x04)
    assert sense.decode(b"")[:4] == (0, 0, 0, 0)
    cut = sense.encode_descriptor(sense.MISCOMPARE, 0x1D, 0, information=5)[:-1]
    assert sense.decode(cut).information is None


def test_information_too_large_for_fixed_is_left_out() -> None:
    assert sense.decode(sense.encode_fixed(0xE, 0x1D, 0, 1 << 32)).information is None
    assert sense.decode(sense.encode_descriptor(0xE, 0x1D, 0, 1 << 32)).information == 1 << 32


def test_deferred() -> None:
    raw = bytearray(sense.encode_fixed(sense.MEDIUM_ERROR, 0x0C, 0))
    raw[0] = sense.FIXED_DEFERRED
    found = sense.decode(raw)  # type: ignore[arg-type]
    assert found.is_deferred
    assert "earlier command" in str(found)


@pytest.mark.parametrize(
    ("key", "code", "which"),
    [
        (sense.UNIT_ATTENTION, sense.POWER_ON_OR_RESET, {"is_unit_attention"}),
        (sense.NOT_READY, sense.BECOMING_READY, {"is_ready_soon"}),
        (sense.NOT_READY, 0x0402, set()),
        (sense.ABORTED_COMMAND, 0x4703, set()),
        (sense.ILLEGAL_REQUEST, sense.INVALID_FIELD_IN_CDB, {"is_invalid_field"}),
        (sense.ILLEGAL_REQUEST, sense.INVALID_FIELD_IN_PARAMETER_LIST, {"is_invalid_field"}),
        (sense.ILLEGAL_REQUEST, 0x2606, {"is_invalid_field"}),
        (sense.ILLEGAL_REQUEST, 0x2401, set()),
        (sense.ABORTED_COMMAND, sense.INVALID_FIELD_IN_CDB, set()),
        (sense.ILLEGAL_REQUEST, sense.INVALID_OPERATION_CODE, {"is_unknown_command"}),
        (sense.ILLEGAL_REQUEST, 0x2002, set()),
        (sense.ABORTED_COMMAND, sense.INVALID_OPERATION_CODE, set()),
        (sense.ILLEGAL_REQUEST, sense.LBA_OUT_OF_RANGE, set()),
        (sense.MEDIUM_ERROR, sense.UNRECOVERED_READ_ERROR, set()),
    ],
)
def test_what_an_initiator_decides_by(key: int, code: int, which: set[str]) -> None:
    found = sense.decode(sense.encode_fixed(key, code >> 8, code & 0xFF))
    questions = {
        "is_unit_attention",
        "is_ready_soon",
        "is_invalid_field",
        "is_unknown_command",
    }
    assert {each for each in questions if getattr(found, each)} == which
    assert found.code == code
    deferred = found._replace(response=sense.FIXED_DEFERRED)
    assert not deferred.is_invalid_field and not deferred.is_unknown_command
