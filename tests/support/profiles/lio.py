"""Linux's target (LIO): a nexus is never told of a power on or a reset that came before it.

A new nexus has no unit attention, also when the target's machine has rebooted and what the write
cache held is lost. What it does report, ours does, too: 29/03 after a LOGICAL UNIT RESET, 2A/xx and
3F/0E. Seen with Linux 6.1, fileio with emulate_write_cache=1, over TCP and over RDMA
(tests/lab/guest/test_tcp_lio_cache.py, test_rxe_lio_cache.py).
"""

from __future__ import annotations

from iserblk.target.scsi.device import DeviceServer
from iserblk.target.seam import Nexus


class Device(DeviceServer):
    def greeting(self, _nexus: Nexus, _lun: int) -> int:
        return 0
