"""Which blocks may be written now: the range lock of sub-block writes.

A write that covers part of a block reads the block, changes it and writes it back. Between the
two nobody else may change that block, or the old neighbour bytes would win. Whole-block writes
are the common case and pay one short lock; they mark their slot with the blocks they change.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from iserblk.initiator.session.slots import FREE, QUEUED, TaskSlot, Waiter


class RangeLock:
    """The ranges of one LUN. Thread-safe; never waits itself."""

    def __init__(self, tasks: list[TaskSlot], lun: bytes) -> None:
        self._tasks = tasks
        self._lun = lun
        self._mutex = threading.Lock()
        self._locked: list[tuple[int, int]] = []
        self._waiters: list[Waiter] = []

    def _blocked(self, first: int, last: int, waiter: Waiter | None) -> bool:
        """Under the mutex: is part of the range locked? Then ``waiter``, if given, will hear of
        the next change: its ``pending`` rises by one."""
        for low, high in self._locked:
            if first <= high and last >= low:
                if waiter is not None:
                    waiter.pending += 1
                    self._waiters.append(waiter)
                return True
        return False

    def claim(self, slot: TaskSlot, first: int, last: int, waiter: Waiter | None) -> bool:
        """``slot`` is about to change blocks ``first`` to ``last``. False: not now; ``waiter``
        will hear when to try again. (One that has other claims may not wait: pass None.)"""
        with self._mutex:
            if self._locked and self._blocked(first, last, waiter):
                return False
            slot.lun = self._lun
            slot.first = first
            slot.last = last
        return True

    def lock(self, first: int, last: int, waiter: Waiter) -> bool:
        """Nobody else may start to change these blocks from now on. False: as ``claim``."""
        with self._mutex:
            if self._blocked(first, last, waiter):
                return False
            self._locked.append((first, last))
        return True

    def quiet(self, first: int, last: int, waiter: Waiter) -> bool:
        """No write that was claimed before ``lock`` is still under way. False: as ``claim``."""
        with self._mutex:
            # Known as waiting before looking: who ends meanwhile frees its slot, then calls.
            self._waiters.append(waiter)
            for slot in self._tasks:
                if (
                    slot.last >= first
                    and slot.first <= last
                    and slot.state != FREE
                    and slot.lun == self._lun
                ):
                    waiter.pending += 1
                    return False
            self._waiters.remove(waiter)
        return True

    def unlock(self, first: int, last: int) -> None:
        with self._mutex:
            self._locked.remove((first, last))
        self.changed()

    def changing(self, but: TaskSlot | None, ended_only: bool = False) -> bool:
        """A slot other than ``but`` stands for a change of this LUN; ``ended_only``: for one that
        is neither queued nor in flight. Takes no lock."""
        return any(
            slot.last >= slot.first
            and slot.state != FREE
            and not (ended_only and slot.state >= QUEUED)
            and slot.lun == self._lun
            and slot is not but
            for slot in self._tasks
        )

    def changing_outside(self, kept: Callable[[TaskSlot], bool]) -> bool:
        """As ``changing``, of changes that are not ``kept`` elsewhere. One that has just been
        claimed may be taken for such."""
        return any(
            slot.last >= slot.first
            and slot.state != FREE
            and slot.lun == self._lun
            and not kept(slot)
            for slot in self._tasks
        )

    def changed(self) -> None:
        """A claimed write has ended, or a range was unlocked. Cheap when nobody waits."""
        if self._waiters:
            with self._mutex:
                waiters, self._waiters = self._waiters, []
            for waiter in waiters:
                waiter.task_done()
