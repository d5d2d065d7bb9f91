"""Sends the journal again, on a connection that takes the place of a lost one."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Final

from iserblk.disk.durability.journal import Entry
from iserblk.disk.durability.promise import Durability
from iserblk.disk.seam import LunInfo
from iserblk.errors import IserblkError, ScsiError
from iserblk.initiator.commands import (
    PARALLEL,
    Work,
    fill_no_data,
    fill_write,
    port_state,
    retry_delay,
    run,
)
from iserblk.initiator.session.commanding import CommandSession
from iserblk.initiator.session.slots import Operation, TaskSlot, Waiter
from iserblk.scsi import opcodes
from iserblk.scsi.cdb import Slot

log = logging.getLogger(__name__)

_UNMAP: Final = bytes([opcodes.UNMAP])

PackWrite = Callable[[Slot, int, int, int], None]


def replay(
    session: CommandSession,
    lun: bytes,
    info: LunInfo,
    durability: Durability,
    pack_write: PackWrite,
) -> Operation[None]:
    """See ``DiskCore.replay``. Changes of the same blocks are sent one after another, in order.
    Nothing is dropped from the journal, because nothing is flushed yet."""
    journal = durability.journal
    while durability.replay_needed and journal is not None:
        replays = durability.replays
        entries = journal.begin_replay()
        try:
            log.info("%s: sending %d unflushed changes again", info.name, len(entries))
            todo = deque(piece for entry in entries for piece in _pieces(entry, info))
            while todo:
                batch = _next_batch(todo)
                # Each batch has the time for one request.
                deadline = monotonic() + session.io_timeout
                work = _Sending(session, lun, info, durability, pack_write, deadline)
                yield from run(work, batch)
        finally:
            journal.end_replay()
        durability.replayed(replays)


def _pieces(entry: Entry, info: LunInfo) -> list[Entry]:
    """The entry in pieces, each as large as the LUN takes now."""
    data, step = entry.data, info.max_transfer // info.block_size
    if entry.command_block or data is None or entry.last - entry.first < step:
        return [entry]
    return [
        entry._replace(
            first=first,
            last=min(first + step, entry.last + 1) - 1,
            data=data[
                (first - entry.first) * info.block_size :
                (first - entry.first + step) * info.block_size
            ],
        )
        for first in range(entry.first, entry.last + 1, step)
    ]  # fmt: skip


def _next_batch(todo: deque[Entry]) -> list[Entry]:
    """Take the next few entries, in order, of which no two have a block in common."""
    batch: list[Entry] = []
    while todo and len(batch) < PARALLEL:
        entry = todo[0]
        if any(entry.first <= other.last and entry.last >= other.first for other in batch):
            break
        batch.append(todo.popleft())
    return batch


class _Sending(Work[Entry]):
    """Sends entries that have no block in common, with the retries that are legal."""

    def __init__(
        self,
        session: CommandSession,
        lun: bytes,
        info: LunInfo,
        durability: Durability,
        pack_write: PackWrite,
        deadline: float,
    ) -> None:
        super().__init__(session, lun, info.name, deadline)
        self._block = info.block_size
        self._durability = durability
        self._pack_write = pack_write

    def fill(self, slot: TaskSlot, piece: Entry, waiter: Waiter | None) -> bool:
        data = piece.data
        if data is None:
            fill_no_data(slot, self.lun)
        else:
            fill_write(slot, self.lun, data)
        if piece.command_block:
            slot.cdb[:] = piece.command_block.ljust(16, b"\0")
        else:
            assert data is not None
            self._pack_write(slot.cdb, piece.first, len(data) // self._block, 0)
        return True

    def outcome(self, slot: TaskSlot, piece: Entry) -> IserblkError | None:
        if piece.command_block[:1] == _UNMAP and slot.residual > 0:
            slot.residual = 0  # tgtd, as in ``DiskCore.trim``
        return super().outcome(slot, piece)

    def gives_up(self, problem: IserblkError) -> IserblkError | None:
        """The error, where the next connection may do better. None: the LUN refuses the change for
        good; it is lost, and the next flush reports it."""
        if (
            not isinstance(problem, ScsiError)
            or retry_delay(problem, 0) is not None
            or port_state(problem) is not None
        ):
            return problem
        self._durability.gave_up(f"refused an unflushed write that was sent again ({problem})")
        return None
