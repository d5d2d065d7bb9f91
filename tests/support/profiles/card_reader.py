"""A card reader, or a drive for removable media, among the LUNs of a target (LIO's pscsi, SCST's
dev_disk and istgt pass such devices through): LUN 1 is a disk whose medium is out.

TEST UNIT READY is answered with NOT READY, MEDIUM NOT PRESENT (SPC-4, TEST UNIT READY).
"""

from __future__ import annotations

from iserblk.scsi import opcodes, sense
from iserblk.scsi import status as sam
from iserblk.target.scsi.device import DeviceServer
from iserblk.target.seam import Nexus, ScsiTask

LUN = 1


class Device(DeviceServer):
    def begin(self, nexus: Nexus, lun: int, cdb: bytes) -> ScsiTask:
        task = super().begin(nexus, lun, cdb)
        if lun == LUN and cdb[0] == opcodes.TEST_UNIT_READY and not task.sense:
            task.status = sam.CHECK_CONDITION
            task.sense = sense.encode_fixed(sense.NOT_READY, 0x3A, 0)
        return task
