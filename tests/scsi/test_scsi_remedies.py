"""What can be done about a status or sense data stands in the message of the error."""

from __future__ import annotations

import pytest

from iserblk.commands.command import PlainCommand
from iserblk.commands.running import failure
from iserblk.errors import OutOfSpace, ScsiError, WriteProtected
from iserblk.options import Options
from iserblk.scsi import remedies, sense, status
from iserblk.scsi.sense_words import ASCQ_WORDS


def error(status_: int, data: bytes = b"") -> ScsiError:
    slot = PlainCommand(0)
    slot.status = status_
    slot.sense = data
    found = failure(slot, "iscsi://host/iqn/0")
    assert isinstance(found, ScsiError)
    return found


@pytest.mark.parametrize(
    ("value", "remedy"),
    [
        (status.BUSY, "BUSY; the target has too much to do: look at its load, lower queue-depth"),
        (status.TASK_SET_FULL, "TASK SET FULL; the target takes no more commands at once: lower"),
        (status.RESERVATION_CONFLICT, "has reserved the LUN; have that host release it"),
        (status.TASK_ABORTED, "another initiator; another host resets the LUN"),
    ],
)
def test_statuses(value: int, remedy: str) -> None:
    found = error(value)
    assert remedy in str(found) and found.status == value


@pytest.mark.parametrize(
    ("key", "code", "kind", "remedy"),
    [
        (
            7,
            0x2707,
            OutOfSpace,
            "(7/27/07); make room in the pool behind the LUN at the target, or",
        ),
        (7, 0x2700, WriteProtected, "(7/27/00); allow writing at the target, or use the LUN read-"),
        (7, 0x2777, WriteProtected, "(7/27/77); allow writing at the target"),
        (3, 0x1100, ScsiError, "(3/11/00); look at the target's log and disks"),
        (3, 0x7777, ScsiError, "(3/77/77); look at the target's log and disks"),
        (4, 0x4400, ScsiError, "(4/44/00); look at the target's log"),
        (2, 0x0412, ScsiError, "(2/04/12); bring the LUN online at the target"),
        (2, 0x040B, ScsiError, "(2/04/0b); add the URL of another portal, or give portals=discove"),
        (2, 0x0401, ScsiError, "(2/04/01); where that takes longer than io-timeout, raise it"),
        (6, 0x3807, ScsiError, "(6/38/07); make room in the pool"),
    ],
)
def test_sense_data(key: int, code: int, kind: type[ScsiError], remedy: str) -> None:
    found = error(status.CHECK_CONDITION, sense.encode_fixed(key, code >> 8, code & 0xFF))
    assert type(found) is kind and remedy in str(found)


def test_what_has_no_remedy() -> None:
    """What iserblk handles, or nobody can do anything about here."""
    text = str(error(status.CHECK_CONDITION, sense.encode_fixed(5, 0x24, 0)))
    assert text.endswith("(5/24/00)")
    assert str(error(0x77)).endswith("status 0x77")


def test_the_table() -> None:
    """Each code has words as well, each remedy is one short line, and options that a remedy names
    exist."""
    for code, remedy in remedies.table().items():
        assert code in ASCQ_WORDS
        assert remedy.isprintable() and len(remedy) < 120 and not remedy.endswith(".")
    Options.from_pairs([("io-timeout", "60"), ("queue-depth", "8"), ("portals", "discover")])
