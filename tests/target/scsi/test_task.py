"""What one command asks of the device server."""

from __future__ import annotations

import pytest

from iserblk.target.scsi.ended import TaskAborted
from iserblk.target.scsi.task import DeviceTask, check_wanted, nothing
from iserblk.target.seam import DATA_IN, NO_DATA, ScsiTask


@pytest.mark.plain("looks at __slots__")
def test_it_begins_as_every_task_does() -> None:
    """The constructor sets all fields of ScsiTask by itself, and to the same values."""
    task, plain = DeviceTask(b"\x12" * 6), ScsiTask(b"\x12" * 6)
    for field in ScsiTask.__slots__:
        assert getattr(task, field) == getattr(plain, field), field


@pytest.mark.parametrize(("allocation", "data"), [(255, b"answer"), (3, b"ans"), (6, b"answer")])
def test_an_answer_is_cut_to_the_allocation_length(allocation: int, data: bytes) -> None:
    task = DeviceTask(bytes(6))
    task.respond(b"answer", allocation)
    assert (task.direction, task.length) == (DATA_IN, len(data))
    buffer = bytearray(10)
    assert task.execute(task, memoryview(buffer), True)
    assert buffer == data + bytes(10 - len(data)) and task.transferred == len(data)


@pytest.mark.parametrize(("answer", "allocation"), [(b"answer", 0), (b"", 255)])
def test_no_data_at_all(answer: bytes, allocation: int) -> None:
    task = DeviceTask(bytes(6))
    task.respond(answer, allocation)
    assert (task.direction, task.length, task.execute) == (NO_DATA, 0, nothing)


def test_a_cancelled_task_ends_at_its_next_step() -> None:
    task = DeviceTask(bytes(16))
    check_wanted(task)
    task.cancelled = True
    with pytest.raises(TaskAborted):
        check_wanted(task)
