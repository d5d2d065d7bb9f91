"""Flushes before a planned change of connection: failing back, or a logout that the target wants.

Session reinstatement follows, after which whatever is not flushed counts as lost. So no change is
begun from before the flush until the session leaves; then it waits for the next connection.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from iserblk.disk.lun.operations import DiskCore
from iserblk.initiator.session.slots import Operation


def settle(
    cores: Sequence[DiskCore], deadline: float, leave: Callable[[], None]
) -> Operation[None]:
    """Flush all LUNs of a session, and call ``leave`` while nothing of them is unflushed. Raises
    what a flush raises, without calling ``leave``. ``deadline``: monotonic seconds."""
    for core in cores:
        core.pause_changes(True)
    try:
        for core in cores:
            yield from core.settle(deadline)
        leave()
    finally:
        for core in cores:
            core.pause_changes(False)
