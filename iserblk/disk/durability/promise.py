"""Durability of writes: which have returned but may not be on stable storage, and what a flush may
promise.

``hear`` is called for each command that brought sense data, in the order in which they came. So a
report that the target lost power is never taken for older than a flush that it spoils, or than a
write that it lost.

How a loss is learned:

- From a unit attention: the target says that it was reset or lost power.
- From nothing: many targets report that to no nexus (LIO), or to the first nexus after their start
  only (istgt). So each session reinstatement with something unflushed counts as a loss
  (``reinstated``). A connection that is reinstated within its living session does not.
- From a flush that did not succeed: a target reports once that it could not write what it had
  cached, and then forgets it (Linux, below LIO, tgtd and istgt). A later flush succeeds, and means
  nothing for what was written before. So a SYNCHRONIZE CACHE that ends badly is a loss. After one
  whose status never came, what it was to cover is in doubt (``doubt``). The same holds for a
  WRITE with FUA, for which targets wait for the disk in the same way.

After a loss: with a journal, everything in it is sent again on a new connection
(``replay_needed``), and no flush succeeds before that. Without a journal, or when the journal does
not have everything, the loss is counted (``losses``): the next flush of each client fails, and so
does every flush of a client that is under way. Where another host writes to the LUN, too
(``shared``), the journal is not sent again, as it might undo what that host has written since: it
is read back and compared, and what differs is lost. So is what was written before the target
refused a command because another host has reserved the LUN (``foreign``).

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
from enum import Enum, auto
from itertools import count
from typing import Any, Final, NamedTuple

from iserblk.commands.command import Command, InDoubt, Waiter
from iserblk.disk.durability.losses import Losses
from iserblk.disk.durability.seam import Journal, Waiting
from iserblk.disk.ranges import RangeLock
from iserblk.disk.seam import FlushClient
from iserblk.errors import CommandTimeout, IserblkError, ScsiError
from iserblk.loop.clock import monotonic
from iserblk.scsi import opcodes
from iserblk.scsi import sense as sense_data
from iserblk.scsi import status as sam
from iserblk.scsi.cdb import FUA
from iserblk.scsi.sense import Sense

log = logging.getLogger(__name__)

_MODE_PARAMETERS_CHANGED: Final = 0x2A01
_COMMUNICATION: Final = 0x08  # ASC: logical unit communication failure
_OF_RESERVATIONS: Final = (  # refused where the key is another; this says nothing of the medium
    opcodes.PERSISTENT_RESERVE_IN,
    opcodes.PERSISTENT_RESERVE_OUT,
    opcodes.RESERVE_6,
    opcodes.RELEASE_6,
)
_SYNCHRONIZE: Final = (opcodes.SYNCHRONIZE_CACHE_10, opcodes.SYNCHRONIZE_CACHE_16)
_WRITE: Final = (opcodes.WRITE_10, opcodes.WRITE_16)
_SAY_NOTHING_OF_DATA: Final = (sense_data.ILLEGAL_REQUEST, sense_data.UNIT_ATTENTION)


class Flushed(Enum):
    """How a flush has ended."""

    DONE = auto()
    AGAIN = auto()  # what it was to cover was lost and will be sent again: flush after that
    LOST = auto()  # meanwhile something was lost for good: perhaps part of what it was to cover


class FlushToken(NamedTuple):
    """What one flush was to cover: from ``begin_flush``, for ``end_flush``. ``number``: of this
    flush."""

    number: int
    needed: bool
    losses: int
    replays: int
    covered: Any  # of the journal, by the flush
    complete: bool  # what the flush does not cover is in the journal
    gaps: int


class _Wait(NamedTuple):
    """A command that waits for the medium, and is no flush of the disk's. ``tag``: that of its slot
    before it was sent."""

    slot: Command
    tag: int
    begun: float


def _fails_without_reason(slot: Command, sense: Sense) -> bool:
    """Whether the command ended with CHECK CONDITION and no sense key: nothing is known of it.
    (With the key NO SENSE it was carried out.)"""
    return (
        sense.key == sense_data.NO_SENSE
        and slot.status == sam.CHECK_CONDITION
        and not sense_data.tells_of_success(slot.sense)
    )


def _loses_cache(slot: Command, sense: Sense) -> bool:
    """Whether a SYNCHRONIZE CACHE that ended with this sense data may have been the only report
    that cached data could not be written: MEDIUM ERROR, HARDWARE ERROR or the like.

    Not a unit attention or a refusal of the command: nothing was done. A deferred error is heard by
    itself. Where fsync has failed, LIO says NOT READY, LOGICAL UNIT COMMUNICATION FAILURE, and
    istgt sends no sense data.
    """
    if sense.is_deferred or sense.key in _SAY_NOTHING_OF_DATA:
        return False
    if sense.key in (sense_data.NO_SENSE, sense_data.RECOVERED_ERROR):
        return _fails_without_reason(slot, sense)
    if sense.key == sense_data.NOT_READY:
        return sense.asc == _COMMUNICATION
    if sense.key == sense_data.DATA_PROTECT:
        return sense.code == sense_data.SPACE_ALLOCATION_FAILED
    return True


def _loses_more(slot: Command, sense: Sense) -> bool:
    """Whether a WRITE with FUA that ended with this sense data may have been that report: targets
    wait for the disk by fsync(2), too, which reports what was lost of other writes. What can be
    the fault of this WRITE alone is left out: no space, or data that did not come whole."""
    if slot.cdb[0] not in _WRITE or not slot.cdb[1] & FUA or sense.is_deferred:
        return False
    if sense.key in (sense_data.MEDIUM_ERROR, sense_data.HARDWARE_ERROR):
        return True
    if _fails_without_reason(slot, sense):
        return True
    return sense.key == sense_data.NOT_READY and sense.asc == _COMMUNICATION


def is_unheard(problem: IserblkError) -> bool:
    """Whether a SYNCHRONIZE CACHE, or WRITE with FUA, that failed so may have been begun, and
    brought no sense data: it was aborted. It may have failed in the way that a target reports only
    once."""
    if isinstance(problem, CommandTimeout):
        return True
    # Other errors: it was not sent, or is sent again on the next connection.
    return isinstance(problem, ScsiError) and not (
        isinstance(problem, InDoubt)
        or isinstance(problem.sense, Sense)
        or problem.status in (sam.BUSY, sam.TASK_SET_FULL, sam.RESERVATION_CONFLICT)
    )


class MakingRoom:
    """The flush of a caller that has found the journal full: the others wait for it."""

    def __init__(self) -> None:
        self._flushing = False
        self._waiters: list[Waiter] = []

    def begin(self, waiter: Waiter) -> bool:
        """Ask to be the caller that flushes. True: flush, then call ``end``. False: another caller
        flushes; ``waiter.pending`` was raised by one, and ``waiter`` is told when that flush
        ends."""
        if self._flushing:
            waiter.pending += 1
            self._waiters.append(waiter)
            return False
        self._flushing = True
        return True

    def end(self) -> None:
        self._flushing = False
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter.task_done()


class Durability:
    """Which writes to one LUN are not on stable storage yet, or are lost. ``name``: for logs.
    ``volatile``: the LUN has a write cache that must be flushed (WCE); this may be learned later.

    ``losses``: those that no replay makes good, and who knows of them. ``journal``: the journal,
    while there is something to keep in it. ``shared``: another host writes to the LUN, too; the
    journal is compared with it, and never written. ``replay_needed``: the target has, or may have,
    lost its cache, and what the journal has was not sent again (or compared) yet. ``epoch`` changes
    with each such loss, and with each replay.

    ``foreign``: up to this number changes of the journal may be older than what another host has
    written, as it was heard to have reserved the LUN then: they are compared, and never sent again.
    ``unproved``: at the next replay it proves nothing of them that the LUN shows them.
    """

    def __init__(self, name: str, volatile: bool, ranges: RangeLock) -> None:
        self.name = name
        self.volatile = volatile
        self.losses = Losses()
        self.journal: Journal | None = None
        self.making_room = MakingRoom()
        self.shared = False
        self.replay_needed = False
        self.epoch = 0
        self.foreign = 0
        self.unproved = False
        self._assigned: Journal | None = None  # whether in use or not
        self._complete = True  # all that is not flushed is in the journal, if there is one
        self._gaps = 0  # how often that has ended
        self._ranges = ranges
        # A write has ended that no flush covers. Set before the slot of the write, which shows its
        # blocks, is given back.
        self._dirty = False
        self._flushing = 0  # flushes under way that have something to flush
        self._numbers = count(1)  # of flushes
        self._unanswered: set[int] = set()  # flushes whose outcome at the target is not known yet
        # When these began, and those with nothing to flush.
        self._begun: dict[int, float] = {}
        self._waits: dict[int, _Wait] = {}  # other commands, by the index of their slot
        self._doubted = False  # the journal is to be sent again before the next flush
        self._told_since = -1.0  # the loss of a connection that was told last
        self._replays = 0  # losses that a replay makes good

    def assign(self, journal: Journal, shared: bool) -> None:
        """Keep changes in ``journal`` while the LUN is volatile. Call it before the first
        change."""
        self._assigned = journal
        self.shared = shared
        if self.volatile:
            self.journal = journal

    def turn_volatile(self) -> None:
        """Note that the LUN has, or may have, a write cache now. A flush too many does no harm."""
        if not self.volatile:
            self.volatile = True
            self._complete = not self._dirty and not self._ranges.changing(None)
            self._gaps += not self._complete
            self.journal = self._assigned

    def turn_write_through(self) -> None:
        """Note that the LUN, as far as can be known, has no write cache. The journal goes on:
        commands in flight are in it, and the LUN may tell of a cache later."""
        self.volatile = False

    def stale(self, epoch: int) -> bool:
        """Whether a read that began in ``epoch`` and succeeded must be done again: it may have seen
        what was there before a write that was lost. The present state alone says too little: the
        task that reads may look long after the answer came, when the replay is over."""
        return self.replay_needed or epoch != self.epoch

    def doubt_reads(self) -> None:
        """Have reads done again that are in flight: the LUN may be another one."""
        self.epoch += 1

    def bypass(self) -> None:
        """Note that a change is about to be submitted that the journal does not get, if there is
        one. Its slot shows its blocks, and ``wrote`` follows when it has ended."""
        self._complete = False
        self._gaps += 1

    def wrote(self) -> None:
        """Note that a write has ended, well or not. Call it before the slot of the write is given
        back."""
        self._dirty = True

    def shows(self, block: int, content: memoryview) -> bool:
        """Whether the LUN, which has ``content`` there, shows what the journal has of a block, if
        anything. Else it has lost that; or a write that has failed, or that was under way at the
        same time, came behind it."""
        newest = None if self.journal is None else self.journal.newest(block)
        return newest is None or newest == content

    def begin_flush(self) -> FlushToken:
        """Begin a flush of what has been written so far. Returns what ``end_flush`` needs."""
        needed = self._dirty or self._flushing > 0
        self._flushing += needed
        self._dirty = False
        journal = self._assigned
        covered = journal.begin_flush() if journal is not None else None
        complete = self._complete or (
            journal is not None and not self._ranges.changing_outside(journal.has)
        )
        number = next(self._numbers)
        self._begun[number] = monotonic()
        if needed:
            self._unanswered.add(number)
        return FlushToken(
            number, needed, self.losses.count, self._replays, covered, complete, self._gaps
        )

    def answered(self, token: FlushToken) -> frozenset[int]:
        """The target says that the flush succeeded. Returns the flushes that it has not answered
        yet: one of them may be the one to which it reports that it could not write what it had
        cached. So wait until they are no longer ``unanswered``."""
        self._forget(token)
        return self.flushes_under_way()

    def _forget(self, token: FlushToken) -> None:
        self._unanswered.discard(token.number)
        self._begun.pop(token.number, None)

    def begin_wait(self, slot: Command) -> None:
        """Note that a command which waits for the medium, and is no flush of the disk's, is about
        to be submitted: it may be told what the target could not keep. ``end_wait`` is to follow,
        before its slot is given back."""
        self._waits[slot.index] = _Wait(slot, slot.tag, monotonic())

    def end_wait(self, slot: Command) -> None:
        self._waits.pop(slot.index, None)

    def flushes_under_way(self) -> frozenset[int]:
        """The flushes that the target has not answered yet."""
        return frozenset(self._unanswered)

    def unanswered(self, flushes: frozenset[int]) -> bool:
        """Whether the target has not answered one of these flushes yet."""
        return not flushes.isdisjoint(self._unanswered.copy())

    def doubt(self, but: Command | None, what: str, tell: bool) -> None:
        """Note that the status of a flush was not learned, or that of a WRITE with FUA (see
        ``_loses_more``): what is not flushed may be lost, although a later flush succeeds. So may a
        change that was under way when the flush began: the target may have carried it out before
        it. Call it before ``end_flush``. ``but``: the WRITE, whose slot is not given back yet.
        ``what`` completes "the target" in the log. ``tell``: it is a loss where it cannot be sent
        again."""
        if not self.volatile or not self._unflushed(but, False):
            return
        again = self._replays_all() and not self.shared
        self._doubted = self._doubted or again
        if again:
            log.warning(
                "%s: the target %s; what was not flushed is sent again before the next flush",
                self.name,
                what,
            )
        elif tell:
            self._lose(what)

    @property
    def doubted(self) -> bool:
        """Whether what was not flushed is in doubt: see ``renew``."""
        return self._doubted

    def renew(self) -> bool:
        """Before a flush, or before a block is read to be changed in part: whether what is in doubt
        has to be sent again first. True: cut the connection now; the next one begins with
        that."""
        if not self._doubted or self.replay_needed:
            return False
        what = "may have lost what an earlier flush was to make durable"
        return self._lose_cache(what, compare=False)

    def end_flush(self, token: FlushToken, done: bool) -> Flushed:
        """End a flush; returns how it ended. ``done``: the target says that it succeeded."""
        ended = self._end_flush(token, done)
        # Last: a thread that asks meanwhile whether something is unflushed must not hear No.
        self._flushing -= token.needed
        return ended

    def _end_flush(self, token: FlushToken, done: bool) -> Flushed:
        self._forget(token)
        again = self.replay_needed or token.replays != self._replays or (done and self._doubted)
        if self._assigned is not None:
            if done and not again:
                self._assigned.flushed(token.covered)
            else:
                self._assigned.not_flushed(token.covered)
        if again:
            self._dirty = True
            return Flushed.AGAIN
        if done:
            if token.complete and token.gaps == self._gaps:
                self._complete = True
        elif token.needed:
            self._dirty = True
        return Flushed.DONE if token.losses == self.losses.count else Flushed.LOST

    def hear(self, slot: Command) -> bool:
        """Take in ``slot.sense`` of a command of this LUN that ended with another status than GOOD.
        True: the connection has to be replaced, and the journal sent again before anything else."""
        return self._hear(slot, resuming=False)

    def hear_resuming(self, slot: Command) -> None:
        """As ``hear``, for a fresh connection that is not in use yet: queued commands will be sent
        on it after ``replay``."""
        self._hear(slot, resuming=True)

    def _hear(self, slot: Command, resuming: bool) -> bool:
        if slot.status == sam.RESERVATION_CONFLICT:
            if self.journal is not None and slot.cdb[0] not in _OF_RESERVATIONS:
                self.foreign = self.journal.mark()
            return False
        sense = sense_data.decode(slot.sense)
        if sense.is_deferred:
            # The write that it belongs to has long been acknowledged (SPC-4, deferred errors).
            if sense.key not in (sense_data.NO_SENSE, sense_data.RECOVERED_ERROR):
                self._lose(f"could not keep what was written before ({sense})")
        elif sense.is_unit_attention:
            if sense.code == _MODE_PARAMETERS_CHANGED:
                self.turn_volatile()
            elif sense.code in sense_data.POWER_LOST and self.volatile:
                if resuming:
                    # ``reinstated`` follows before the connection comes into use. Unless it was
                    # called already: then the target has lost its cache once more.
                    self._replays += self.replay_needed
                elif self._unflushed(slot, False):
                    return self._lose_cache(f"was reset or lost power ({sense})")
        elif self.volatile:
            what = ""
            if slot.cdb[0] in _SYNCHRONIZE:
                what = "a flush" if _loses_cache(slot, sense) else ""
            elif _loses_more(slot, sense):
                what = "a write with FUA"
            if what and self._unflushed(slot, False):
                return self._lose_cache(f"did not end {what} well ({sense})", compare=False)
        return False

    def reinstated(self, since: float) -> None:
        """Note that a login has reinstated the session whose connection was lost at ``since``
        (monotonic seconds). The target may have lost its cache meanwhile, and need not say so.
        Call it for each login, before ``replay``."""
        if not self.replay_needed:
            if not self.volatile or not self._unflushed(None, True):
                return
            if self._told_since != since or self._replays_all():
                self._told_since = since
                # No more than a precaution, with most targets and most losses of a connection.
                self._lose_cache("may have lost its cache, as its session was lost", logging.INFO)
        # What was under way, and waits for the medium, may have failed, and its answer is lost.
        unheard = any(begun <= since for begun in self._begun.values()) or any(
            each.begun <= since and each.slot.tag != each.tag for each in self._waits.values()
        )
        self.unproved = self.unproved or (self.replay_needed and unheard)

    def _replays_all(self) -> bool:
        """Whether the journal has all that is not flushed."""
        return self.journal is not None and self._complete

    def wants_flush(self, client: FlushClient | None = None) -> bool:
        """Whether a flush would have something to make durable, or a loss of which ``client`` has
        to be told. None: a client that begins now."""
        owed = self.losses.untold if client is None else client.owed
        return owed or self._unflushed(None, False)

    @property
    def kept(self) -> int | None:
        """Bytes in the journal: acknowledged, and not flushed. None: there is none."""
        return None if self.journal is None else self.journal.size

    @property
    def unflushed(self) -> bool:
        """Whether something that was acknowledged, or is under way, is not on stable storage."""
        return self.volatile and self._unflushed(None, False)

    def _unflushed(self, but: Command | None, resuming: bool) -> bool:
        """Whether something is not on stable storage. ``but``: the command that brought the report,
        and was not executed. ``resuming``: commands that have not ended do not count: they will be
        sent."""
        changing = self._ranges.changing(but, ended_only=resuming)  # first: see ``_dirty``
        return changing or self._dirty or self._flushing > 0

    def _lose_cache(self, what: str, level: int = logging.WARNING, *, compare: bool = True) -> bool:
        """The target has, or may have, lost all that was not flushed. Returns whether the journal
        is to be sent again, or compared. ``what`` completes "the target" in the log, which tells of
        a replay at ``level``. ``compare`` False: to read it back would prove nothing, as a target
        may go on showing what it could not write."""
        replay = self._replays_all() and (compare or not self.shared)
        if replay:
            self.unproved = self.unproved or self._doubted or not compare
        self._doubted = False
        if replay:
            self._replays += 1
            self.epoch += 1
            self.replay_needed = True
        if replay:
            log.log(
                level,
                "%s: the target %s; what was not flushed is %s",
                self.name,
                what,
                "compared" if self.shared else "sent again",
            )
        else:
            self._lose(f"{what} while writes were not flushed")
        return replay

    def _lose(self, what: str) -> None:
        self.losses.add()
        log.error("%s: the target %s; the next flush fails", self.name, what)

    # -- replay -----------------------------------------------------------------------------------

    def waiting_changes(self) -> list[Waiting]:
        """Changes that are queued, and will be sent."""
        return [
            Waiting(slot.first, slot.last, slot.data if slot.cdb[0] in _WRITE else None)
            for slot in self._ranges.queued()
        ]

    def begin_replay(self) -> int:
        """Begin to send the journal again: what was in doubt is so no longer when that has
        succeeded. Returns the argument of ``replayed``."""
        self.unproved = self.unproved or self._doubted
        self._doubted = False
        return self._replays

    def replayed(self, replays: int) -> None:
        """Note that all that was in the journal after ``replays`` losses has been sent again."""
        self.epoch += 1
        self.replay_needed = self._replays != replays
        self.unproved = self.unproved and self.replay_needed

    def gave_up(self, what: str) -> None:
        """Note that the target refused to take a change again: it is lost. ``what`` completes "the
        target" in the log."""
        self._lose(what)
