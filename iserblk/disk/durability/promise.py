"""What a flush may promise: writes that have returned and may not be on stable storage yet.

The one who runs ``Session.progress`` calls ``hear`` for each command that brought sense data, in
the order in which they came: so a report that the target lost power is never taken for older than a
flush that it spoils, or than a write that it lost. The other calls come from any thread.

What is done about a loss: with a journal, everything in it is sent again on a new connection
(``replay_needed``), and no flush succeeds before that. Without one, or when the journal does not
have everything, the next flush fails, and so does every one that is under way.

The journal has everything (``_complete``) when each change that no flush covers is in it. That ends
where the cache turns volatile while changes are under way that were submitted without, and begins
again with a flush that succeeds, and began when there was none: what had ended is covered by it,
what comes later is in the journal, because a change claims its blocks before it looks for one.

A deferred error always makes the next flush fail, journal or not: the medium has refused a write
that was acknowledged. To send everything again would most likely fail again, just as late; and with
a target that reports it each time there would be no end.
"""

from __future__ import annotations

import logging
import threading
from enum import Enum, auto
from typing import NamedTuple

from iserblk.disk.durability.journal import Batches, Journal
from iserblk.disk.ranges import RangeLock
from iserblk.initiator.session.slots import TaskSlot
from iserblk.scsi import sense as sense_data
from iserblk.scsi.sense import Sense

log = logging.getLogger(__name__)

_MODE_PARAMETERS_CHANGED = 0x2A01


class Flushed(Enum):
    """How a flush has ended."""

    DONE = auto()
    AGAIN = auto()  # what it was to cover was lost, and will be sent again: flush after that
    LOST = auto()  # something of what it was to cover was lost, and nobody has been told


class FlushToken(NamedTuple):
    """What a flush was to cover."""

    needed: bool
    losses: int
    replays: int
    batches: Batches
    complete: bool  # what it does not cover is in the journal


