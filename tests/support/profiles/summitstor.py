"""SummitStor: its LUNs say that they are thin (LBPME, LBPU), and do not know UNMAP.

INVALID COMMAND OPERATION CODE (summitstor issue 40). xcp issue 253 tells the same of a target.
"""

from __future__ import annotations

from iserblk.scsi import opcodes
from iserblk.target.scsi.unit import LogicalUnit
from tests.support.refusing import UNKNOWN, Refusing


class Device(Refusing):
    def refusal(self, cdb: bytes, _unit: LogicalUnit) -> int:
        return UNKNOWN if cdb[0] == opcodes.UNMAP else 0
