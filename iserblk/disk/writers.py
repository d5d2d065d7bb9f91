"""A LUN that two processes of this machine write to, each for itself: the second one is warned, and
told of the first. It is never refused: the two may know of each other, as a cluster's file system
does.

Each process writes its record before it reads those of others: so of two that begin at the same
time at least one is warned.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence

from iserblk.disk.lun.identity import have_common, world_wide
from iserblk.disk.multipath.addresses import settle
from iserblk.disk.seam import LunInfo
from iserblk.metrics.records import Record, Recorded, RecordedLun, running

log = logging.getLogger(__name__)


def is_shared(urls: Sequence[str], options: Mapping[str, str]) -> bool:
    """Whether one of ``urls`` has shared=yes: others may write to its LUNs. Raises BadArgument."""
    return any(each.options.shared for each in settle(urls, options))


def note_use(
    recorded: Recorded, luns: Iterable[LunInfo], *, writes: bool = True, shared: bool = False
) -> None:
    """Record that this process uses ``luns``. If it ``writes`` to them, warn of other processes
    that do, unless it knows of such: they are ``shared``. LUNs that take no writes do not count."""
    luns = list(luns)
    recorded.use(
        [
            RecordedLun(each.url, each.size, writes and not each.read_only, each.identifiers)
            for each in luns
        ]
    )
    if writes and not shared:
        warn_of_writers(luns, recorded.record)


def warn_of_writers(luns: Iterable[LunInfo], own: Record | None = None, pid: int = 0) -> None:
    """Warn of other processes that write to one of ``luns``. ``own``: the record of this process:
    of an attached device the servers take each other's place. ``pid``: of another process that does
    not count; 0: there is none."""
    luns = [each for each in luns if not each.read_only]
    if not luns:
        return
    others = [
        found.record
        for found in running()
        if found.record.pid not in (os.getpid(), pid) and not _is_predecessor(found.record, own)
    ]
    for lun in luns:
        found = [
            other.words
            for other in others
            if any(each.writes and _is_same(lun, each) for each in other.luns)
        ]
        if found:
            log.warning(
                "%s: written to by %s, too: two writers destroy a file system that is not made for "
                "several hosts; end one of them, or say shared=yes",
                lun.url,
                " and ".join(found),
            )


def _is_predecessor(other: Record, own: Record | None) -> bool:
    return own is not None and own.command == other.command == "attach" and own.where == other.where


def _is_same(lun: LunInfo, other: RecordedLun) -> bool:
    if world_wide(lun.identifiers) and world_wide(other.identifiers):
        return have_common(lun.identifiers, other.identifiers)
    return (lun.url, lun.size) == (other.url, other.size)
