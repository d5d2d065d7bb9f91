"""EqualLogic: GET LBA STATUS counts in blocks of 512 bytes, whatever the LUN's blocks are.

So with blocks of 4,096 bytes an answer is about another place than was asked for, and its extents
are eight times as long (sahlberg/libiscsi pull request 125).
"""

from __future__ import annotations

import struct

from iserblk.scsi import lba, opcodes
from iserblk.target.scsi.task import DeviceTask
from iserblk.target.scsi.unit import LogicalUnit
from iserblk.target.seam import ScsiTask
from tests.support.refusing import Refusing

_DESCRIPTOR = struct.Struct(">QI")


class Device(Refusing):
    def refusal(self, _cdb: bytes, _unit: LogicalUnit) -> int:
        return 0

    def other(self, task: DeviceTask) -> ScsiTask:
        cdb = task.cdb
        if cdb[0] != opcodes.SERVICE_ACTION_IN_16 or cdb[1] & 0x1F != opcodes.SA_GET_LBA_STATUS:
            return task
        execute, times = task.execute, task.unit.block // 512

        def counting(task: DeviceTask, buffer: memoryview, nowait: bool) -> bool:
            done = execute(task, buffer, nowait)
            at = lba.LBA_STATUS_HEADER
            while done and at + lba.LBA_STATUS_DESCRIPTOR <= task.transferred:
                first, blocks = _DESCRIPTOR.unpack_from(buffer, at)
                told = min(blocks * times, 0xFFFFFFFF)
                _DESCRIPTOR.pack_into(buffer, at, first * times, told)
                at += lba.LBA_STATUS_DESCRIPTOR
            return done

        task.execute = counting
        return task
