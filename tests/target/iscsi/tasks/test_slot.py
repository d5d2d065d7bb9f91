"""One command at the target: its response with residuals and sense, and its unsolicited data."""

from __future__ import annotations

from typing import cast

import pytest

from iserblk.errors import RemoteProtocolError
from iserblk.iscsi import bhs, pdu
from iserblk.scsi import status as sam
from iserblk.target.iscsi.numbers import CommandWindow, Numbers
from iserblk.target.iscsi.tasks.slot import Allegiance, TargetTask, pack_response
from iserblk.target.seam import BIDIRECTIONAL, DATA_IN, DATA_OUT, ScsiTask

READ = bhs.FLAG_READ
WRITE = bhs.FLAG_WRITE
OVER, UNDER = bhs.RESIDUAL_OVERFLOW, bhs.RESIDUAL_UNDERFLOW
BIDI_OVER, BIDI_UNDER = bhs.BIDI_OVERFLOW, bhs.BIDI_UNDERFLOW


def task(flags: int, direction: int, edtl: int) -> TargetTask:
    slot = TargetTask(3)
    slot.bhs, slot.inline = memoryview(bytearray(b"\xff" * 48)), memoryview(bytearray(64))
    slot.itt, slot.flags, slot.edtl = 0x1234, flags, edtl
    slot.task = ScsiTask(bytes(16))
    slot.task.direction = direction
    return slot


def packed(slot: TargetTask, moved: int) -> pdu.ScsiResponse:
    window = CommandWindow()
    window.exp_cmd_sn, window.max_cmd_sn = 7, 10
    numbers = Numbers(window)
    numbers.stat_sn = 100
    pack_response(slot, moved, numbers)
    assert numbers.stat_sn == 101
    response = pdu.ScsiResponse.unpack_from(slot.bhs)
    assert (response.stat_sn, response.exp_cmd_sn, response.max_cmd_sn) == (100, 7, 10)
    assert (response.itt, response.response) == (0x1234, 0)
    return response


@pytest.mark.parametrize(
    "edtl, moved, flag, residual",
    [(512, 512, 0, 0), (512, 500, UNDER, 12), (512, 0, UNDER, 512), (512, 600, OVER, 88)],
)
def test_the_residual_is_what_differs_from_the_expected_length(
    edtl: int, moved: int, flag: int, residual: int
) -> None:
    response = packed(task(READ, DATA_IN, edtl), moved)
    assert (response.flags, response.residual) == (bhs.FLAG_FINAL | flag, residual)
    assert response.bidi_residual == 0


def test_a_write_that_asks_for_more_than_it_was_promised() -> None:
    """The target fetches EDTL bytes and no more: the rest is the overflow, though all was moved."""
    slot = task(WRITE, DATA_OUT, 512)
    slot.overflow = 1024
    response = packed(slot, 512)
    assert (response.flags, response.residual) == (bhs.FLAG_FINAL | OVER, 1024)


@pytest.mark.parametrize(
    "given, flag, residual", [(256, 0, 0), (250, BIDI_UNDER, 6), (300, BIDI_OVER, 44)]
)
def test_a_bidirectional_command_has_a_residual_each_way(
    given: int, flag: int, residual: int
) -> None:
    slot = task(READ | WRITE, BIDIRECTIONAL, 512)
    slot.read_length = 256
    slot.task.transferred = given
    response = packed(slot, 500)
    assert response.flags == bhs.FLAG_FINAL | UNDER | flag
    assert (response.residual, response.bidi_residual) == (12, residual)


def test_a_command_that_gives_nothing_though_data_in_is_expected() -> None:
    """``transferred`` counts only for a task that gives Data-In."""
    slot = task(READ | WRITE, DATA_OUT, 512)
    slot.read_length = 256
    slot.task.transferred = 99
    response = packed(slot, 512)
    assert response.flags == bhs.FLAG_FINAL | BIDI_UNDER
    assert (response.residual, response.bidi_residual) == (0, 256)


def test_sense_data_follows_its_length() -> None:
    slot = task(READ, DATA_IN, 0)
    slot.task.status, slot.task.sense = sam.CHECK_CONDITION, b"sense"
    response = packed(slot, 0)
    assert (response.status, response.data_length) == (sam.CHECK_CONDITION, 7)
    assert bytes(slot.inline[: slot.inline_length]) == b"\0\5sense"


def test_sense_data_of_the_command_before_is_not_sent_again() -> None:
    slot = task(READ, DATA_IN, 0)
    slot.task.status, slot.task.sense = sam.CHECK_CONDITION, b"sense"
    packed(slot, 0)
    slot.task = ScsiTask(bytes(16))
    response = packed(slot, 0)
    assert (response.status, response.data_length, slot.inline_length) == (sam.GOOD, 0, 0)


def data_out(data_sn: int, offset: int) -> pdu.DataOut:
    return pdu.DataOut(
        flags=0,
        data_length=0,
        lun=bytes(8),
        itt=0x1234,
        exp_stat_sn=1,
        data_sn=data_sn,
        buffer_offset=offset,
    )


def test_unsolicited_data_comes_in_order() -> None:
    slot = task(WRITE, DATA_OUT, 8192)
    slot.unsolicited.check(data_out(0, 0))
    slot.unsolicited.data_sn, slot.unsolicited.arrived = 1, 4096
    slot.unsolicited.check(data_out(1, 4096))


@pytest.mark.parametrize("data_sn, offset", [(0, 4096), (2, 4096), (1, 0), (1, 8192)])
def test_unsolicited_data_that_is_not_the_next(data_sn: int, offset: int) -> None:
    slot = task(WRITE, DATA_OUT, 8192)
    slot.unsolicited.data_sn, slot.unsolicited.arrived = 1, 4096
    with pytest.raises(RemoteProtocolError, match="expected 1 at 4096"):
        slot.unsolicited.check(data_out(data_sn, offset))


def test_a_task_that_is_reassigned_has_the_memory_of_its_new_connection() -> None:
    """What completes there is about this task; what the task has done stays."""
    slot, fresh = task(READ, DATA_IN, 512), task(0, 0, 0)
    fresh.index = 9
    slot.busy, slot.kept, slot.stat_sn = 2, True, 50
    command, elsewhere = slot.task, cast(Allegiance, object())
    slot.adopt(fresh, elsewhere)
    assert slot.connection is elsewhere
    assert slot.bhs is fresh.bhs and slot.inline is fresh.inline
    assert slot.transfer is fresh.transfer and slot.transfer.token is slot
    assert slot.request.token is slot
    assert (slot.index, slot.busy, slot.kept, slot.reassigned) == (9, 0, False, True)
    assert slot.task is command and (slot.itt, slot.edtl) == (0x1234, 512)
