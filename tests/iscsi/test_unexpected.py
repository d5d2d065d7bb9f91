"""The flow control of unexpected PDUs: what counts, and what retires it (RFC 7145 section 8.1)."""

from __future__ import annotations

import pytest

from iserblk.iscsi import bhs
from iserblk.iscsi.unexpected import (
    EXPECTED,
    MOST_TOLD,
    NO_LIMIT,
    REGULATED,
    UNEXPECTED,
    FromInitiator,
    FromTarget,
    category,
)

NO, NOW = 0, bhs.IMMEDIATE
LAST = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("opcode", "ttt", "expected"),
    [
        (bhs.SCSI_COMMAND | NO, bhs.NO_TAG, REGULATED),
        (bhs.SCSI_COMMAND | NOW, bhs.NO_TAG, UNEXPECTED),
        (bhs.TASK_MANAGEMENT_REQUEST | NO, bhs.NO_TAG, REGULATED),
        (bhs.TASK_MANAGEMENT_REQUEST | NOW, bhs.NO_TAG, UNEXPECTED),
        (bhs.TEXT_REQUEST | NO, bhs.NO_TAG, REGULATED),
        (bhs.TEXT_REQUEST | NOW, 5, UNEXPECTED),
        (bhs.LOGOUT_REQUEST | NO, bhs.NO_TAG, REGULATED),
        (bhs.LOGOUT_REQUEST | NOW, bhs.NO_TAG, UNEXPECTED),
        (bhs.NOP_OUT | NO, bhs.NO_TAG, REGULATED),  # a ping
        (bhs.NOP_OUT | NOW, bhs.NO_TAG, UNEXPECTED),
        (bhs.NOP_OUT | NOW, 5, EXPECTED),  # the answer to a ping of the target
        (bhs.DATA_OUT, bhs.NO_TAG, EXPECTED),  # unsolicited data
    ],
)
def test_categories_of_an_initiator_s_pdus(opcode: int, ttt: int, expected: str) -> None:
    """proves: ISER-8.1.1-1, ISER-8.1.1.2-1"""
    assert category(opcode, ttt) == expected


# shows: SYSTEM-34
def test_an_initiator_s_pdus_are_retired_by_exp_cmd_sn() -> None:
    """Those with CmdSN x: by an ExpCmdSN of x + 1 or more, which a PDU without the I bit brought
    about. proves: ISER-8.1.1.3-1, ISER-8.1.1.3-3"""
    ours = FromInitiator(3)
    ours.sent(7)
    ours.sent(7)
    assert not ours.full
    ours.sent(8)
    assert ours.full and ours.outstanding == 3
    ours.answered(7)  # nothing without the I bit has left since
    assert ours.full
    ours.answered(8)
    assert ours.outstanding == 1 and not ours.full
    ours.answered(20)
    assert ours.outstanding == 0


def test_numbers_wrap() -> None:
    ours, theirs = FromInitiator(2), FromTarget(2)
    ours.sent(LAST)
    theirs.sent(LAST)
    ours.answered(LAST)
    theirs.heard(LAST)
    assert (ours.outstanding, theirs.outstanding) == (1, 1)
    ours.answered(0)
    theirs.heard(0)
    assert (ours.outstanding, theirs.outstanding) == (0, 0)


def test_no_limit() -> None:
    """0, the default, and what a peer has that does not know the key."""
    ours, theirs = FromInitiator(NO_LIMIT), FromTarget(NO_LIMIT)
    for _ in range(1000):
        ours.sent(1)
        theirs.sent(1)
    assert not ours.full and not theirs.full and theirs.ping_allowed
    assert theirs.outstanding == 0  # nothing needs to be known of them
    theirs.sent(1, ttt=9)
    assert theirs.asked and theirs.outstanding == 1


def test_a_limit_that_no_memory_is_spent_on() -> None:
    """What an initiator may declare is as large as a number can be."""
    theirs = FromTarget(LAST)
    told = 0
    while not theirs.full:
        theirs.sent(told)
        told += 1
    assert told == MOST_TOLD and theirs.ping_allowed
    theirs.heard(told)
    assert not theirs.full and theirs.outstanding == 0


# shows: SYSTEM-34
def test_a_target_s_pdus_are_retired_by_exp_stat_sn() -> None:
    """Those with StatSN x: by an ExpStatSN of x + 1 or more.

    proves: ISER-8.1.2-1, ISER-8.1.2-2, ISER-8.1.2-3
    """
    theirs = FromTarget(4)
    for stat_sn in (50, 51, 52):
        theirs.sent(stat_sn)
    theirs.heard(50)
    assert theirs.outstanding == 3
    theirs.heard(52)
    assert theirs.outstanding == 1
    theirs.heard(53)
    assert theirs.outstanding == 0


def test_a_ping_is_retired_by_its_answer_as_well() -> None:
    """A NOP-In uses up no StatSN: another PDU has to, before ExpStatSN can retire it.

    proves: ISER-8.1.2-4
    """
    theirs = FromTarget(4)
    theirs.sent(50, ttt=9)
    theirs.sent(50)
    theirs.heard(50, ttt=8)  # an answer to another ping
    assert theirs.asked and theirs.outstanding == 2
    theirs.heard(50, ttt=9)
    assert not theirs.asked and theirs.outstanding == 1
    theirs.sent(50, ttt=10)
    theirs.heard(51)
    assert not theirs.asked and theirs.outstanding == 0


def test_the_last_place_is_for_a_ping() -> None:
    """proves: ISER-8.1.2-9"""
    theirs = FromTarget(3)
    theirs.sent(1)
    assert not theirs.full
    theirs.sent(2)
    assert theirs.full and theirs.ping_allowed
    theirs.sent(3, ttt=9)
    assert theirs.full and not theirs.ping_allowed
    theirs.heard(3, ttt=9)  # its ExpStatSN retires the others
    assert not theirs.full and theirs.outstanding == 0
