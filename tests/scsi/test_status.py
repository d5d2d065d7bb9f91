"""Status bytes in words."""

from __future__ import annotations

import pytest

from iserblk.scsi import status


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0x00, "GOOD"),
        (0x02, "CHECK CONDITION"),
        (0x08, "BUSY"),
        (0x18, "RESERVATION CONFLICT: another initiator has reserved the LUN"),
        (0x28, "TASK SET FULL"),
        (0x40, "TASK ABORTED by another initiator"),
        (0x77, "status 0x77"),
    ],
)
def test_words(value: int, text: str) -> None:
    """The values of SAM-5, table of status codes."""
    assert status.words(value) == text


def test_every_byte_has_words_on_one_line() -> None:
    assert all(status.words(value).isprintable() for value in range(256))
