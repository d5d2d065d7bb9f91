"""The LUNs of longhorn (profile ``longhorn``), on a disk that is not fast, as replicas may have: a
WRITE takes WRITE_S seconds.
"""

from __future__ import annotations

import time
from typing import Final

from iserblk.scsi import opcodes
from iserblk.target.seam import ScsiTask
from tests.support.profiles import longhorn

WRITE_S: Final = 0.03


class Device(longhorn.Device):
    def run(self, task: ScsiTask, buffer: memoryview | None, nowait: bool = False) -> bool:
        if task.cdb[0] in (opcodes.WRITE_10, opcodes.WRITE_16):
            if nowait:
                return False  # a thread may wait
            time.sleep(WRITE_S)
        return super().run(task, buffer, nowait)
