"""What is remembered of copies."""

from __future__ import annotations

from iserblk.scsi.reservations import TransportId
from iserblk.scsi.third_party import COMPLETED, IN_PROGRESS, CopyStatus
from iserblk.target.scsi.copy_results import MAXIMUM, Copies
from iserblk.target.seam import NexusName, ScsiTask

ONE = NexusName(TransportId("iqn.2026-11.example:one", bytes(6)), 1)
TWO = NexusName(TransportId("iqn.2026-11.example:two", bytes(6)), 1)
DONE = CopyStatus(COMPLETED, 1, 512)


def test_copies_of_a_nexus_are_its_own() -> None:
    copies = Copies()
    copies.note(ONE, 1, DONE)
    copies.note(TWO, 1, CopyStatus(IN_PROGRESS))
    assert copies.is_in_progress(TWO, 1) and not copies.is_in_progress(ONE, 1)
    copies.forget(TWO)
    assert copies.tell(TWO, 1) is None
    assert copies.tell(ONE, 1) == DONE and copies.tell(ONE, 1) is None


def test_what_is_in_progress_is_told_again() -> None:
    copies = Copies()
    copies.note(ONE, 1, CopyStatus(IN_PROGRESS, 1, 512))
    assert copies.tell(ONE, 1) == copies.tell(ONE, 1) == (IN_PROGRESS, 1, 512)


def test_no_more_than_some_are_remembered() -> None:
    """The oldest that has ended is forgotten first; what runs is not."""
    copies = Copies()
    copies.note(TWO, 0, CopyStatus(IN_PROGRESS))
    for number in range(MAXIMUM + 10):
        copies.note(ONE, number, DONE)
    assert copies.is_in_progress(TWO, 0)
    known = [number for number in range(MAXIMUM + 10) if copies.tell(ONE, number)]
    assert known == list(range(11, MAXIMUM + 10))


def test_a_number_is_claimed_once() -> None:
    copies, first, second = Copies(), ScsiTask(b""), ScsiTask(b"")
    copies.note(ONE, 1, DONE)
    assert copies.claim(ONE, 1, first) and copies.is_in_progress(ONE, 1)
    assert not copies.claim(ONE, 1, second) and copies.claim(TWO, 1, second)
    assert copies.tell(ONE, 1) == (IN_PROGRESS, 0, 0)
    assert copies.start(ONE, 1, first)
    first.cancelled = True
    assert not copies.claim(ONE, 1, second), "it runs"
    copies.note(ONE, 1, DONE)
    assert copies.claim(ONE, 1, second)


def test_a_copy_that_never_gets_its_thread_is_none() -> None:
    copies, first, second = Copies(), ScsiTask(b""), ScsiTask(b"")
    assert copies.claim(ONE, 1, first)
    first.cancelled = True
    assert copies.tell(ONE, 1) is None and not copies.start(ONE, 1, first)
    assert copies.claim(ONE, 1, first)
    assert copies.claim(ONE, 1, second) and not copies.start(ONE, 1, first)
    assert copies.start(ONE, 1, second)


def test_copies_that_never_began_take_no_room() -> None:
    copies = Copies()
    for number in range(MAXIMUM):
        task = ScsiTask(b"")
        assert copies.claim(TWO, number, task)
        task.cancelled = True
    for number in range(MAXIMUM):
        copies.note(ONE, number, DONE)
    assert all(copies.tell(ONE, number) == DONE for number in range(MAXIMUM))
