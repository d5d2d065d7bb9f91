"""What an initiator owes on a connection, and for how long: nothing that it holds up lasts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from iserblk.datamover.seam import TargetDatamover
from iserblk.scsi import status as sam
from iserblk.target.iscsi.session import TargetSession
from iserblk.target.iscsi.tasks.slot import ENDED, FETCHING, UNSOLICITED, Allegiance, TargetTask
from iserblk.target.iscsi.tasks.slots import TaskSlots
from iserblk.target.seam import ScsiTask
from iserblk.target.task_set import TaskSets

# Seconds for which an initiator may keep the target waiting, without anything coming: as long as
# one that has gone is waited for, with the ping. (LIO gives 3 s to each Data-Out, five times.)
PATIENCE_S: Final = 60.0
SLOWEST: Final = 65536  # bytes a second; what is large may take longer
LONGEST_S: Final = 600.0  # for all that is awaited at one time, whatever comes of it


class Owed:
    """What is awaited, look by look."""

    __slots__ = ("_first", "_first_since", "_in_order", "_last", "_last_since")

    def __init__(self, in_order: bool = False) -> None:
        """``in_order``: of what is awaited together the first counts, then the next: hosts may send
        the data of one command after the other. Else any of it shows that more may come."""
        self._in_order = in_order
        self._last: Sequence[object] = ()  # at the last look
        self._last_since = 0.0  # none of it has come since
        self._first: Sequence[object] = ()  # what has not come of what was awaited at one time
        self._first_since = 0.0

    def overdue(self, things: Sequence[object], length: int, now: float) -> bool:
        """``things``: all that is awaited now, objects of their own, oldest first. Whether the peer
        has had its time: nothing has come for PATIENCE_S, and what it takes to move ``length``
        bytes; or not all has come in LONGEST_S that was awaited then. ``now``: seconds of any
        clock."""
        present = {id(each) for each in things}
        if not self._last or any(id(each) not in present for each in self._last):
            self._last_since = now
        self._last = things[:1] if self._in_order else things
        self._first = [each for each in self._first if id(each) in present]
        if not self._first:
            self._first = things
            self._first_since = now
        return bool(things) and (
            now - self._last_since > PATIENCE_S + length / SLOWEST
            or now - self._first_since > LONGEST_S
        )


class Debts:
    """What the initiator owes on ``connection``: the data of commands, room for answers, commands
    before others. ``recovers``: see Commands."""

    def __init__(
        self,
        connection: Allegiance,
        session: TargetSession,
        datamover: TargetDatamover,
        slots: TaskSlots,
        task_sets: TaskSets,
        recovers: bool,
    ) -> None:
        self._connection = connection
        self._session = session
        self._dm = datamover
        self._slots = slots
        self._task_sets = task_sets
        self._recovers = recovers
        self._data, self._room, self._command = Owed(True), Owed(), Owed()

    def overdue(self, now: float) -> str:
        """See ``TargetConnection.overdue``."""
        fetching = [
            slot
            for slot in self._session.tasks.values()
            if slot.connection is self._connection and slot.state in (FETCHING, UNSOLICITED)
        ]
        length = fetching[0].task.length if fetching else 0
        # Tasks of SCSI, as slots are used again.
        if self._data.overdue([slot.task for slot in fetching], length, now):
            for slot in fetching:
                self._end(slot)
            return "the data of a command did not come"
        leaving: list[ScsiTask] = []
        if not self._recovers or self._dm.wants_write():  # else they may be kept
            leaving = [slot.task for slot in self._slots.all if slot.state == ENDED and slot.busy]
        length = max((each.length for each in leaving), default=0)
        if self._room.overdue(leaving, length, now):
            return "its answers were not taken"
        if self._command.overdue(self._session.missing_for(self._connection), 0, now):
            return "a command before others did not come"
        return ""

    def _end(self, slot: TargetTask) -> None:
        """End a task whose data has not come, even where the tasks of a lost connection are kept:
        it holds up no others any more."""
        slot.task.cancel()
        slot.task.status = sam.TASK_ABORTED
        slot.task.transferred = 0
        self._task_sets.leave(slot.lun, slot)
