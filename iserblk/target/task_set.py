"""Task sets: the order in which the tasks of a LUN may begin (SAM-5, task set management).

A LUN has one task set for all I_T nexuses (TST 0 in the Control mode page). A task whose turn has
not come is *dormant*; one whose turn has come is *enabled*:

    HEAD OF QUEUE  is enabled at once
    ORDERED        when all older tasks, and all HEAD OF QUEUE tasks, have ended
    SIMPLE         when all older ORDERED tasks, and all HEAD OF QUEUE tasks, have ended

As long as a LUN has SIMPLE tasks only, its task set is not kept at all. The first other task finds
out which tasks are older, and from then on the set is kept until the last such task has ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

from iserblk.scsi import opcodes
from iserblk.scsi.tasks import HEAD_OF_QUEUE, ORDERED, SIMPLE

# SAM-5 lets a device server carry these out at once, as if they were HEAD OF QUEUE.
NEVER_DORMANT: Final = frozenset((opcodes.INQUIRY, opcodes.REPORT_LUNS, opcodes.REQUEST_SENSE))


class _Member:
    """A task of a set. ``enable``: to be called when its turn comes; None: the task is enabled, or
    has left the set."""

    __slots__ = ("attribute", "enable")

    def __init__(self, attribute: int, enable: Callable[[], None] | None) -> None:
        self.attribute = attribute
        self.enable = enable


class _TaskSet:
    """The tasks of one LUN, while the order of some of them matters."""

    __slots__ = ("heads", "members", "ordered")

    def __init__(self) -> None:
        self.members: dict[object, _Member] = {}  # oldest first
        self.heads = 0  # HEAD OF QUEUE tasks
        self.ordered = 0  # ORDERED tasks


class TaskSets:
    """The task sets of all LUNs of a target. One thread calls all methods.

    A task is any object that is not in use for another task until it has left the set.

    ``active``: not empty while the order of some tasks matters; without it, ``enter`` is only for
    tasks that are not SIMPLE, and ``leave`` does nothing. ``ready``: not empty while tasks are to
    be enabled; ``enable_ready`` does that. It is not done inside ``leave``, so that a task is not
    begun while others are being ended, perhaps with it.
    """

    def __init__(self, present: Callable[[int], Iterable[object]]) -> None:
        """``present(lun)``: the tasks of a LUN that have begun or may begin, in all sessions. It
        may include the task that is about to enter."""
        self._present = present
        self.active: dict[int, _TaskSet] = {}
        self.ready: deque[_Member] = deque()
        self._enabling = False

    def enter(self, lun: int, task: object, attribute: int, enable: Callable[[], None]) -> bool:
        """Add the newest task of ``lun``. True: it is enabled. False: it is dormant, and ``enable``
        will be called when its turn comes, unless it leaves before. ``enable`` must not raise."""
        task_set = self.active.get(lun)
        if attribute not in (ORDERED, HEAD_OF_QUEUE):
            if task_set is None:
                return True
            attribute = SIMPLE
        if task_set is None:
            task_set = self.active[lun] = _TaskSet()
            for older in self._present(lun):
                if older is not task:
                    task_set.members[older] = _Member(SIMPLE, None)
        if attribute == HEAD_OF_QUEUE:
            enabled = True
            task_set.heads += 1
        elif attribute == ORDERED:
            enabled = not task_set.members
            task_set.ordered += 1
        else:
            enabled = not (task_set.heads or task_set.ordered)
        task_set.members[task] = _Member(attribute, None if enabled else enable)
        return enabled

    def leave(self, lun: int, task: object) -> None:
        """The task has ended, or will never begin. Does nothing for a task that is in no set."""
        task_set = self.active.get(lun)
        if task_set is None:
            return
        member = task_set.members.pop(task, None)
        if member is None:
            return
        member.enable = None
        if member.attribute == HEAD_OF_QUEUE:
            task_set.heads -= 1
        elif member.attribute == ORDERED:
            task_set.ordered -= 1
        if not task_set.heads:
            self._find_ready(task_set, member.attribute == SIMPLE)
        if not self.ready:
            self._retire(lun, task_set)

    def forget(self, lun: int) -> None:
        """The LUN has gone, and none of its tasks is dormant: those that have not ended hold up no
        task of another LUN that gets the number. ``present`` must not return them any more."""
        self.active.pop(lun, None)

    def _retire(self, lun: int, task_set: _TaskSet) -> None:
        """Forget a set whose order does not matter any more. No member of it is in ``ready``."""
        if not (task_set.heads or task_set.ordered):
            del self.active[lun]

    def _find_ready(self, task_set: _TaskSet, only_oldest: bool) -> None:
        """Put into ``ready`` what is dormant and need not be, where no HEAD OF QUEUE task is left.
        ``only_oldest``: a SIMPLE task has ended, on which no SIMPLE task waits."""
        oldest = True
        for member in task_set.members.values():
            ordered = member.attribute == ORDERED
            if member.enable is not None and (oldest or not ordered):
                self.ready.append(member)
            if ordered or only_oldest:
                return
            oldest = False

    def enable_ready(self) -> bool:
        """Enable the tasks whose turn has come, and those whose turn comes with their ends. False:
        nothing is done, because a task is being enabled; its caller goes on with the others."""
        if self._enabling:
            return False
        self._enabling = True
        try:
            while self.ready:
                member = self.ready.popleft()
                enable, member.enable = member.enable, None
                if enable is not None:  # None: it has left, or is enabled already
                    enable()
        finally:
            self._enabling = False
        for lun, task_set in list(self.active.items()):
            self._retire(lun, task_set)
        return True
