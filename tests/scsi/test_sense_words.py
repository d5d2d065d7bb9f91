"""Sense data in words."""

from __future__ import annotations

from iserblk.scsi import sense, status
from iserblk.scsi.sense_words import ASCQ_WORDS


def test_words() -> None:
    assert str(sense.decode(sense.encode_fixed(5, 0x24, 0, field=2))) == (
        "illegal request: invalid field in the command (5/24/00), byte 2 of the CDB"
    )
    # An unknown qualifier still gets its code's meaning; an unknown code its numbers.
    assert str(sense.decode(sense.encode_fixed(3, 0x11, 0x7E))) == (
        "medium error: unrecovered read error (3/11/7e)"
    )
    assert str(sense.decode(sense.encode_fixed(4, 0xF0, 1))) == "hardware error (4/f0/01)"
    assert str(sense.decode(sense.encode_fixed(0xC, 0xF0, 1))) == "sense key 0xc (c/f0/01)"
    assert len(ASCQ_WORDS) >= 80
    assert status.words(status.BUSY) == "BUSY"
    assert status.words(0x7F) == "status 0x7f"
