"""Block volumes of Oracle's cloud: no SYNCHRONIZE CACHE, and no caching page that tells of a cache.

INVALID COMMAND OPERATION CODE for both forms (nanovms/nanos pull request 2184, koverstreet/bcachefs
issue 126). What they acknowledge is on stable storage.
"""

from __future__ import annotations

from iserblk.scsi import mode, opcodes
from iserblk.target.scsi.unit import LogicalUnit
from tests.support.refusing import INVALID, UNKNOWN, Refusing

FLUSHES = (opcodes.SYNCHRONIZE_CACHE_10, opcodes.SYNCHRONIZE_CACHE_16)
SENSES = (opcodes.MODE_SENSE_6, opcodes.MODE_SENSE_10)


class Device(Refusing):
    def refusal(self, cdb: bytes, _unit: LogicalUnit) -> int:
        if cdb[0] in SENSES and cdb[2] & mode.PAGE_CODE in (mode.CACHING, mode.ALL):
            return INVALID
        return UNKNOWN if cdb[0] in FLUSHES else 0
