"""Sending the journal again, on a connection that takes the place of a lost one."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from time import monotonic

from iserblk.disk.durability.journal import Entry
from iserblk.disk.durability.promise import Durability
from iserblk.disk.seam import LunInfo
from iserblk.errors import IserblkError, ScsiError
from iserblk.initiator.commands import (
    failure,
    fill_no_data,
    fill_write,
    port_state,
    release_ended,
    retry_delay,
    take,
)
from iserblk.initiator.session.session import Session
from iserblk.initiator.session.slots import Operation, TaskSlot
from iserblk.scsi import opcodes
from iserblk.scsi.cdb import Slot

log = logging.getLogger(__name__)

PARALLEL = 16  # commands in flight at the most
_UNMAP = bytes([opcodes.UNMAP])

PackWrite = Callable[[Slot, int, int, int], None]


def replay(
    session: Session, lun: bytes, info: LunInfo, durability: Durability, pack_write: PackWrite
) -> Operation[None]:
    """See ``DiskCore.replay``. Changes of the same blocks are sent one after another, in order;
    nothing is dropped from the journal, as it is not flushed yet."""
    journal = durability.journal
    while durability.replay_needed and journal is not None:
        replays = durability.replays
        entries = journal.begin_replay()
        try:
            log.info("%s: sending %d unflushed changes again", info.name, len(entries))
            todo = deque(piece for entry in entries for piece in _pieces(entry, info))
            while todo:
                batch = _next_batch(todo)
                yield from _send(session, lun, info, durability, pack_write, batch)
        finally:
            journal.end_replay()
        durability.replayed(replays)


def _pieces(entry: Entry, info: LunInfo) -> list[Entry]:
    """As large as the LUN takes them now."""
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
    """The next few in order, of which no two have a block in common."""
    batch: list[Entry] = []
    while todo and len(batch) < PARALLEL:
        entry = todo[0]
        if any(entry.first <= other.last and entry.last >= other.first for other in batch):
            break
        batch.append(todo.popleft())
    return batch


def _send(
    session: Session,
    lun: bytes,
    info: LunInfo,
    durability: Durability,
    pack_write: PackWrite,
    batch: list[Entry],
) -> Operation[None]:
    """All of the batch, with the retries that are legal."""
    waiter = session.new_waiter()
    deadline = monotonic() + session.io_timeout
    todo = [(entry, 0) for entry in batch]
    while todo:
        running: list[tuple[TaskSlot, Entry, int]] = []
        pause = 0.0
        slot: TaskSlot | None = yield from take(session, waiter)
        try:
            while slot is not None:
                entry, attempt = todo.pop(0)
                _fill(slot, lun, entry, info.block_size, pack_write)
                slot.waiter = waiter
                slot.deadline = deadline
                running.append((slot, entry, attempt))
                slot = session.queue.take_now() if todo else None
            waiter.pending += len(running)
            for sent, _, _ in running:
                session.queue.submit(sent)
            while waiter.pending:
                yield waiter
            for sent, entry, attempt in running:
                if entry.command_block[:1] == _UNMAP and sent.residual > 0:
                    sent.residual = 0  # as in ``DiskCore.trim``: tgtd takes it for that
                problem = failure(sent, info.name)
                if problem is None:
                    continue
                delay = retry_delay(problem, attempt)
                if delay is None or monotonic() + delay >= deadline:
                    _give_up(problem, durability)
                else:
                    pause = max(pause, delay)
                    todo.append((entry, attempt + 1))
        finally:
            release_ended(session, [sent for sent, _, _ in running])
        if pause:
            yield pause


def _fill(slot: TaskSlot, lun: bytes, entry: Entry, block: int, pack_write: PackWrite) -> None:
    if entry.data is None:
        fill_no_data(slot, lun)
    else:
        fill_write(slot, lun, entry.data)
    if entry.command_block:
        slot.cdb[:] = entry.command_block.ljust(16, b"\0")
    else:
        assert entry.data is not None
        pack_write(slot.cdb, entry.first, len(entry.data) // block, 0)


def _give_up(problem: IserblkError, durability: Durability) -> None:
    """Raises what may be better on the next connection; the rest is lost, and will be told."""
    if (
        not isinstance(problem, ScsiError)
        or retry_delay(problem, 0) is not None
        or port_state(problem) is not None
    ):
        raise problem
    durability.gave_up(f"refused an unflushed write that was sent again ({problem})")
