"""3PAR before 3.2.2 MU3: a WRITE SAME of more than 8,192 blocks ends with INVALID FIELD IN CDB.

MAXIMUM WRITE SAME LENGTH is 0, which means that there is no limit. Told of in 2016, with fstrim and
mkfs on Linux; the vendor's note advises to set max_write_same_blocks of the host's disk.
"""

from __future__ import annotations

from collections.abc import Mapping

from iserblk.scsi import opcodes
from iserblk.target.ports import TargetPorts
from iserblk.target.scsi.unit import LogicalUnit
from tests.support.refusing import INVALID, Refusing, blocks_of

MOST = 8192  # blocks


class Device(Refusing):
    def __init__(
        self, luns: Mapping[int, LogicalUnit], iqn: str, ports: TargetPorts | None = None
    ) -> None:
        for unit in luns.values():
            unit.limits = unit.limits._replace(max_write_same_length=0)
        super().__init__(luns, iqn, ports)

    def refusal(self, cdb: bytes, unit: LogicalUnit) -> int:
        if cdb[0] not in (opcodes.WRITE_SAME_10, opcodes.WRITE_SAME_16):
            return 0
        return INVALID if (blocks_of(cdb) or unit.blocks) > MOST else 0
