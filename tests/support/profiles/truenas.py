"""TrueNAS: GET LBA STATUS for the last LBAs of a LUN ends with INVALID FIELD IN CDB.

TheGrandWazoo/freenas-proxmox issues 165, 203 and 277: a machine's start took minutes, and logs were
full of it.
"""

from __future__ import annotations

from iserblk.scsi import opcodes
from iserblk.target.scsi.unit import LogicalUnit
from tests.support.refusing import INVALID, Refusing

LAST = 2048  # blocks


class Device(Refusing):
    def refusal(self, cdb: bytes, unit: LogicalUnit) -> int:
        asks = cdb[0] == opcodes.SERVICE_ACTION_IN_16 and cdb[1] & 0x1F == opcodes.SA_GET_LBA_STATUS
        if not asks or int.from_bytes(cdb[2:10], "big") < unit.blocks - LAST:
            return 0
        return INVALID
