"""A target that refuses to move more than its MaxBurstLength with one command.

INVALID FIELD IN CDB for READ and WRITE of more than 128 KiB, whatever MAXIMUM TRANSFER LENGTH says.
One such target was reported, without its name.
"""

from __future__ import annotations

from iserblk.scsi import opcodes
from iserblk.target.scsi.unit import LogicalUnit
from tests.support.refusing import INVALID, Refusing, blocks_of

MOST = 128 << 10  # bytes
TRANSFERS = (opcodes.READ_10, opcodes.READ_16, opcodes.WRITE_10, opcodes.WRITE_16)


class Device(Refusing):
    def refusal(self, cdb: bytes, unit: LogicalUnit) -> int:
        if cdb[0] not in TRANSFERS:
            return 0
        return INVALID if blocks_of(cdb) * unit.block > MOST else 0
