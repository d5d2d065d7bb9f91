"""What the initiator of a connection has acknowledged, and what waits for that."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from iserblk.iscsi import bhs
from iserblk.iscsi.serial import MASK32, serial_lt
from iserblk.target.iscsi.numbers import Numbers
from iserblk.target.iscsi.session import TargetSession
from iserblk.target.iscsi.tasks.slot import ENDED, TargetTask
from iserblk.target.iscsi.tasks.slots import TaskSlots
from iserblk.target.seam import DATA_IN

_LONG_AGO: Final = 1 << 30  # StatSNs


class Acknowledgements:
    """The ExpStatSN of the PDUs of a connection: each acknowledges the responses before it.

    ``notes``: it is noted, as something may wait for it. ``keeps``: tasks are kept until their
    response is acknowledged, as they may be reassigned.
    """

    def __init__(self, numbers: Numbers, slots: TaskSlots) -> None:
        self.notes = False
        self.keeps = False
        self._numbers = numbers
        self._slots = slots
        self._session: TargetSession
        self._acknowledged = 0  # its ExpStatSN
        self._kept: deque[TargetTask] = deque()  # in the order of their StatSN
        self._awaited: list[tuple[int, Callable[[], None]]] = []  # StatSN, and what waits for it

    def begin(self, session: TargetSession) -> None:
        """Login is over: StatSN has its first value of full feature phase. ``session``: that the
        connection belongs to from now on."""
        self._acknowledged = self._numbers.stat_sn
        self._session = session

    def note_from_now_on(self) -> None:
        """What was acknowledged before is not known, as far as StatSN has
        moved since the login; it lies less than half of the range behind."""
        if not self.notes and self._acknowledged != self._numbers.stat_sn:
            self._acknowledged = (self._numbers.stat_sn - _LONG_AGO) & MASK32
        self.notes = True

    def note(self, message: memoryview, at: int) -> bool:
        """Take the ExpStatSN of a PDU: responses before it need not be kept. Returns whether
        others are awaited: then the initiator is to be asked for them."""
        (_, exp_stat_sn) = bhs.CMD_SN_EXP_STAT_SN.unpack_from(message, at + bhs.CMD_SN_OFFSET)
        if not serial_lt(self._acknowledged, exp_stat_sn) or serial_lt(
            self._numbers.stat_sn, exp_stat_sn
        ):
            return False
        self._acknowledged = exp_stat_sn
        kept = self._kept
        while kept and serial_lt(kept[0].stat_sn, exp_stat_sn):
            slot = kept.popleft()
            slot.kept = False
            self._session.acknowledged(slot)
            if slot.state == ENDED and not slot.busy:
                self._slots.recycle(slot)
        if not self._awaited:
            return False
        done = [each for each in self._awaited if not serial_lt(self._acknowledged, each[0])]
        self._awaited = [each for each in self._awaited if each not in done]
        for _, tell in done:
            tell()
        return bool(self._awaited)

    @property
    def outstanding(self) -> bool:
        """Whether there are responses that the initiator has not acknowledged."""
        return self._acknowledged != self._numbers.stat_sn

    def wait(self, tell: Callable[[], None]) -> bool:
        """Call ``tell`` when the initiator has acknowledged all responses so far. False: it has,
        and ``tell`` is not called."""
        if not serial_lt(self._acknowledged, self._numbers.stat_sn):
            return False
        self._awaited.append((self._numbers.stat_sn, tell))
        return True

    def end(self) -> None:
        """Nothing is acknowledged any more, and nothing comes, either."""
        awaited, self._awaited = self._awaited, []
        for _, tell in awaited:
            tell()

    def keep(self, slot: TargetTask) -> None:
        """Keep a task that is being answered until the initiator acknowledges its status: it may be
        reassigned. Data that was written is not needed again."""
        slot.kept = True
        slot.stat_sn = self._numbers.stat_sn
        self._kept.append(slot)
        self._session.answered[slot.itt] = slot
        if slot.buffer is not None and not slot.task.direction & DATA_IN:
            self._slots.pool.give(slot.buffer)
            slot.buffer = None
