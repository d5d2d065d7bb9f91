"""Flushes before a planned change of connection: failing back, or a logout that the target wants.

Session reinstatement follows, after which whatever is not flushed counts as lost. So no change is
begun from before the flush until the session leaves; then it waits for the next connection.

Runs in trio, beside the session's reconnector.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from iserblk.commands.command import Operation
from iserblk.disk.lun.operations import DiskCore
from iserblk.errors import IserblkError


def settle(
    cores: Sequence[DiskCore], deadline: float, leave: Callable[[], None]
) -> Operation[None]:
    """Flush all LUNs of a session, and call ``leave`` while nothing of them is unflushed. Raises
    what a flush raises, without calling ``leave``: the first such error, behind the flushes of all.
    LUNs that are gone, or that others have replaced, keep none from leaving: they cannot be
    flushed. ``deadline``: monotonic seconds."""
    for core in cores:
        core.pause_changes(True)
    try:
        # (While one is flushed, a change of another may end that was begun before the pause.)
        while left := [each for each in cores if _can_be_flushed(each)]:
            problem: IserblkError | None = None
            for core in left:
                try:
                    yield from core.settle(deadline)
                except IserblkError as error:
                    problem = problem or error
            if problem is not None:
                raise problem
        leave()
    finally:
        for core in cores:
            core.pause_changes(False)


def _can_be_flushed(core: DiskCore) -> bool:
    return core.durability.unflushed and not core.identity.gone and not core.identity.is_another
