"""What a process holds on behalf of its connections."""

from __future__ import annotations

import gc
import os
import threading

from iserblk.rcap.iwarp.queuepair import IwarpQueuePair
from iserblk.rcap.stags import StagTable


def census() -> dict[str, int]:
    """Counts of descriptors, threads, queue pairs, and STags that a peer may still use.

    Threads without the idle ones that trio keeps for later.
    """
    gc.collect()
    objects = gc.get_objects()
    regions = [
        region
        for table in objects
        if type(table) is StagTable
        for region in table.regions
        if region.valid and region.length  # closing a connection takes the memory away
    ]
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": sum(
            not thread.name.startswith("Trio thread ") for thread in threading.enumerate()
        ),
        "queue pairs": sum(type(each) is IwarpQueuePair for each in objects),
        "open regions": len(regions),
    }
