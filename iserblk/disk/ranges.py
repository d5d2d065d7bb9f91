"""The range lock of sub-block writes: it says which blocks may be written now.

A write that covers part of a block reads the block, changes it and writes it back. Between the read
and the write no other operation may change that block, or its change would be lost. Whole-block
writes are the common case: they record in their slot which blocks they change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from iserblk.commands.command import FREE, QUEUED, Command, Waiter


class RangeLock:
    """The locked and the claimed blocks of one LUN. Never waits for a range itself."""

    def __init__(self, tasks: Sequence[Command], lun: bytes) -> None:
        self._tasks = list(tasks)  # a list is quicker
        self._lun = lun
        self._locked: list[tuple[int, int]] = []
        self._waiters: list[Waiter] = []

    def _blocked(self, first: int, last: int, waiter: Waiter | None) -> bool:
        """Whether part of the range is locked. If so, ``waiter``, where given, is told of
        the next change: its ``pending`` rises by one."""
        for low, high in self._locked:
            if first <= high and last >= low:
                if waiter is not None:
                    waiter.pending += 1
                    self._waiters.append(waiter)
                return True
        return False

    def claim(self, slot: Command, first: int, last: int, waiter: Waiter | None) -> bool:
        """Record that ``slot`` is about to change blocks ``first`` to ``last``. False: some of them
        are locked; ``waiter`` is told when to try again. A caller that has other claims must not
        wait, and passes None."""
        if self._locked and self._blocked(first, last, waiter):
            return False
        slot.lun = self._lun
        slot.first = first
        slot.last = last
        return True

    def lock(self, first: int, last: int, waiter: Waiter) -> bool:
        """Lock these blocks: from now on no other operation can start to change them. False: some
        are locked already; ``waiter`` as in ``claim``."""
        if self._blocked(first, last, waiter):
            return False
        self._locked.append((first, last))
        return True

    def quiet(self, first: int, last: int, waiter: Waiter) -> bool:
        """Whether all writes of these blocks that were claimed before ``lock`` have ended. False:
        some are under way; ``waiter`` as in ``claim``."""
        for slot in self._tasks:
            if (
                slot.last >= first
                and slot.first <= last
                and slot.state != FREE
                and slot.lun == self._lun
            ):
                waiter.pending += 1
                self._waiters.append(waiter)
                return False
        return True

    def unlock(self, first: int, last: int) -> None:
        self._locked.remove((first, last))
        self.changed()

    def changing(self, but: Command | None, ended_only: bool = False) -> bool:
        """Whether a slot other than ``but`` holds a change of this LUN. ``ended_only``: only slots
        that are neither queued nor in flight count."""
        return any(
            slot.last >= slot.first
            and slot.state != FREE
            and not (ended_only and slot.state >= QUEUED)
            and slot.lun == self._lun
            and slot is not but
            for slot in self._tasks
        )

    def queued(self) -> list[Command]:
        """Changes that are submitted, and wait to be sent."""
        return [
            slot
            for slot in self._tasks
            if slot.last >= slot.first and slot.state == QUEUED and slot.lun == self._lun
        ]

    def changing_outside(self, kept: Callable[[Command], bool]) -> bool:
        """As ``changing``, but only changes that are not ``kept`` elsewhere count. A change that
        has just been claimed may count although it is about to be kept."""
        return any(
            slot.last >= slot.first
            and slot.state != FREE
            and slot.lun == self._lun
            and not kept(slot)
            for slot in self._tasks
        )

    def changed(self) -> None:
        """Wake the waiters: a claimed write has ended, a range was unlocked, or it is time that
        they check their deadlines. Cheap without waiters."""
        if self._waiters:
            waiters, self._waiters = self._waiters, []
            for waiter in waiters:
                waiter.task_done()
