"""istgt: each LUN tells of a power on once after its start, for the first command that may hear it.

That is 29/00. A nexus that has lost something hears nothing where another host, or `iserblk info`,
came before. Seen with istgt 0.4~20111008 (tests/integration/test_istgt.py).
"""

from __future__ import annotations

from iserblk.scsi import sense
from iserblk.target.scsi.device import DeviceServer
from iserblk.target.seam import Nexus, ScsiTask


class Device(DeviceServer):
    _told: frozenset[int] = frozenset()

    def greeting(self, _nexus: Nexus, lun: int) -> int:
        return 0 if lun in self._told else sense.POWER_ON_OR_RESET

    def begin(self, nexus: Nexus, lun: int, cdb: bytes) -> ScsiTask:
        task = super().begin(nexus, lun, cdb)
        if task.sense and sense.decode(task.sense).code == sense.POWER_ON_OR_RESET:
            self._told |= {lun}
            for each in self._nexuses:
                self._forget_attention(each, lun, sense.POWER_ON_OR_RESET)
        return task
