"""tgtd: 29/00 for each new nexus, whether anything was lost or not.

Seen with tgt 1.0.85 (tests/integration/test_tgtd_cache.py). Our own target does the same: the
profile keeps the habit should ours change.
"""

from __future__ import annotations

from iserblk.scsi import sense
from iserblk.target.scsi.device import DeviceServer
from iserblk.target.seam import Nexus


class Device(DeviceServer):
    def greeting(self, _nexus: Nexus, _lun: int) -> int:
        return sense.POWER_ON_OR_RESET
