"""Compares a LUN with its journal, where another host may write to the LUN, too.

The newest change of each block is what has to be there, or what a WRITE that waits to be sent will
write: it may have been carried out on the connection that was lost. It may fail yet, and must not
hide then that what was there before is lost. Left out are blocks that another command which waits
will change, and blocks that were unmapped, whose content is undefined.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

from iserblk.commands.command import Command, Operation, Waiter
from iserblk.commands.running import (
    ONCE,
    PARALLEL,
    Work,
    fill_read,
    is_unfit,
    port_state,
    retry_delay,
    run,
)
from iserblk.commands.session import CommandSession
from iserblk.disk.durability.block_sets import Blocks
from iserblk.disk.durability.seam import Entry, Waiting
from iserblk.disk.seam import LunInfo
from iserblk.errors import IserblkError, ScsiError
from iserblk.loop.clock import monotonic
from iserblk.scsi import opcodes
from iserblk.scsi.cdb import Slot

log = logging.getLogger(__name__)

MOST_COMPARED: Final = 256 << 20  # bytes that are read back for one change
_UNMAP: Final = bytes([opcodes.UNMAP])

PackRead = Callable[[Slot, int, int, int], None]


def is_final(problem: IserblkError) -> bool:
    """Whether a command that failed so would do no better on the next connection."""
    return (
        isinstance(problem, ScsiError)
        and retry_delay(problem, ONCE) is None
        and port_state(problem) is None
    )


class _Expected(NamedTuple):
    """What one READ has to bring. ``data``: None: zeroes."""

    first: int  # block
    blocks: int
    data: memoryview | None


def _expected(entry: Entry, fresh: Sequence[tuple[int, int]], info: LunInfo) -> list[_Expected]:
    """The READs that show whether the parts ``fresh`` of the change are there."""
    step = info.max_transfer // info.block_size
    data = None if entry.command_block else entry.data
    found: list[_Expected] = []
    for low, high in fresh:
        for first in range(low, high + 1, step):
            blocks = min(step, high + 1 - first)
            part = None
            if data is not None:
                at = (first - entry.first) * info.block_size
                part = data[at : at + blocks * info.block_size]
            found.append(_Expected(first, blocks, part))
    return found


def compare(
    session: CommandSession,
    lun: bytes,
    info: LunInfo,
    pack_read: PackRead,
    entries: list[Entry],
    settled: Iterable[tuple[int, int]],
    waiting: Sequence[Waiting],
) -> Operation[bool]:
    """Whether the LUN has what ``entries`` of its journal, in order, have. ``settled``: blocks
    (first, last) that are not looked at. ``waiting``: changes that wait to be sent. Raises what the
    next connection may do better."""
    log.info("%s: comparing %d unflushed changes with the LUN", info.name, len(entries))
    blocks = Blocks(settled)
    for each in waiting:
        if each.data is None:
            blocks.add(each.first, each.last)
    for entry in reversed(entries):
        fresh = blocks.add(entry.first, entry.last)
        if entry.command_block[:1] == _UNMAP:
            continue
        if sum(last - first + 1 for first, last in fresh) * info.block_size > MOST_COMPARED:
            log.warning("%s: too large to be read back: what was zeroed last", info.name)
            return False
        todo = deque(_expected(entry, fresh, info))
        while todo:
            batch = [todo.popleft() for _ in range(min(PARALLEL, len(todo)))]
            deadline = monotonic() + session.patience
            work = _Comparing(session, lun, info, pack_read, deadline, waiting)
            yield from run(work, batch)
            if work.differs:
                return False
            todo.extendleft(part for piece in work.refused for part in _halves(piece, info))
    return True


def _halves(piece: _Expected, info: LunInfo) -> list[_Expected]:
    half = piece.blocks // 2
    at, data = half * info.block_size, piece.data
    return [
        _Expected(piece.first, half, None if data is None else data[:at]),
        _Expected(piece.first + half, piece.blocks - half, None if data is None else data[at:]),
    ]


def _writes(change: Waiting, block: int, content: memoryview) -> bool:
    if change.data is None or not change.first <= block <= change.last:
        return False
    at = (block - change.first) * len(content)
    return change.data[at : at + len(content)] == content


class _Comparing(Work[_Expected]):
    """Reads, and compares. ``differs``: something is not as expected, or cannot be read for good.
    ``refused``: what the LUN does not let be read at once."""

    def __init__(
        self,
        session: CommandSession,
        lun: bytes,
        info: LunInfo,
        pack_read: PackRead,
        deadline: float,
        waiting: Sequence[Waiting],
    ) -> None:
        super().__init__(session, lun, info.name, deadline)
        self._block = info.block_size
        self._pack_read = pack_read
        self._waiting = waiting
        self._buffers: dict[int, bytearray] = {}  # by the first block
        self.differs = False
        self.refused: list[_Expected] = []

    def fill(self, slot: Command, piece: _Expected, waiter: Waiter | None) -> bool:
        buffer = self._buffers[piece.first] = bytearray(piece.blocks * self._block)
        fill_read(slot, self.lun, memoryview(buffer))
        self._pack_read(slot.cdb, piece.first, piece.blocks, 0)
        return True

    def outcome(self, slot: Command, piece: _Expected) -> IserblkError | None:
        problem = super().outcome(slot, piece)
        if problem is None:
            found = memoryview(self._buffers.pop(piece.first))
            expected = memoryview(bytes(len(found))) if piece.data is None else piece.data
            if found != expected and not self._is_explained(piece, found, expected):
                self.differs = True
        elif is_unfit(problem) and piece.blocks > 1:
            self.refused.append(piece)
            return None
        return problem

    def _is_explained(self, piece: _Expected, found: memoryview, expected: memoryview) -> bool:
        """Whether each block that is not as expected is as a WRITE that waits would leave it."""
        size = self._block
        for number in range(piece.blocks):
            at = number * size
            part = found[at : at + size]
            if part != expected[at : at + size] and not any(
                _writes(each, piece.first + number, part) for each in self._waiting
            ):
                return False
        return True

    def gives_up(self, piece: _Expected, problem: IserblkError) -> IserblkError | None:
        if is_final(problem):
            self.differs = True
            return None
        return problem
