"""What a flush may promise: writes that have returned and may not be on stable storage yet.

The one who runs ``Session.progress`` calls ``hear`` for each command that brought sense data, in
the order in which they came: so a report that the target lost power is never taken for older than a
flush that it spoils, or than a write that it lost. The other calls come from any thread.
"""

from __future__ import annotations

import logging
import threading

from iserblk.disk.ranges import RangeLock
from iserblk.initiator.task import TaskSlot
from iserblk.scsi import sense as sense_data
from iserblk.scsi.sense import Sense

log = logging.getLogger(__name__)

# Unit attentions, ASC 29h: power on, reset, or bus reset occurred (00), power on occurred (01),
# SCSI bus reset occurred (02), device internal reset (04).
_POWER_LOST = (0x2900, 0x2901, 0x2902, 0x2904)
_MODE_PARAMETERS_CHANGED = 0x2A01


class Durability:
    """Of one LUN. ``name``: for logs. ``volatile``: the LUN has a write cache that must be flushed
    (WCE); it may be told so later."""

    def __init__(self, name: str, volatile: bool, ranges: RangeLock) -> None:
        self.name = name
        self.volatile = volatile
        self._ranges = ranges
        # A write has ended that no flush covers. Set before the slot of the write is given back,
        # which shows its blocks, so that one of the two is always seen.
        self._dirty = False
        self._lock = threading.Lock()
        self._flushing = 0  # flushes under way that have something to flush
        self._losses = 0
        self._lost = False  # and no flush has failed for it yet

    def wrote(self) -> None:
        """A write has ended, well or not, and its slot is about to be given back."""
        self._dirty = True

    def begin_flush(self) -> tuple[int, bool]:
        """What has been written so far is about to be flushed. ``end_flush`` wants the answer."""
        with self._lock:
            needed = self._dirty or self._flushing > 0
            self._flushing += needed
            self._dirty = False
            return self._losses, needed

    def end_flush(self, token: tuple[int, bool], done: bool) -> bool:
        """The flush is over; ``done``: the target says that it succeeded. True: yet something of
        what it was to cover was lost, and nobody has been told."""
        losses, needed = token
        with self._lock:
            self._flushing -= needed
            lost = self._lost or losses != self._losses
            if done:
                self._lost = False
            elif needed:
                self._dirty = True
            return lost

    def hear(self, slot: TaskSlot) -> None:
        """A command of this LUN ended with CHECK CONDITION and ``slot.sense``."""
        sense = sense_data.decode(slot.sense)
        if sense.is_deferred:
            # The write that it belongs to has long been acknowledged (SPC-4, deferred errors).
            if sense.key not in (sense_data.NO_SENSE, sense_data.RECOVERED_ERROR):
                self._lose(sense, "could not keep what was written before")
        elif sense.is_unit_attention:
            if sense.code == _MODE_PARAMETERS_CHANGED:
                self.volatile = True  # perhaps; a flush too many does no harm
            elif sense.code in _POWER_LOST and self.volatile and self._unflushed(slot):
                self._lose(sense, "lost power while writes were not flushed")

    def _unflushed(self, but: TaskSlot) -> bool:
        """``but``: the command that was told, and was not executed."""
        changing = self._ranges.changing(but)  # before ``_dirty`` is looked at: see there
        with self._lock:
            return changing or self._dirty or self._flushing > 0

    def _lose(self, sense: Sense, what: str) -> None:
        with self._lock:
            self._losses += 1
            self._lost = True
        log.error("%s: the target %s (%s); the next flush fails", self.name, what, sense)
