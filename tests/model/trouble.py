"""A device server that reports temporary errors and losses, which an initiator must bear."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Mapping

from iserblk.scsi import lba as lba_data
from iserblk.scsi import opcodes, sense
from iserblk.scsi import status as sam
from iserblk.scsi.cdb import FUA, NDOB
from iserblk.target.ports import TargetPorts
from iserblk.target.scsi.device import DeviceServer, LogicalUnit
from iserblk.target.scsi.task import DeviceTask
from iserblk.target.seam import DATA_OUT, Nexus, ScsiTask

# Errors of a command that was not carried out, and succeeds when it is sent again.
_COMMANDS_CLEARED = 0x2F00
_BECOMING_READY = 0x0401
_NO_ADDITIONAL = 0x0000
_RECOVERED_WITH_RETRIES = 0x1701
_MODE_CHANGED = 0x2A01
PASSING: tuple[tuple[int, bytes], ...] = (
    (sam.BUSY, b""),
    (sam.TASK_SET_FULL, b""),
    (sam.CHECK_CONDITION, sense.encode_fixed(sense.UNIT_ATTENTION, _COMMANDS_CLEARED >> 8, 0)),
    (
        sam.CHECK_CONDITION,
        sense.encode_fixed(sense.NOT_READY, _BECOMING_READY >> 8, _BECOMING_READY & 0xFF),
    ),
    (sam.CHECK_CONDITION, sense.encode_fixed(sense.ABORTED_COMMAND, _NO_ADDITIONAL, 0)),
)
# Errors after which an initiator that connects again ends the attempt, and tries later.
_INTERNAL_FAILURE = 0x4400
FAILING = (
    *PASSING,
    (
        sam.CHECK_CONDITION,
        sense.encode_fixed(sense.HARDWARE_ERROR, _INTERNAL_FAILURE >> 8, _INTERNAL_FAILURE & 0xFF),
    ),
)
RECOVERED = sense.encode_fixed(
    sense.RECOVERED_ERROR, _RECOVERED_WITH_RETRIES >> 8, _RECOVERED_WITH_RETRIES & 0xFF
)
FLUSH_FAILED = sense.encode_fixed(
    sense.MEDIUM_ERROR, sense.WRITE_ERROR >> 8, sense.WRITE_ERROR & 0xFF
)

# Commands that an initiator sends before it uses a LUN.
_IDENTIFY = frozenset(
    (
        opcodes.INQUIRY,
        opcodes.READ_CAPACITY_10,
        opcodes.SERVICE_ACTION_IN_16,
        opcodes.MODE_SENSE_6,
        opcodes.MODE_SENSE_10,
        opcodes.TEST_UNIT_READY,
    )
)
_FLUSH = frozenset((opcodes.SYNCHRONIZE_CACHE_10, opcodes.SYNCHRONIZE_CACHE_16))
_ACTION = 0x1F
# Provisioning statuses of blocks that hold data, or may.
_NO_HOLES = (lba_data.MAPPED, lba_data.MAPPED_FOR_SURE, lba_data.UNKNOWN)
SLOW = 0.3  # share of the commands
MOST_S = 0.004
MOST_BLOCKS = 1  # of a READ or WRITE, where long ones are refused
_MOST = 8  # temporary errors in a row: fewer than an initiator bears


def _asks_for_extents(cdb: bytes) -> bool:
    return cdb[0] == opcodes.SERVICE_ACTION_IN_16 and cdb[1] & _ACTION == opcodes.SA_GET_LBA_STATUS


class Troubles:
    """Errors that the next commands will get: how many of each kind. Survives a crash of the
    target. Methods may be called from any thread."""

    def __init__(self, seed: object) -> None:
        self._chance = random.Random(f"troubles {seed}")
        self._mutex = threading.Lock()
        self._left = {"passing": 0, "identify": 0, "recovered": 0, "flush": 0}
        self._refused = 0

    def refuse(self, what: int) -> None:
        """Refuse from now on, by the bits of ``what``: WRITE SAME, long transfers, WRITE SAME
        without data, GET LBA STATUS, FUA."""
        self._refused = what

    def _refuses(self, cdb: bytes) -> int:
        """ASC << 8 | ASCQ with which the LUN refuses a command; 0: it does not."""
        opcode, what = cdb[0], self._refused
        if opcode == opcodes.WRITE_SAME_16:
            if what & 1:
                return sense.INVALID_OPERATION_CODE
            return sense.INVALID_FIELD_IN_CDB if what & 4 and cdb[1] & NDOB else 0
        if opcode in (opcodes.READ_16, opcodes.WRITE_16):
            long = int.from_bytes(cdb[10:14], "big") > MOST_BLOCKS
            fua = opcode == opcodes.WRITE_16 and cdb[1] & FUA
            return sense.INVALID_FIELD_IN_CDB if (what & 2 and long) or (what & 16 and fua) else 0
        return sense.INVALID_FIELD_IN_CDB if what & 8 and _asks_for_extents(cdb) else 0

    def add(self, kind: str, count: int) -> None:
        with self._mutex:
            self._left[kind] = min(_MOST, self._left[kind] + count)

    def _take(self, kind: str) -> bool:
        if not self._left[kind]:
            return False
        with self._mutex:
            taken = self._left[kind] > 0
            self._left[kind] -= taken
            return taken

    def instead_of(self, cdb: bytes) -> tuple[int, bytes] | None:
        """Status and sense data for a command that is not to be carried out; None: carry it out."""
        code = self._refuses(cdb)
        if code:
            refusal = sense.encode_fixed(sense.ILLEGAL_REQUEST, code >> 8, code & 0xFF)
            return sam.CHECK_CONDITION, refusal
        opcode = cdb[0]
        if opcode in _IDENTIFY and not _asks_for_extents(cdb):
            return self._chance.choice(FAILING) if self._take("identify") else None
        if opcode in _FLUSH and self._take("flush"):
            return sam.CHECK_CONDITION, FLUSH_FAILED
        return self._chance.choice(PASSING) if self._take("passing") else None

    def forget(self) -> None:
        """Drop all pending errors, for a new client."""
        with self._mutex:
            self._left = dict.fromkeys(self._left, 0)
            self._refused = 0

    def recovered(self) -> bool:
        return self._take("recovered")

    def is_slow(self) -> bool:
        """Whether the next command is carried out slowly, in a thread."""
        return self._chance.random() < SLOW

    def take_time(self) -> None:
        time.sleep(self._chance.random() * MOST_S)

    def any_status(self) -> int:
        """A random provisioning status of mapped blocks."""
        return self._chance.choice(_NO_HOLES)


class TroubledDevice(DeviceServer):
    """A device server with ``troubles``. Its UNMAP reports the parameters as residual, and its
    mapped blocks have any of the three provisioning statuses that are no holes."""

    def __init__(
        self,
        troubles: Troubles,
        luns: Mapping[int, LogicalUnit],
        iqn: str,
        ports: TargetPorts | None = None,
    ) -> None:
        super().__init__(luns, iqn, ports)
        self._troubles = troubles
        self._resets = 0
        self._began: dict[ScsiTask, int] = {}  # resets before a command began

    def begin(self, nexus: Nexus, lun: int, cdb: bytes) -> ScsiTask:
        task = super().begin(nexus, lun, cdb)
        if task.status == sam.GOOD:
            instead = self._troubles.instead_of(cdb)
            if instead is not None:
                task = DeviceTask(cdb)
                task.status, task.sense = instead
            else:
                self._began[task] = self._resets
                task.may_block |= self._troubles.is_slow()
        return task

    def run(self, task: ScsiTask, buffer: memoryview | None, nowait: bool = False) -> bool:
        if not nowait:
            self._troubles.take_time()
        if not super().run(task, buffer, nowait):
            return False
        if self._began.pop(task, self._resets) != self._resets:
            task.status, task.transferred = sam.TASK_ABORTED, 0
        if task.status != sam.GOOD:
            return True
        if _asks_for_extents(task.cdb):
            assert buffer is not None
            self._vary(buffer[: task.transferred])
        if self._troubles.recovered():
            task.status, task.sense = sam.CHECK_CONDITION, RECOVERED
            if task.direction == DATA_OUT:
                task.transferred = task.length
        elif task.cdb[0] == opcodes.UNMAP:
            task.length = 0  # so the residual says that no byte was moved
        return True

    def _vary(self, answer: memoryview) -> None:
        size = lba_data.LBA_STATUS_DESCRIPTOR
        for at in range(lba_data.LBA_STATUS_HEADER, len(answer) - size + 1, size):
            if answer[at + 12] & 0x0F == lba_data.MAPPED:
                answer[at + 12] = self._troubles.any_status()

    def turn(self, unit: LogicalUnit) -> None:
        """Switch the write cache on or off, and tell initiators by a unit attention."""
        unit.write_cache = not unit.write_cache
        unit.store.flush()
        self._tell_all(_MODE_CHANGED)

    def reset(self) -> None:
        """The power was off for a moment: commands that have begun do not succeed."""
        self._resets += 1
        self._tell_all(sense.POWER_ON_OR_RESET)

    def _tell_all(self, code: int) -> None:
        for nexus in self._nexuses:
            self._attend(nexus, 0, code)
