"""What a process holds on behalf of its connections."""

from __future__ import annotations

import gc
import os
import threading

from iserblk.rcap.iwarp.queuepair import IwarpQueuePair
from iserblk.rcap.stags import StagTable


def census() -> dict[str, int]:
    """Counts of descriptors, threads, queue pairs, and STags that the peer may still use.

    Descriptors and threads are the kernel's counts, of this process.
    """
    gc.collect()
    objects = gc.get_objects()
    pairs = [each for each in objects if type(each) is IwarpQueuePair]
    # Tables have slots only, and may be untracked by themselves; their pairs are not.
    tables = [each for each in objects if type(each) is StagTable]
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "python threads": threading.active_count(),
        "queue pairs": len(pairs),
        "open regions": sum(region.valid for table in tables for region in table.regions),
        "regions with memory": sum(
            region.length > 0 for table in tables for region in table.regions
        ),
    }
