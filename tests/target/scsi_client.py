"""A nexus of the device server, for tests: commands in, status, sense and data out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from iserblk.scsi import sense
from iserblk.scsi import status as sam
from iserblk.target.ports import ONLY_PORT, TargetPort
from iserblk.target.scsi.device import DeviceServer, LogicalUnit
from iserblk.target.seam import DATA_IN, DATA_OUT, Nexus
from iserblk.target.store.store import FileStore

IQN = "iqn.2026-11.example:disk"
INITIATOR = "iqn.2026-11.example:host"


@dataclass
class Answer:
    status: int
    code: tuple[int, int]  # sense key, ASC << 8 | ASCQ
    sense: sense.Sense
    data: bytes


GOOD = (0, 0)
LBA_OUT_OF_RANGE = (sense.ILLEGAL_REQUEST, sense.LBA_OUT_OF_RANGE)
INVALID_FIELD = (sense.ILLEGAL_REQUEST, sense.INVALID_FIELD_IN_CDB)
NO_SUCH_LUN = (sense.ILLEGAL_REQUEST, sense.LUN_NOT_SUPPORTED)
UNKNOWN_COMMAND = (sense.ILLEGAL_REQUEST, sense.INVALID_OPERATION_CODE)
WRITE_PROTECTED = (sense.DATA_PROTECT, sense.WRITE_PROTECTED)
POWER_ON = (sense.UNIT_ATTENTION, sense.POWER_ON_OR_RESET)
LUN_RESET = (sense.UNIT_ATTENTION, sense.LUN_RESET)


class Client:
    """Runs one command at a time, as a connection would."""

    def __init__(
        self,
        server: DeviceServer,
        lun: int = 0,
        ready: bool = True,
        name: str = INITIATOR,
        isid: bytes = b"\x80abcde",
        port: TargetPort = ONLY_PORT,
    ) -> None:
        self.server = server
        self.lun = lun
        self.nexus = Nexus(name, isid, self, port)
        self.running = 0  # tasks that threads are said to be in
        self.ended_tasks: list[int] = []  # of these LUNs, by another nexus
        self.tell_ended: Callable[[], None]
        server.attach(self.nexus)
        if ready:
            assert self.code(bytes(6)) == POWER_ON

    def end_tasks(self, lun: int, ended: Callable[[], None], tas: bool = True) -> int:
        self.ended_tasks.append(lun)
        self.tell_ended = ended
        return self.running

    def lose_lun(self, lun: int, ended: Callable[[], None]) -> int:
        return self.end_tasks(lun, ended)

    def tasks_of(self, lun: int) -> list[object]:
        return []

    def run(self, cdb: bytes, data: bytes = b"") -> Answer:
        task = self.server.begin(self.nexus, self.lun, cdb)
        buffer: memoryview | None = None
        if not task.status:
            if task.length:
                buffer = memoryview(bytearray(b"\xee" * task.length))
            if task.direction & DATA_OUT:
                assert buffer is not None and len(data) == len(buffer)
                buffer[:] = data
            else:
                assert not data
            if task.may_block or not self.server.run(task, buffer, True):
                assert self.server.run(task, buffer)
        answer = b""
        if task.direction & DATA_IN and buffer is not None:
            assert task.transferred <= task.length
            answer = bytes(buffer[: task.transferred])
        assert bool(task.sense) == (task.status == sam.CHECK_CONDITION)
        found = sense.decode(task.sense)
        return Answer(task.status, (found.key, found.code), found, answer)

    def code(self, cdb: bytes, data: bytes = b"") -> tuple[int, int]:
        """Sense key and code; GOOD where there is no sense."""
        return self.run(cdb, data).code

    def data(self, cdb: bytes) -> bytes:
        answer = self.run(cdb)
        assert answer.status == sam.GOOD, answer.sense
        return answer.data


def make_unit(fd: int, size: int, block: int = 512, **options: Any) -> LogicalUnit:
    return LogicalUnit(FileStore(fd, size), serial="SN-1", block=block, **options)
