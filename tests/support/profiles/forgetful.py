"""A target that forgets commands: it takes them, does nothing, and never answers. It does answer an
abort.

For such targets Linux gives a command 30 seconds, and sends it again (drivers/scsi/sd.h,
SD_TIMEOUT, SD_MAX_RETRIES).
"""

from __future__ import annotations

import time

from iserblk.target.scsi.device import DeviceServer
from iserblk.target.scsi.task import DeviceTask
from iserblk.target.seam import Nexus, ScsiTask

_LOOK_S = 0.01


class Device(DeviceServer):
    """``forgets``: operation codes, of each of which it forgets the next command. ``forgot``: those
    of commands that it has forgotten, in this order."""

    forgets: tuple[int, ...] = ()
    forgot: tuple[int, ...] = ()

    def begin(self, nexus: Nexus, lun: int, cdb: bytes) -> ScsiTask:
        task = super().begin(nexus, lun, cdb)
        if cdb[0] in self.forgets and not task.status and isinstance(task, DeviceTask):
            self.forgets = tuple(each for each in self.forgets if each != cdb[0])
            self.forgot += (cdb[0],)
            task.execute = _forget
        return task


def _forget(task: DeviceTask, _buffer: memoryview, nowait: bool) -> bool:
    if nowait:
        return False  # a thread may wait
    while not task.cancelled:
        time.sleep(_LOOK_S)
    return True
