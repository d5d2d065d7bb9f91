"""istgt: 29/00 for the first nexus of each LUN after its start, and for none later.

So a nexus that has lost something hears nothing where another host's, or that of `iserblk doctor`,
came before it. Seen with istgt 0.4~20111008 (tests/integration/test_istgt.py).
"""

from __future__ import annotations

from iserblk.scsi import sense
from iserblk.target.scsi.device import DeviceServer
from iserblk.target.seam import Nexus


class Device(DeviceServer):
    _told: frozenset[int] = frozenset()

    def greeting(self, _nexus: Nexus, lun: int) -> int:
        if lun in self._told:
            return 0
        self._told |= {lun}
        return sense.POWER_ON_OR_RESET
