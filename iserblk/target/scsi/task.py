"""A task inside the device server: what one command asks for, and how it is carried out."""

from __future__ import annotations

from collections.abc import Callable

from iserblk.target.scsi.ended import TaskAborted
from iserblk.target.scsi.unit import LogicalUnit
from iserblk.target.seam import DATA_IN, Nexus, ScsiTask

Execute = Callable[["DeviceTask", memoryview, bool], bool]


def check_wanted(task: DeviceTask) -> None:
    """Between the steps of what takes long: raises TaskAborted where it was cancelled."""
    if task.cancelled:
        raise TaskAborted


def nothing(task: DeviceTask, buffer: memoryview, nowait: bool) -> bool:
    return True


def _copy_answer(task: DeviceTask, buffer: memoryview, nowait: bool) -> bool:
    buffer[: task.length] = task.answer
    task.transferred = task.length
    return True


class DeviceTask(ScsiTask):
    """``execute(task, buffer, nowait)`` is what ``DeviceServer.run`` calls; it returns as that
    does, and may raise Ended or OSError. ``offset``: bytes, where the LUN is touched;
    ``extent``: bytes of it, where that is not ``length``."""

    __slots__ = ("answer", "durable", "execute", "extent", "nexus", "offset", "unit")

    # Set by the device server, for commands that reach a unit.
    nexus: Nexus
    # Set by the commands that need them.
    answer: bytes
    durable: bool
    extent: int
    unit: LogicalUnit

    def __init__(self, cdb: bytes) -> None:
        # The fields of ScsiTask, set here: a call to its constructor costs more than they do.
        self.cdb = cdb
        self.direction = 0
        self.length = 0
        self.may_block = False
        self.cancelled = False
        self.plan = None
        self.status = 0
        self.sense = b""
        self.transferred = 0
        self.execute: Execute = nothing
        self.offset = 0

    def respond(self, answer: bytes, allocation: int) -> None:
        """Data-In that is known already, cut to the allocation length."""
        self.answer = answer[:allocation]
        if self.answer:
            self.direction = DATA_IN
            self.length = len(self.answer)
            self.execute = _copy_answer
