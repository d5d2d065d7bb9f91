"""SPC commands: MODE SENSE, PERSISTENT RESERVE IN and OUT, target port groups, START STOP UNIT, and
commands that do nothing on a file.
"""

from __future__ import annotations

import logging
import threading

from iserblk.scsi import mode, opcodes, sense
from iserblk.scsi import reservations as pr
from iserblk.scsi.cdb import DBD
from iserblk.target.scsi.block import begin_flush
from iserblk.target.scsi.ended import CheckCondition, invalid_field
from iserblk.target.scsi.task import DeviceTask
from iserblk.target.scsi.unit import LogicalUnit
from iserblk.target.seam import DATA_OUT

log = logging.getLogger(__name__)

# PREEMPT AND ABORT fails if a write of a preempted nexus takes longer: that write may still land.
PREEMPT_TIMEOUT_S = 60.0

_LLBAA = 0x10  # MODE SENSE(10): the initiator accepts a long block descriptor
_START = 0x01
_NO_FLUSH = 0x04
_ALL_SUBPAGES = 0xFF


def begin_nothing(task: DeviceTask, unit: LogicalUnit) -> None:
    """TEST UNIT READY, and PREVENT ALLOW MEDIUM REMOVAL: the medium cannot be removed anyway."""


def begin_report_port_groups(task: DeviceTask, unit: LogicalUnit) -> None:
    """REPORT TARGET PORT GROUPS."""
    task.respond(task.nexus.port.ports.report(), int.from_bytes(task.cdb[6:10], "big"))


def begin_start_stop(task: DeviceTask, unit: LogicalUnit) -> None:
    """START STOP UNIT: a stop only flushes, as other initiators may use the file."""
    if not task.cdb[4] & (_START | _NO_FLUSH):
        begin_flush(task, unit)


def _pages(unit: LogicalUnit, cdb: bytes) -> bytes:
    control, page, subpage = cdb[2] >> 6, cdb[2] & 0x3F, cdb[3]
    if control == mode.PC_SAVED:
        raise CheckCondition(sense.ILLEGAL_REQUEST, sense.SAVING_NOT_SUPPORTED)
    if subpage not in (0, _ALL_SUBPAGES if page == mode.ALL else 0):
        raise invalid_field(3)
    pages = {
        mode.CACHING: mode.caching_page(unit.write_cache),
        mode.CONTROL: mode.control_page(),
    }
    if page != mode.ALL:
        if page not in pages:
            raise invalid_field(2, 5)
        pages = {page: pages[page]}
    if control == mode.PC_CHANGEABLE:
        return b"".join(map(mode.changeable, pages.values()))
    return b"".join(pages.values())


def _specific(unit: LogicalUnit) -> int:
    return mode.DPOFUA | (mode.WP if unit.read_only else 0)


def begin_mode_sense6(task: DeviceTask, unit: LogicalUnit) -> None:
    cdb = task.cdb
    pages = _pages(unit, cdb)
    descriptor = b"" if cdb[1] & DBD else mode.short_descriptor(unit.blocks, unit.block)
    task.respond(mode.encode_sense6(_specific(unit), descriptor, pages), cdb[4])


def begin_mode_sense10(task: DeviceTask, unit: LogicalUnit) -> None:
    cdb = task.cdb
    pages = _pages(unit, cdb)
    if cdb[1] & DBD:
        descriptor = b""
    elif cdb[1] & _LLBAA:
        descriptor = mode.long_descriptor(unit.blocks, unit.block)
    else:
        descriptor = mode.short_descriptor(unit.blocks, unit.block)
    answer = mode.encode_sense10(_specific(unit), descriptor, pages)
    task.respond(answer, int.from_bytes(cdb[7:9], "big"))


# -- persistent reservations -----------------------------------------------------------------------


def begin_reserve_in(task: DeviceTask, unit: LogicalUnit) -> None:
    _, action, allocation = pr.IN_CDB.unpack_from(task.cdb)
    task.respond(unit.reservations.answer(action), allocation)


def begin_reserve_out(task: DeviceTask, unit: LogicalUnit) -> None:
    length = int.from_bytes(task.cdb[5:9], "big")
    if length != pr.PARAMETER_LENGTH:
        raise CheckCondition(sense.ILLEGAL_REQUEST, sense.PARAMETER_LIST_LENGTH_ERROR)
    task.unit = unit
    task.direction = DATA_OUT
    task.length = length
    task.execute = _reserve_out


def _reserve_out(task: DeviceTask, buffer: memoryview, nowait: bool) -> bool:
    """Change the reservations. Must not block: only the thread that begins commands may change
    them. The wait for tasks of preempted nexuses follows in a thread."""
    parameters = pr.decode_parameters(buffer)
    _, action, scope_type, _ = pr.OUT_CDB.unpack_from(task.cdb)
    victims = task.unit.reservations.change(task.nexus.name, action, scope_type, parameters)
    log.info("%s: %s", task.nexus.name.initiator.name, opcodes.name(task.cdb))
    if not victims:
        return True
    ended = threading.Semaphore(0)
    running = task.unit.end_tasks(victims, ended.release)
    if not running:
        return True

    def wait(_task: DeviceTask, _buffer: memoryview, nowait: bool) -> bool:
        """Wait for tasks of preempted nexuses: none may write to the medium after GOOD."""
        if nowait:
            return False
        for _ in range(running):
            if not ended.acquire(timeout=PREEMPT_TIMEOUT_S):
                raise CheckCondition(sense.HARDWARE_ERROR, sense.INTERNAL_TARGET_FAILURE)
        return True

    task.execute = wait
    return wait(task, buffer, nowait)
