"""Longhorn: its LUNs say that they have WRITE SAME (LBPWS and LBPWS10), and do not know it.

INVALID COMMAND OPERATION CODE for both forms: its tgt has the pages of a thin disk, and a backend
without the command (longhorn/longhorn issues 6854 and 6876: mkfs and copies with holes failed).
"""

from __future__ import annotations

from iserblk.scsi import opcodes
from iserblk.target.scsi.unit import LogicalUnit
from tests.support.refusing import UNKNOWN, Refusing


class Device(Refusing):
    def refusal(self, cdb: bytes, _unit: LogicalUnit) -> int:
        return UNKNOWN if cdb[0] in (opcodes.WRITE_SAME_10, opcodes.WRITE_SAME_16) else 0
