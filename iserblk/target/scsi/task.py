"""A task inside the device server: how one command ends, or is carried out."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from iserblk.scsi import sense
from iserblk.scsi import status as sam
from iserblk.target.seam import DATA_IN, Nexus, ScsiTask

if TYPE_CHECKING:
    from iserblk.target.scsi.unit import LogicalUnit

Execute = Callable[["DeviceTask", memoryview, bool], bool]


class Ended(Exception):
    """The command ends with ``status``, nothing done. Never leaves the device server."""

    status = sam.CHECK_CONDITION
    sense = b""


class ReservationConflict(Ended):
    status = sam.RESERVATION_CONFLICT


class TaskAborted(Ended):
    status = sam.TASK_ABORTED


class CheckCondition(Ended):
    """The command ends with CHECK CONDITION; ``sense`` says why.

    ``code``: ASC << 8 | ASCQ. ``field``, ``bit``: what is wrong in the CDB (or the parameters).
    """

    def __init__(
        self,
        key: int,
        code: int,
        *,
        information: int | None = None,
        field: int | None = None,
        bit: int | None = None,
        field_in_cdb: bool = True,
    ) -> None:
        super().__init__(key, code)
        self.sense = sense.encode_fixed(
            key, code >> 8, code & 0xFF, information, field, bit, field_in_cdb
        )


def invalid_field(field: int, bit: int | None = None) -> CheckCondition:
    """Byte ``field`` of the CDB asks for what is not to be had."""
    return CheckCondition(sense.ILLEGAL_REQUEST, sense.INVALID_FIELD_IN_CDB, field=field, bit=bit)


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
