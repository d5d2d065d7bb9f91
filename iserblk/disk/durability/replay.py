"""Sends the journal again, on a connection that takes the place of a lost one.

What it holds was taken by the LUN before. On the new connection the LUN may take less at once, or
not know a command any more: a smaller limit must not make a loss of what was acknowledged. So each
change is sent as the LUN takes it now, in any form with the same effect. An UNMAP that is refused
is left out: the content of its blocks is undefined anyway.

Of each block the newest content is sent, and nothing older. The LUN may still have what is newest,
and another host may shut this one out in the middle: nothing older may be put over it, also not for
a moment.

Where another host writes to the LUN, too, nothing is sent again: the LUN is compared with the
journal (``disk.durability.comparing``). So it is with what was written before another host was
heard to have reserved it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol

from iserblk.commands.command import Command, Operation, Waiter
from iserblk.commands.running import (
    PARALLEL,
    Work,
    fill_no_data,
    fill_write,
    ignored_ndob,
    is_refusal,
    is_unknown,
    run,
)
from iserblk.commands.session import CommandSession
from iserblk.disk.durability.block_sets import Blocks
from iserblk.disk.durability.comparing import PackRead, compare, is_final
from iserblk.disk.durability.promise import Durability
from iserblk.disk.durability.seam import Entry
from iserblk.disk.seam import LunInfo
from iserblk.errors import IserblkError, ReservationConflict
from iserblk.loop.clock import monotonic
from iserblk.scsi import cdb, opcodes
from iserblk.scsi import lba as lba_data
from iserblk.scsi.cdb import Slot
from iserblk.scsi.limits import MAXIMUM_BLOCKS

log = logging.getLogger(__name__)

# For what is zeroed by writing: eight of the largest commands in flight. (Nothing writes to it, so
# the kernel has one page for all of it.)
ZEROES: Final = memoryview(bytes(8 << 20))
# Bytes of a WRITE SAME: where the LUN refuses this much, zeroes are written. To send so little by
# WRITE SAME is no faster than to write it.
LEAST_WRITE_SAME: Final = 64 << 10

_WRITE: Final = 0
_ZERO: Final = 1  # WRITEs of zeroes
_SAME: Final = 2  # WRITE SAME of zeroes
_UNMAP: Final = 3
_LAST: Final = (1 << 64) - 1  # block

PackWrite = Callable[[Slot, int, int, int], None]


class Limits(Protocol):
    """Limits of a LUN, as ``iserblk.disk.lun.geometry.Geometry`` has them."""

    max_unmap_blocks: int
    max_write_same_blocks: int

    def half(self, blocks: int) -> int: ...


class _Change(NamedTuple):
    """Blocks that are to be changed again, or some of them. ``data``: of a WRITE. ``unmap``,
    ``ndob``: bits of a WRITE SAME."""

    kind: int
    first: int
    last: int
    data: memoryview | None = None
    unmap: bool = False
    ndob: bool = False

    @property
    def blocks(self) -> int:
        return self.last - self.first + 1


def _change(entry: Entry) -> _Change:
    block = entry.command_block
    if not block:
        return _Change(_WRITE, entry.first, entry.last, entry.data)
    if block[0] == opcodes.UNMAP:
        return _Change(_UNMAP, entry.first, entry.last)
    unmap, ndob = bool(block[1] & cdb.UNMAP), bool(block[1] & cdb.NDOB)
    return _Change(_SAME, entry.first, entry.last, None, unmap, ndob)


def _newest(entries: list[Entry], block: int) -> deque[_Change]:
    """The changes, in order, without the blocks that a newer one has a content for. (An UNMAP gives
    none: an older one may be read behind it.)"""
    known = Blocks(())
    found: deque[_Change] = deque()
    for change in map(_change, reversed(entries)):
        first, last, data = change.first, change.last, change.data
        parts = known.missing if change.kind == _UNMAP else known.add
        for low, high in reversed(parts(first, last)):
            part = data
            if data is not None:
                part = data[(low - first) * block : (high + 1 - first) * block]
            found.appendleft(change._replace(first=low, last=high, data=part))
    return found


class _Taken:
    """What the LUN takes on this connection: by kind, the most blocks of one command. A command
    that is refused lowers it."""

    def __init__(self, info: LunInfo, geometry: Limits) -> None:
        self.block = info.block_size
        self.geometry = geometry
        self._can_trim = info.can_trim
        self._can_zero = info.can_zero
        blocks = info.max_transfer // info.block_size
        self._most = [
            blocks,
            min(blocks, len(ZEROES) // info.block_size),
            min(geometry.max_write_same_blocks or MAXIMUM_BLOCKS, MAXIMUM_BLOCKS),
            geometry.max_unmap_blocks or MAXIMUM_BLOCKS,
        ]

    def next_batch(self, todo: deque[_Change]) -> list[_Change]:
        """Take the next few commands, in order, of which no two have a block in common."""
        batch: list[_Change] = []
        while todo and len(batch) < PARALLEL:
            change = todo[0]
            if change.kind == _UNMAP and not self._can_trim:
                todo.popleft()
                continue
            if change.kind == _SAME and not self._can_zero:
                change = change._replace(kind=_ZERO)
            stop = min(change.last, change.first + self._most[change.kind] - 1)
            if any(change.first <= each.last and stop >= each.first for each in batch):
                break
            todo.popleft()
            if stop < change.last:
                todo.appendleft(change._replace(first=stop + 1, data=self._part(change, stop + 1)))
            size = (stop + 1 - change.first) * self.block
            data = change.data[:size] if change.data is not None else None
            batch.append(change._replace(last=stop, data=data))
        return batch

    def _part(self, change: _Change, first: int) -> memoryview | None:
        if change.data is None:
            return None
        return change.data[(first - change.first) * self.block :]

    def other_form(self, change: _Change, problem: IserblkError) -> list[_Change] | None:
        """How ``change``, which was refused, may be taken. None: in no way."""
        kind = change.kind
        if kind == _UNMAP:
            return []
        half = self.geometry.half(change.blocks)
        if kind == _SAME:
            if is_unknown(problem):
                self._can_zero = False
            elif change.ndob:
                return [change._replace(ndob=False)]
            elif half * self.block >= LEAST_WRITE_SAME:
                self._most[_SAME] = min(self._most[_SAME], half)
                return [change]
            return [change._replace(kind=_ZERO)]
        if is_unknown(problem) or change.blocks == 1:
            return None
        self._most[kind] = min(self._most[kind], change.blocks // 2)
        return [change]


def replay(
    session: CommandSession,
    lun: bytes,
    info: LunInfo,
    geometry: Limits,
    durability: Durability,
    pack_write: PackWrite,
    pack_read: PackRead,
) -> Operation[None]:
    """See ``DiskCore.replay``. A change and the UNMAP of the same blocks are sent in their order.
    Nothing is dropped from the journal, because nothing is flushed yet."""
    journal = durability.journal
    while durability.replay_needed and journal is not None:
        replays = durability.begin_replay()
        entries = journal.begin_replay()
        foreign = durability.foreign
        lost = Blocks(())  # that the target refuses
        same, unproved = True, False
        try:
            waiting = durability.waiting_changes()
            if durability.shared:
                unproved = bool(entries) and durability.unproved
                same = not unproved and (
                    yield from compare(session, lun, info, pack_read, entries, (), waiting)
                )
            else:
                newer = [each for each in entries if each.sequence > foreign]
                older = entries[: len(entries) - len(newer)]
                settled = [(each.first, each.last) for each in newer]
                shown = not (older and durability.unproved)
                if older and shown:
                    shown = yield from compare(
                        session, lun, info, pack_read, older, settled, waiting
                    )
                if not shown:
                    journal.give_up(older, [(0, _LAST)])
                    durability.gave_up(
                        "does not have what was written before another host reserved the LUN: it "
                        "has lost its cache, or that host has written there"
                    )
                    entries = newer
                if durability.foreign == foreign:
                    taken = _Taken(info, geometry)
                    yield from _send(session, lun, info, taken, durability, pack_write, newer, lost)
        finally:
            # It is told. Sent once more, later, it might go over what another host has written.
            journal.give_up(entries, lost.ranges)
            journal.end_replay()
        if not same:
            # It is told. To compare it once more would tell it once more.
            journal.flushed(journal.begin_flush())
            durability.gave_up(
                "may have failed a flush whose answer is lost, and would go on showing what it "
                "could not write"
                if unproved
                else "does not have what was written and not flushed: it has lost its cache, or "
                "another host has written there"
            )
        if durability.shared or durability.foreign == foreign:
            durability.replayed(replays)
        # Else another host has reserved the LUN meanwhile: all that is left is older than that.


def _send(
    session: CommandSession,
    lun: bytes,
    info: LunInfo,
    taken: _Taken,
    durability: Durability,
    pack_write: PackWrite,
    entries: list[Entry],
    lost: Blocks,
) -> Operation[None]:
    todo = _newest(entries, info.block_size)
    log.info("%s: sending %d unflushed changes again", info.name, len(todo))
    while batch := taken.next_batch(todo):
        # Each batch has the time for one request.
        deadline = monotonic() + session.patience
        work = _Sending(session, lun, info, durability, pack_write, deadline, lost)
        try:
            yield from run(work, batch)
        except ReservationConflict:
            return  # nothing is left to be sent
        for change, problem in work.refused:
            other = taken.other_form(change, problem)
            if other is None:
                lost.add(change.first, change.last)
                durability.gave_up(_refused(problem))
            else:
                todo.extendleft(other)


def _refused(problem: IserblkError) -> str:
    return f"refused an unflushed write that was sent again ({problem})"


class _Sending(Work[_Change]):
    """Sends changes that have no block in common, with the retries that are legal. ``refused``:
    those that the LUN does not take in this form, and why. Blocks that it does not take at all
    are added to ``lost``. Ends with ReservationConflict where another host has reserved the LUN:
    all are lost then."""

    def __init__(
        self,
        session: CommandSession,
        lun: bytes,
        info: LunInfo,
        durability: Durability,
        pack_write: PackWrite,
        deadline: float,
        lost: Blocks,
    ) -> None:
        super().__init__(session, lun, info.name, deadline)
        self._lost = lost
        self._block = info.block_size
        self._durability = durability
        self._pack_write = pack_write
        self.refused: list[tuple[_Change, IserblkError]] = []

    def fill(self, slot: Command, piece: _Change, waiter: Waiter | None) -> bool:
        blocks = piece.blocks
        data: memoryview | None = piece.data
        if piece.kind == _UNMAP:
            data = memoryview(lba_data.unmap_parameters([(piece.first, blocks)]))
            slot.cdb[:] = cdb.unmap(len(data)).ljust(16, b"\0")
        elif piece.kind == _SAME:
            data = None if piece.ndob else ZEROES[: self._block]
            slot.cdb[:] = cdb.write_same16(piece.first, blocks, piece.unmap, piece.ndob)
        else:
            if piece.kind == _ZERO:
                data = ZEROES[: blocks * self._block]
            self._pack_write(slot.cdb, piece.first, blocks, 0)
        if data is None:
            fill_no_data(slot, self.lun)
        else:
            fill_write(slot, self.lun, data)
        return True

    def outcome(self, slot: Command, piece: _Change) -> IserblkError | None:
        if piece.kind == _UNMAP and slot.residual > 0:
            slot.residual = 0  # tgtd, as in ``DiskCore.trim``
        problem = super().outcome(slot, piece)
        if problem is not None and (is_refusal(problem) or ignored_ndob(problem, slot.cdb)):
            self.refused.append((piece, problem))
            return None
        return problem

    def gives_up(self, piece: _Change, problem: IserblkError) -> IserblkError | None:
        """The error, where the next connection may do better, or nothing more may be sent. None:
        the LUN refuses the change for good; it is lost, and the next flush reports it."""
        if not is_final(problem):
            return problem
        self._durability.gave_up(_refused(problem))
        if isinstance(problem, ReservationConflict):
            # Also what was taken before: that host may write anywhere by now. Nor is what waits
            # for the target sent: that host may have let go of the LUN then.
            self._lost.add(0, _LAST)
            return problem
        self._lost.add(piece.first, piece.last)
        return None
