"""SPC commands that answer from what the unit is: MODE SENSE and those that do nothing here."""

from __future__ import annotations

from iserblk.scsi import mode, sense
from iserblk.scsi.cdb import DBD
from iserblk.target.block import begin_flush
from iserblk.target.task import CheckCondition, DeviceTask, invalid_field
from iserblk.target.unit import LogicalUnit

_LLBAA = 0x10  # MODE SENSE(10): a long block descriptor is welcome
_START = 0x01
_NO_FLUSH = 0x04
_ALL_SUBPAGES = 0xFF


def begin_nothing(task: DeviceTask, unit: LogicalUnit) -> None:
    """TEST UNIT READY; PREVENT ALLOW MEDIUM REMOVAL, of a medium that cannot be removed."""


def begin_start_stop(task: DeviceTask, unit: LogicalUnit) -> None:
    """A file has no motor, and other initiators may use it: a stop is a flush."""
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
