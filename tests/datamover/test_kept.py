"""What a target keeps for retransmission: until when, how much, and what a SNACK finds of it."""

from __future__ import annotations

import pytest

from iserblk.datamover.kept import (
    MOST_DATA,
    MOST_INLINE,
    MOST_PDUS,
    MOST_READS,
    Kept,
    KeptPdu,
)
from iserblk.datamover.seam import TargetSlot
from iserblk.iscsi import bhs, pdu

LAST = 0xFFFFFFFF
LUN = bytes(8)


def made(itt: int = 1, opcode: int = bhs.SCSI_RESPONSE, lun: bytes = LUN) -> KeptPdu:
    return KeptPdu(bytes([opcode]) + bytes(47), b"", itt, lun)


def read(size: int) -> KeptPdu:
    kept = made()
    kept.data = memoryview(bytes(size))
    kept.slot = TargetSlot(0)
    return kept


def filled(first: int, count: int) -> tuple[Kept, list[KeptPdu]]:
    """``count`` PDUs, of which the ``first`` is the next that the initiator expects."""
    kept = Kept(first)
    each = [made(itt) for itt in range(count)]
    for at, one in enumerate(each):
        kept.add((first + at) & LAST, one)
    return kept, each


@pytest.mark.parametrize("first", [1, LAST - 1, LAST])
def test_an_exp_stat_sn_acknowledges_all_before_it(first: int) -> None:
    """Also where StatSN wraps. An older number, as in a PDU that was overtaken, takes nothing
    back."""
    kept, each = filled(first, 4)
    assert kept.acknowledge(first) == []
    assert kept.acknowledge((first + 3) & LAST) == each[:3]
    assert kept.acknowledge((first + 1) & LAST) == []
    assert kept.acknowledged == kept.oldest == (first + 3) & LAST
    assert kept.all() == each[3:]
    assert kept.acknowledge((first + 4) & LAST) == each[3:]
    assert kept.oldest is None


def test_the_data_of_a_read_is_let_go_once() -> None:
    kept = Kept(1)
    one = read(100)
    slot = one.slot
    kept.add(1, one)
    assert (kept.data, kept.reads) == (100, 1)
    assert kept.let_go(one) is slot
    assert (kept.data, kept.reads) == (0, 0)
    assert kept.let_go(one) is None
    assert (kept.data, kept.reads) == (0, 0)
    assert kept.all() == [one]  # its status is not acknowledged by that


def test_how_many_bytes_are_kept() -> None:
    kept = Kept(1)
    kept.add(1, read(MOST_DATA // 2 - 1))
    assert not kept.presses
    assert kept.fits(MOST_DATA // 2 + 1)
    assert not kept.fits(MOST_DATA // 2 + 2)
    kept.add(2, read(1))
    assert kept.presses


def test_how_many_reads_are_kept() -> None:
    kept = Kept(1)
    for at in range(MOST_READS):
        assert kept.presses is (2 * at >= MOST_READS)
        assert kept.fits(1)
        kept.add(1 + at, read(1))
    assert not kept.fits(1)


def test_the_oldest_keep_their_place() -> None:
    """What the initiator misses is among them."""
    kept, each = filled(1, MOST_PDUS)
    assert kept.surplus() is None
    kept.add(MOST_PDUS + 1, made())
    assert kept.surplus() is each[-1]
    assert kept.surplus() is None
    assert kept.all()[:-1] == each[:-1]


def test_the_response_of_a_task_is_the_youngest_with_its_tag() -> None:
    """A tag is used again. Other answers with the same tag are not meant."""
    kept = Kept(1)
    old, new = made(7), made(7)
    for stat_sn, one in enumerate([old, new, made(7, bhs.TASK_MANAGEMENT_RESPONSE), made(8)], 1):
        kept.add(stat_sn, one)
    assert kept.of_task(7) == (2, new)
    assert kept.of_task(9) is None


def test_a_data_ack_finds_its_read_by_tag_and_lun() -> None:
    kept = Kept(1)
    one, other = made(1), made(2)
    one.ttt = 5
    kept.add(1, other)
    kept.add(2, one)
    assert kept.of_tag(5, LUN) is one
    assert kept.of_tag(5, b"\0\1" + bytes(6)) is None
    assert kept.of_tag(bhs.NO_TAG, LUN) is None  # ``other`` did not ask for one


@pytest.mark.parametrize("first", [10, LAST - 1])
@pytest.mark.parametrize(
    "begin, length, found",
    [
        (0, 1, [0]),
        (1, 2, [1, 2]),
        (1, 0, [1, 2, 3]),  # RunLength 0: all from there on
        (4, 0, []),
        (3, 2, pdu.REJECT_PROTOCOL_ERROR),  # beyond what was sent
        (5, 0, pdu.REJECT_PROTOCOL_ERROR),
        (-1, 1, pdu.REJECT_PROTOCOL_ERROR),  # acknowledged before
    ],
)
def test_the_statuses_that_a_snack_asks_for(
    first: int, begin: int, length: int, found: list[int] | int
) -> None:
    kept, each = filled(first, 4)
    numbers = [(first + at) & LAST for at in range(5)]
    asked = kept.statuses((first + begin) & LAST, length, numbers[4])
    if isinstance(found, int):
        assert asked == found
    else:
        assert asked == [(numbers[at], each[at]) for at in found]


def test_a_snack_for_all_that_is_not_acknowledged() -> None:
    """BegRun and RunLength 0 (RFC 7143 section 11.16.3)."""
    kept, each = filled(10, 4)
    kept.acknowledge(12)
    assert kept.statuses(0, 0, 14) == [(12, each[2]), (13, each[3])]


def test_a_snack_for_a_status_that_found_no_place() -> None:
    kept, _ = filled(1, MOST_PDUS)
    kept.add(MOST_PDUS + 1, made())
    kept.surplus()
    assert kept.statuses(MOST_PDUS, 1, MOST_PDUS + 2) == pdu.REJECT_SNACK


def test_bytes_of_answers_are_bounded() -> None:
    """The oldest keep their place, and PDUs without data are not given up for it."""
    kept = Kept(0)
    for at in range(2 * (MOST_INLINE >> 13)):
        kept.add(2 * at, KeptPdu(bytes([bhs.NOP_IN]) + bytes(47), bytes(8192), 5, LUN))
        kept.add(2 * at + 1, made(at))
        gone = kept.surplus()
        assert (gone is None) is (at < MOST_INLINE >> 13)
        assert gone is None or gone.inline
        assert kept.surplus() is None and kept.inline <= MOST_INLINE
    assert len(kept.all()) == 3 * (MOST_INLINE >> 13) and kept.oldest == 0
    kept.acknowledge(4 * (MOST_INLINE >> 13))
    assert kept.inline == 0 and not kept.all()
