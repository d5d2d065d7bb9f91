"""What a process holds on behalf of its connections."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterable, Mapping

from iserblk.loop.workers import Workers
from iserblk.rcap.iwarp.queuepair import IwarpQueuePair
from iserblk.rcap.stags import Region, StagTable
from tests.support.descriptors import descriptors_to_begin_with


def census() -> dict[str, int]:
    """Counts of descriptors, threads, queue pairs, and STags that a peer may still use.

    Threads without the idle ones that trio, or a loop, keeps for later.
    """
    count = descriptors_to_begin_with()
    objects = gc.get_objects()
    threads = sum(not each.name.startswith("Trio thread ") for each in threading.enumerate())
    return {
        "descriptors": count,
        "threads": threads - sum(each.idle for each in objects if type(each) is Workers),
        "queue pairs": sum(type(each) is IwarpQueuePair for each in objects),
        "open regions": len(open_regions(each for each in objects if type(each) is StagTable)),
    }


def nothing_new(now: Mapping[str, int], before: Mapping[str, int]) -> bool:
    """Whether a census has no more of anything than one before. Less it may have: what ends was
    perhaps still there then, with the end of it on its way."""
    return all(count <= before[what] for what, count in now.items())


def stag_tables(but: Iterable[StagTable] = ()) -> list[StagTable]:
    """The STag tables of all queue pairs; without those in ``but``, which are of others, for
    example of earlier tests. Finding them takes as long as a census: 20 ms or more."""
    known = {id(each) for each in but}
    return [each for each in gc.get_objects() if type(each) is StagTable and id(each) not in known]


def open_regions(tables: Iterable[StagTable]) -> list[Region]:
    return [
        region
        for table in tables
        for region in table.regions
        if region.valid and region.length  # closing a connection takes the memory away
    ]
