"""StatSN of a connection, ExpCmdSN and MaxCmdSN of a session, at the target."""

from __future__ import annotations

import pytest

from iserblk.iscsi import bhs
from iserblk.target.iscsi.numbers import CommandWindow, Numbers


def numbers(cmd_sn: int, depth: int) -> CommandWindow:
    made = CommandWindow()
    made.exp_cmd_sn = cmd_sn
    made.max_cmd_sn = (cmd_sn + depth - 1) & 0xFFFFFFFF
    return made


@pytest.mark.parametrize("first", [1, 0xFFFFFFFE, 0xFFFFFFFF, 0])
def test_window_is_as_wide_as_the_queue(first: int) -> None:
    """Commands are taken in order, up to MaxCmdSN, across 2^32."""
    made = numbers(first, 4)
    for index in range(4):
        assert made.accept(bhs.SCSI_COMMAND, (first + index) & 0xFFFFFFFF)
    over = (first + 4) & 0xFFFFFFFF
    assert not made.accept(bhs.SCSI_COMMAND, over)
    made.ended(0)
    assert made.accept(bhs.SCSI_COMMAND, over)


@pytest.mark.parametrize("number", [0, 2, 4, 5, 1000, 0x80000003])
def test_only_the_next_number_is_taken(number: int) -> None:
    """Any other number is ignored, and changes nothing."""
    made = numbers(3, 8)
    assert not made.accept(bhs.SCSI_COMMAND, number)
    assert (made.exp_cmd_sn, made.max_cmd_sn) == (3, 10)
    assert made.accept(bhs.SCSI_COMMAND, 3)


@pytest.mark.parametrize("first", [1, 0xFFFFFFFC, 0xFFFFFFFE, 0xFFFFFFFF, 0])
def test_what_is_early_may_wait(first: int) -> None:
    """Within the window, across 2^32; once."""
    made = numbers(first, 4)
    early = [made.may_wait((first + index) & 0xFFFFFFFF) for index in range(-2, 7)]
    assert early == [False] * 3 + [True] * 3 + [False] * 3
    made.note((first + 2) & 0xFFFFFFFF)
    assert not made.may_wait((first + 2) & 0xFFFFFFFF) and made.waiting == 1


def test_immediate_commands_move_nothing() -> None:
    """Any number of immediate commands leaves the window as wide as the queue is deep."""
    made = numbers(3, 8)
    for _ in range(100):
        assert made.accept(bhs.NOP_OUT | bhs.IMMEDIATE, 3)
        made.ended(bhs.IMMEDIATE)
    assert (made.exp_cmd_sn, made.max_cmd_sn) == (3, 10)


def test_stat_sn_wraps() -> None:
    made = Numbers(CommandWindow())
    made.stat_sn = 0xFFFFFFFF
    assert [made.take_stat_sn() for _ in range(3)] == [0xFFFFFFFF, 0, 1]