class Durability:
    """Of one LUN. ``name``: for logs. ``volatile``: the LUN has a write cache that must be flushed
    (WCE); it may be told so later.

    ``journal``: the journal, while there is something to keep in it. ``replay_needed``: the target
    has lost its cache, and what the journal has was not sent again yet. ``epoch`` is another one
    after each such loss, and after each replay.
    """

    def __init__(self, name: str, volatile: bool, ranges: RangeLock) -> None:
        self.name = name
        self.volatile = volatile
        self.journal: Journal | None = None
        self.replay_needed = False
        self.epoch = 0
        self._assigned: Journal | None = None  # in use or not
        self._complete = True  # all that is not flushed is in the journal, if there is one
        self._ranges = ranges
        # A write has ended that no flush covers. Set before the slot of the write is given back,
        # which shows its blocks, so that one of the two is always seen.
        self._dirty = False
        self._lock = threading.Lock()
        self._flushing = 0  # flushes under way that have something to flush
        self._losses = 0  # that no replay makes good
        self._replays = 0  # losses that one does
        self._lost = False  # and no flush has failed for it yet

    def assign(self, journal: Journal) -> None:
        """From now on changes are kept. Before the first one."""
        self._assigned = journal
        if self.volatile:
            self.journal = journal

    def turn_volatile(self) -> None:
        """The LUN has, or may have, a write cache now; a flush too many does no harm."""
        with self._lock:
            if not self.volatile:
                self.volatile = True
                self._complete = not self._dirty and not self._ranges.changing(None)
                self.journal = self._assigned

    def stale(self, epoch: int) -> bool:
        """A read that began in that epoch, and succeeded, may have seen what was there before a
        write that was lost: it must be done again. Its thread may look long after the answer came,
        when the replay is over: so the present state says too little."""
        return self.replay_needed or epoch != self.epoch

    def wrote(self) -> None:
        """A write has ended, well or not, and its slot is about to be given back."""
        self._dirty = True

    def begin_flush(self) -> FlushToken:
        """What has been written so far is about to be flushed. ``end_flush`` wants the answer."""
        with self._lock:
            needed = self._dirty or self._flushing > 0
            self._flushing += needed
            self._dirty = False
            journal = self._assigned
            batches = journal.begin_flush() if journal is not None else []
            complete = self._complete or (
                journal is not None and not self._ranges.changing_outside(journal.has)
            )
            return FlushToken(needed, self._losses, self._replays, batches, complete)

    def end_flush(self, token: FlushToken, done: bool) -> Flushed:
        """The flush is over; ``done``: the target says that it succeeded."""
        with self._lock:
            self._flushing -= token.needed
            again = self.replay_needed or token.replays != self._replays
            if self._assigned is not None:
                if done and not again:
                    self._assigned.flushed(token.batches)
                else:
                    self._assigned.not_flushed(token.batches)
            if again:
                self._dirty = True
                return Flushed.AGAIN
            lost = self._lost or token.losses != self._losses
            if done:
                self._lost = False
                self._complete = self._complete or token.complete
            elif token.needed:
                self._dirty = True
            return Flushed.LOST if lost else Flushed.DONE

    def hear(self, slot: TaskSlot) -> bool:
        """A command of this LUN ended with CHECK CONDITION and ``slot.sense``. True: the connection
        has to be replaced, and the journal sent again before anything else."""
        return self._hear(slot, resuming=False)

    def hear_resuming(self, slot: TaskSlot) -> None:
        """As ``hear``, for a connection that is not in use yet: whatever is queued will be sent on
        it after ``replay``."""
        self._hear(slot, resuming=True)

    def _hear(self, slot: TaskSlot, resuming: bool) -> bool:
        sense = sense_data.decode(slot.sense)
        if sense.is_deferred:
            # The write that it belongs to has long been acknowledged (SPC-4, deferred errors).
            if sense.key not in (sense_data.NO_SENSE, sense_data.RECOVERED_ERROR):
                self._lose(f"could not keep what was written before ({sense})")
        elif sense.is_unit_attention:
            if sense.code == _MODE_PARAMETERS_CHANGED:
                self.turn_volatile()
            elif (
                sense.code in sense_data.POWER_LOST
                and self.volatile
                and self._unflushed(slot, resuming)
            ):
                return self._lose_power(sense)
        return False

    def wants_flush(self) -> bool:
        """A flush would have something to make durable, or a loss to tell."""
        return self._lost or self._unflushed(None, False)

    def _unflushed(self, but: TaskSlot | None, resuming: bool) -> bool:
        """``but``: the command that was told, and was not executed. While resuming, commands that
        have not ended do not count: they will be sent."""
        changing = self._ranges.changing(but, ended_only=resuming)  # before ``_dirty``: see there
        with self._lock:
            return changing or self._dirty or self._flushing > 0

    def _lose_power(self, sense: Sense) -> bool:
        with self._lock:
            replay = self.journal is not None and self._complete
            if replay:
                self._replays += 1
                self.epoch += 1
                self.replay_needed = True
        if replay:
            log.warning(
                "%s: the target lost power (%s); what was not flushed is sent again",
                self.name,
                sense,
            )
        else:
            self._lose(f"lost power while writes were not flushed ({sense})")
        return replay

    def _lose(self, what: str) -> None:
        with self._lock:
            self._losses += 1
            self._lost = True
        log.error("%s: the target %s; the next flush fails", self.name, what)

    # -- replay -----------------------------------------------------------------------------------

    @property
    def replays(self) -> int:
        """Losses so far that a replay makes good; for ``replayed``."""
        return self._replays

    def replayed(self, replays: int) -> None:
        """All that was in the journal after that many losses has been sent again."""
        with self._lock:
            self.epoch += 1
            self.replay_needed = self._replays != replays

    def gave_up(self, what: str) -> None:
        """The target refused to take something again."""
        self._lose(what)
