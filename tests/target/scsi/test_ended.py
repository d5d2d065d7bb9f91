"""Status and sense data of commands that are not carried out."""

from __future__ import annotations

import pytest

from iserblk.scsi import sense
from iserblk.target.scsi.ended import (
    CheckCondition,
    Ended,
    ReservationConflict,
    TaskAborted,
    invalid_field,
)


@pytest.mark.parametrize(
    ("kind", "status"), [(ReservationConflict, 0x18), (TaskAborted, 0x40), (Ended, 0x02)]
)
def test_a_status_without_sense_data(kind: type[Ended], status: int) -> None:
    assert (kind.status, kind.sense) == (status, b"")


def test_a_check_condition_says_why() -> None:
    error = CheckCondition(sense.MEDIUM_ERROR, 0x1100, information=0x1234)
    assert error.status == 0x02
    found = sense.decode(error.sense)
    assert (found.key, found.asc, found.ascq, found.information) == (3, 0x11, 0, 0x1234)


@pytest.mark.parametrize(("field", "bit"), [(1, None), (4, 3), (31, 7)])
def test_an_invalid_field_is_pointed_at(field: int, bit: int | None) -> None:
    """SPC-4, field pointer sense key specific data: SKSV, C/D, BPV and the bit in byte 15."""
    raw = invalid_field(field, bit).sense
    assert (raw[2] & 0x0F, raw[12], raw[13]) == (5, 0x24, 0)
    assert raw[15] == 0xC0 | (0x08 | bit if bit is not None else 0)
    assert int.from_bytes(raw[16:18], "big") == field


def test_a_field_of_the_parameter_list() -> None:
    raw = CheckCondition(sense.ILLEGAL_REQUEST, 0x2600, field=8, field_in_cdb=False).sense
    assert raw[15] & 0x40 == 0 and raw[17] == 8
