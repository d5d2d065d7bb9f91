"""Durability of writes: which have returned but may not be on stable storage, and what a flush may
promise.

The thread that runs ``Session.progress`` calls ``hear`` for each command that brought sense data,
in the order in which they came. So a report that the target lost power is never taken for older
than a flush that it spoils, or than a write that it lost. The other calls come from any thread.

After a loss: with a journal, everything in it is sent again on a new connection
(``replay_needed``), and no flush succeeds before that. Without a journal, or when the journal does
not have everything, the loss is counted (``losses``): the next flush of each client fails, and so
does every flush of a client that is under way.

The journal has everything (``_complete``) when it holds each change that no flush covers. This ends
where the cache turns volatile while changes are under way that were submitted without the journal,
and with a change that bypasses it. It is true again after a flush that succeeds and that began
behind that (``_gaps``), when no such change was under way: the flush covers the changes that had
ended, and later ones are in the journal, because a change claims its blocks before it looks for a
journal.

A deferred error always counts as a loss, with or without a journal: the medium has refused a write
that was acknowledged. To send everything again would most likely fail again, just as late;
and with a target that reports the error each time there would be no end.
"""

from __future__ import annotations

import logging
import threading
from enum import Enum, auto
from typing import Final, NamedTuple

from iserblk.disk.durability.journal import Batches, Journal
from iserblk.disk.durability.losses import Losses
from iserblk.disk.ranges import RangeLock
from iserblk.disk.seam import FlushClient
from iserblk.initiator.session.slots import TaskSlot
from iserblk.scsi import sense as sense_data
from iserblk.scsi.sense import Sense

log = logging.getLogger(__name__)

_MODE_PARAMETERS_CHANGED: Final = 0x2A01


class Flushed(Enum):
    """How a flush has ended."""

    DONE = auto()
    AGAIN = auto()  # what it was to cover was lost and will be sent again: flush after that
    LOST = auto()  # meanwhile something was lost for good: perhaps part of what it was to cover


class FlushToken(NamedTuple):
    """What one flush was to cover: from ``begin_flush``, for ``end_flush``."""

    needed: bool
    losses: int
    replays: int
    batches: Batches
    complete: bool  # what the flush does not cover is in the journal
    gaps: int


class Durability:
    """Which writes to one LUN are not on stable storage yet, or are lost. ``name``: for logs.
    ``volatile``: the LUN has a write cache that must be flushed (WCE); this may be learned later.

    ``losses``: those that no replay makes good, and who knows of them. ``journal``: the journal,
    while there is something to keep in it. ``replay_needed``: the target
    has lost its cache, and what the journal has was not sent again yet. ``epoch`` changes with each
    such loss, and with each replay.
    """

    def __init__(self, name: str, volatile: bool, ranges: RangeLock) -> None:
        self.name = name
        self.volatile = volatile
        self.losses = Losses()
        self.journal: Journal | None = None
        self.replay_needed = False
        self.epoch = 0
        self._assigned: Journal | None = None  # whether in use or not
        self._complete = True  # all that is not flushed is in the journal, if there is one
        self._gaps = 0  # how often that has ended
        self._ranges = ranges
        # A write has ended that no flush covers. Set before the slot of the write, which shows its
        # blocks, is given back: so a thread that looks sees at least one of the two.
        self._dirty = False
        self._lock = threading.Lock()
        self._flushing = 0  # flushes under way that have something to flush
        self._replays = 0  # losses that a replay makes good

    def assign(self, journal: Journal) -> None:
        """Keep changes in ``journal`` while the LUN is volatile. Call it before the first
        change."""
        self._assigned = journal
        if self.volatile:
            self.journal = journal

    def turn_volatile(self) -> None:
        """Note that the LUN has, or may have, a write cache now. A flush too many does no harm."""
        with self._lock:
            if not self.volatile:
                self.volatile = True
                self._complete = not self._dirty and not self._ranges.changing(None)
                self._gaps += not self._complete
                self.journal = self._assigned

    def turn_write_through(self) -> None:
        """Note that the LUN, as far as can be known, has no write cache. The journal goes on: what
        it holds may be of use where that was an error."""
        with self._lock:
            self.volatile = False

    def stale(self, epoch: int) -> bool:
        """Whether a read that began in ``epoch`` and succeeded must be done again: it may have seen
        what was there before a write that was lost. The present state alone says too little: the
        reading thread may look long after the answer came, when the replay is over."""
        return self.replay_needed or epoch != self.epoch

    def bypass(self) -> None:
        """Note that a change is about to be submitted that the journal does not get, if there is
        one. Its slot shows its blocks, and ``wrote`` follows when it has ended."""
        with self._lock:
            self._complete = False
            self._gaps += 1

    def wrote(self) -> None:
        """Note that a write has ended, well or not. Call it before the slot of the write is given
        back."""
        self._dirty = True

    def begin_flush(self) -> FlushToken:
        """Begin a flush of what has been written so far. Returns what ``end_flush`` needs."""
        with self._lock:
            needed = self._dirty or self._flushing > 0
            self._flushing += needed
            self._dirty = False
            journal = self._assigned
            batches = journal.begin_flush() if journal is not None else []
            complete = self._complete or (
                journal is not None and not self._ranges.changing_outside(journal.has)
            )
            losses = self.losses.count
            return FlushToken(needed, losses, self._replays, batches, complete, self._gaps)

    def end_flush(self, token: FlushToken, done: bool) -> Flushed:
        """End a flush; returns how it ended. ``done``: the target says that it succeeded."""
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
            if done:
                if token.complete and token.gaps == self._gaps:
                    self._complete = True
            elif token.needed:
                self._dirty = True
            return Flushed.DONE if token.losses == self.losses.count else Flushed.LOST

    def hear(self, slot: TaskSlot) -> bool:
        """Take in ``slot.sense`` of a command of this LUN that ended with CHECK CONDITION. True:
        the connection has to be replaced, and the journal sent again before anything else."""
        return self._hear(slot, resuming=False)

    def hear_resuming(self, slot: TaskSlot) -> None:
        """As ``hear``, for a fresh connection that is not in use yet: queued commands will be sent
        on it after ``replay``."""
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

    def wants_flush(self, client: FlushClient | None = None) -> bool:
        """Whether a flush would have something to make durable, or a loss of which ``client`` has
        to be told. None: a client that begins now."""
        owed = self.losses.untold if client is None else client.owed
        return owed or self._unflushed(None, False)

    def _unflushed(self, but: TaskSlot | None, resuming: bool) -> bool:
        """Whether something is not on stable storage. ``but``: the command that brought the report,
        and was not executed. ``resuming``: commands that have not ended do not count: they will be
        sent."""
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
                "%s: the target was reset or lost power (%s); what was not flushed is sent again",
                self.name,
                sense,
            )
        else:
            self._lose(f"was reset or lost power while writes were not flushed ({sense})")
        return replay

    def _lose(self, what: str) -> None:
        self.losses.add()
        log.error("%s: the target %s; the next flush fails", self.name, what)

    # -- replay -----------------------------------------------------------------------------------

    @property
    def replays(self) -> int:
        """Losses so far that a replay makes good; for ``replayed``."""
        return self._replays

    def replayed(self, replays: int) -> None:
        """Note that all that was in the journal after ``replays`` losses has been sent again."""
        with self._lock:
            self.epoch += 1
            self.replay_needed = self._replays != replays

    def gave_up(self, what: str) -> None:
        """Note that the target refused to take a change again: it is lost. ``what`` completes "the
        target" in the log."""
        self._lose(what)
