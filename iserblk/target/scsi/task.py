"""The device server's form of a task: the parameters of one command, and how to execute it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from iserblk.target.scsi.ended import TaskAborted
from iserblk.target.scsi.unit import LogicalUnit
from iserblk.target.seam import DATA_IN, Nexus, ScsiTask

Execute = Callable[["DeviceTask", memoryview, bool], bool]


def check_wanted(task: DeviceTask) -> None:
    """Raises TaskAborted if the task was cancelled. Long commands call it between their steps."""
    if task.cancelled:
        raise TaskAborted


def nothing(task: DeviceTask, buffer: memoryview, nowait: bool) -> bool:
    return True


def _copy_answer(task: DeviceTask, buffer: memoryview, nowait: bool) -> bool:
    buffer[: task.length] = task.answer
    task.transferred = task.length
    return True


# A constant, as compiled code looks a function that is no call up in a table.
_NOTHING: Final[Execute] = nothing


class DeviceTask(ScsiTask):
    """A ScsiTask with what the device server needs to execute it. ``DeviceServer.run`` calls
    ``execute(task, buffer, nowait)`` and returns its result; ``execute`` may raise Ended or
    OSError. ``offset``: first byte of the LUN that the command uses. ``extent``: the number of
    those bytes, if it is not ``length``. ``durable``: write to stable storage before GOOD."""

    __slots__ = ("answer", "durable", "execute", "extent", "failure", "nexus", "offset", "unit")

    # Set by the device server, for commands that reach a unit.
    nexus: Nexus
    # Set by the commands that need them.
    answer: bytes
    durable: bool
    extent: int
    unit: LogicalUnit
    # Set where an error of the store is the reason for the status.
    failure: OSError

    def __init__(self, cdb: bytes) -> None:
        # The fields of ScsiTask are set here: a call to its constructor costs more than that.
        self.cdb = cdb
        self.direction = 0
        self.length = 0
        self.may_block = False
        self.in_loop = False
        self.cancelled = False
        self.stop = None
        self.status = 0
        self.sense = b""
        self.transferred = 0
        self.execute: Execute = _NOTHING
        self.offset = 0

    def was_answered(self) -> None:
        failure: OSError | None = getattr(self, "failure", None)
        if failure is not None:
            self.unit.unflushed.answered(self.nexus, failure)

    def respond(self, answer: bytes, allocation: int) -> None:
        """Return ``answer`` as Data-In, cut to ``allocation`` bytes."""
        self.answer = answer[:allocation]
        if self.answer:
            self.direction = DATA_IN
            self.length = len(self.answer)
            self.execute = _copy_answer
