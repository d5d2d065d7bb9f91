"""Synology with emulate_sync_cache=0: no SYNCHRONIZE CACHE, and a caching page with WCE=1.

INVALID COMMAND OPERATION CODE for both forms. Nothing can be made durable there but by FUA.
"""

from __future__ import annotations

from iserblk.target.scsi.unit import LogicalUnit
from tests.support.profiles.oracle_cloud import FLUSHES
from tests.support.refusing import UNKNOWN, Refusing


class Device(Refusing):
    def refusal(self, cdb: bytes, _unit: LogicalUnit) -> int:
        return UNKNOWN if cdb[0] in FLUSHES else 0
