"""A write cache that appears while writes run, flushes that fail, and answers of the time between a
loss and its repair. Commands are executed and answered by hand."""

from __future__ import annotations

import pytest

from iserblk.commands.command import Command, Operation, Waiter
from iserblk.disk.durability.copies import CHUNK
from iserblk.disk.durability.journal import MemoryJournal
from iserblk.disk.lun.operations import DiskCore
from iserblk.disk.lun.passthrough import send
from iserblk.disk.ranges import RangeLock
from iserblk.errors import IserblkError, ScsiError
from iserblk.scsi import cdb, opcodes
from iserblk.scsi import lba as lba_data
from iserblk.scsi.sense import ILLEGAL_REQUEST, encode_fixed
from iserblk.scsi.status import RESERVATION_CONFLICT
from tests.disk.fake_target import (
    BLOCK,
    MODE_CHANGED,
    POWER_ON,
    FakeSession,
    FakeTarget,
    disk,
    reconnect,
    run,
)
from tests.initiator.fake import CountingWaiter
from tests.support import logs

# How a flush fails that was refused: nothing was done.
INVALID = encode_fixed(ILLEGAL_REQUEST, 0x24, 0x00)

pytestmark = pytest.mark.logs(logs.LOST_POWER, logs.LOST_WRITES)


class Play:
    """A LUN without a write cache at first."""

    def __init__(self, max_transfer: int = 1 << 20, wce: bool = False, limit: int = 1 << 20):
        self.session = FakeSession()
        self.target = FakeTarget(4096)
        self.core: DiskCore = disk(self.session, 4096, max_transfer=max_transfer, wce=wce)
        self.core.keep_journal(limit)

    def execute(self, slot: Command) -> None:
        self.target.execute(slot)
        self.session.end(slot)

    def turn_volatile(self) -> None:
        """A read hears of it."""
        read = self.core.read(memoryview(bytearray(BLOCK)), 4095 * BLOCK)
        next(read)
        self.session.end(self.session.flight[-1], sense=MODE_CHANGED)
        next(read)
        self.execute(self.session.flight[-1])
        assert ended(read)
        assert self.core.durability.volatile

    def flush(self) -> None:
        flush = self.core.flush()
        next(flush)
        self.execute(self.session.flight[-1])
        assert ended(flush)


def ended(operation: Operation[object]) -> bool:
    try:
        next(operation)
    except StopIteration:
        return True
    return False


# --- the cache turns volatile ---


def test_a_write_from_before_is_not_taken_for_kept() -> None:
    """A flush that began and ended while it ran does not cover it, and the journal has it not."""
    play = Play()
    slot = play.core.begin_write(memoryview(b"W" * BLOCK), 0, CountingWaiter())
    assert slot is not None
    play.turn_volatile()
    play.flush()
    play.execute(slot)
    assert play.core.ended_write(slot) is None
    play.target.cached.clear()
    reconnect(play.core, play.target)
    with pytest.raises(IserblkError, match="lost"):
        run(play.core.flush(), play.session, play.target)


def test_with_the_next_flush_the_journal_has_everything() -> None:
    play = Play()
    slot = play.core.begin_write(memoryview(b"W" * BLOCK), 0, CountingWaiter())
    assert slot is not None
    play.turn_volatile()
    play.flush()
    play.execute(slot)
    play.core.ended_write(slot)
    play.flush()  # covers it
    run(play.core.write(memoryview(b"X" * BLOCK), 8 * BLOCK), play.session, play.target)
    play.target.cached.clear()
    reconnect(play.core, play.target)
    run(play.core.flush(), play.session, play.target)
    assert play.target.stable[0] == b"W" * BLOCK
    assert play.target.stable[8] == b"X" * BLOCK


def test_a_flush_from_before_the_cache_does_not_cover_the_write() -> None:
    """It began before the write, and ends when the cache has turned volatile."""
    play = Play()
    token = play.core.durability.begin_flush()
    slot = play.core.begin_write(memoryview(b"W" * BLOCK), 0, CountingWaiter())
    assert slot is not None
    play.turn_volatile()
    play.core.durability.end_flush(token, True)
    play.execute(slot)
    assert play.core.ended_write(slot) is None
    play.target.cached.clear()
    reconnect(play.core, play.target)
    with pytest.raises(IserblkError, match="lost"):
        run(play.core.flush(), play.session, play.target)


@pytest.mark.plain("replaces a method")
def test_a_write_that_claims_after_it_has_looked_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache turns volatile, and a flush begins and ends, between its first look for a journal
    and its claim, in another thread."""
    play = Play()
    claim = RangeLock.claim

    def slow(self: RangeLock, slot: Command, first: int, last: int, waiter: Waiter | None) -> bool:
        monkeypatch.setattr(RangeLock, "claim", claim)
        play.turn_volatile()
        play.flush()
        return claim(self, slot, first, last, waiter)

    monkeypatch.setattr(RangeLock, "claim", slow)
    slot = play.core.begin_write(memoryview(b"W" * BLOCK), 0, CountingWaiter())
    journal = play.core.durability.journal
    assert slot is not None and journal is not None and journal.has(slot)
    play.execute(slot)
    assert play.core.ended_write(slot) is None
    play.target.cached.clear()
    reconnect(play.core, play.target)
    run(play.core.flush(), play.session, play.target)
    assert play.target.stable[0] == b"W" * BLOCK


@pytest.mark.parametrize("flushed", [False, True])
def test_a_piece_that_is_sent_again_is_copied_before_the_buffer_goes_back(flushed: bool) -> None:
    play = Play(max_transfer=BLOCK)
    data = bytearray(b"A" * BLOCK + b"B" * BLOCK)
    write = play.core.write(memoryview(data), 0)
    next(write)
    first, second = play.session.flight
    play.session.end(first, sense=MODE_CHANGED)
    play.execute(second)
    next(write)  # the first once more, and kept now
    if flushed:
        play.flush()
    play.execute(play.session.flight[0])
    assert ended(write)
    data[:] = b"x" * len(data)  # the buffer is the caller's again
    reconnect(play.core, play.target, lost=True)
    if flushed:
        run(play.core.flush(), play.session, play.target)
    assert play.target.block(0) == b"A" * BLOCK


# --- commands of the caller's own ---


def test_a_flush_from_before_a_callers_write_does_not_cover_it() -> None:
    """SYNCHRONIZE CACHE is carried out before the caller's WRITE, and answered after it. The
    journal does not have the write: when it is lost, the next flush says so."""
    play = Play(wce=True)
    flush = play.core.flush()
    next(flush)
    (flushing,) = play.session.flight
    play.target.execute(flushing)
    block = bytearray(16)
    cdb.pack_write16(block, 0, 1, 0)
    written = send(play.core, bytes(block), None, b"R" * BLOCK, None)
    next(written)
    play.execute(play.session.flight[-1])
    assert ended(written)
    play.session.end(flushing)
    assert ended(flush)
    play.target.cached.clear()
    reconnect(play.core, play.target)
    with pytest.raises(IserblkError, match="lost"):
        run(play.core.flush(), play.session, play.target)
    run(play.core.flush(), play.session, play.target)


# --- flushes that fail ---


def failing_flush(play: Play) -> None:
    flush = play.core.flush()
    next(flush)
    play.session.end(play.session.flight[-1], sense=INVALID)
    with pytest.raises(ScsiError):
        next(flush)


def test_small_writes_between_flushes_that_fail_share_chunks() -> None:
    """A chunk of 1 MiB for each write would take 200 MiB here."""
    play = Play(wce=True, limit=64 << 20)
    for n in range(200):
        run(play.core.write(memoryview(bytes([n]) * BLOCK), n * BLOCK), play.session, play.target)
        failing_flush(play)
    journal = play.core.durability.journal
    assert isinstance(journal, MemoryJournal) and journal.size == 200 * BLOCK
    assert chunks(journal) <= 2
    play.target.cached.clear()
    reconnect(play.core, play.target)
    run(play.core.flush(), play.session, play.target)
    assert [block[:1] for block in play.target.stable[:200]] == [bytes([n]) for n in range(200)]
    assert journal.size == 0


def test_flushes_that_overlap_and_fail_share_chunks() -> None:
    """One flush is under way all the time."""
    play = Play(wce=True, limit=64 << 20)
    before: Operation[None] | None = None
    for n in range(100):
        write = play.core.write(memoryview(bytes([n]) * BLOCK), n * BLOCK)
        next(write)
        play.execute(play.session.flight[-1])
        assert ended(write)
        flush = play.core.flush()
        next(flush)
        if before is not None:
            play.session.end(play.session.flight[0], sense=INVALID)
            with pytest.raises(ScsiError):
                next(before)
        before = flush
    journal = play.core.durability.journal
    assert isinstance(journal, MemoryJournal) and journal.size == 100 * BLOCK
    assert chunks(journal) <= 3
    play.execute(play.session.flight[0])  # the last flush covers all writes
    assert before is not None and ended(before)
    assert journal.size == 0


def chunks(journal: MemoryJournal) -> int:
    """How many chunks (1 MiB each) the journal holds."""
    batches = (*journal._closed, journal._batch)
    return len(journal._spare) + sum(len(batch.chunks) for batch in batches)


def test_a_flush_that_succeeds_drops_no_more_than_it_covers() -> None:
    """Failing flushes merge batches, but none into the batch of the flush under way."""
    play = Play(wce=True)

    def write(n: int) -> None:
        operation = play.core.write(memoryview(bytes([n]) * BLOCK), n * BLOCK)
        next(operation)
        play.execute(play.session.flight[-1])
        assert ended(operation)

    write(1)
    failing_flush(play)
    write(2)
    covers = play.core.flush()
    next(covers)
    write(3)
    failing_flush(play)
    play.execute(play.session.flight[0])
    assert ended(covers)
    journal = play.core.durability.journal
    assert journal is not None
    kept = journal.begin_replay()
    assert [entry.first for entry in kept] == [3]
    journal.end_replay()


def test_a_chunk_takes_in_no_more_than_it_has_room_for() -> None:
    play = Play(wce=True, limit=64 << 20)
    size = 700 << 10
    play.core.size = 4096 * BLOCK
    for n in range(2):
        write = play.core.write(memoryview(bytes([n + 1]) * size), n * size)
        next(write)
        play.execute(play.session.flight[-1])
        assert ended(write)
        failing_flush(play)
    journal = play.core.durability.journal
    assert journal is not None and 2 * size > CHUNK
    kept = journal.begin_replay()
    journal.end_replay()
    whole = b"".join(bytes(entry.data or b"") for entry in kept)
    assert whole == b"\1" * size + b"\2" * size


def test_writes_that_failed_are_not_kept() -> None:
    """Larger than the journal, they are flushed at once; where that fails they are not
    acknowledged, and each would have been copied."""
    play = Play(wce=True, limit=64 << 10)
    for n in range(20):
        write = play.core.write(memoryview(bytes([n]) * (1 << 20)), 0)
        next(write)
        play.execute(play.session.flight[0])
        next(write)
        play.session.end(play.session.flight[0], status=RESERVATION_CONFLICT)
        with pytest.raises(ScsiError):
            next(write)
    journal = play.core.durability.journal
    assert journal is not None and journal.size == 0
    assert not journal.begin_replay()


# --- what a replay, and what extents say ---


def test_a_residual_of_a_replayed_unmap_is_no_loss() -> None:
    """tgtd reports an extent for each block."""
    play = Play(wce=True)

    def execute(session: FakeSession, slot: Command) -> None:
        play.target.execute(slot)
        session.flight.remove(slot)
        slot.status, slot.sense, slot.error, slot.response = 0, b"", None, 0
        slot.residual = slot.length if slot.cdb[0] == opcodes.UNMAP else 0
        slot.state = 1  # TAKEN
        slot.waiter.task_done()

    trim = play.core.trim(0, 8 * BLOCK)
    next(trim)
    execute(play.session, play.session.flight[0])
    assert ended(trim)
    journal = play.core.durability.journal
    assert journal is not None and journal.active
    play.session.suspend()
    fresh = FakeSession()
    play.core.listen_resuming(fresh)  # type: ignore[arg-type]
    probe = fresh.queue.take_now()
    assert probe is not None
    probe.lun, probe.waiter = play.core.lun, CountingWaiter()
    fresh.flight.append(probe)
    fresh.end(probe, sense=POWER_ON)
    fresh.queue.release(probe)
    replay = play.core.replay(fresh)  # type: ignore[arg-type]
    step = next(replay)
    assert not isinstance(step, float) and step.pending
    execute(fresh, fresh.flight[0])
    assert ended(replay)
    play.session.resume()
    run(play.core.flush(), play.session, play.target)


def test_extents_from_between_a_loss_and_its_repair_are_asked_for_again() -> None:
    play = Play(wce=True)
    run(play.core.write(memoryview(b"W" * BLOCK), 0), play.session, play.target)
    read = play.core.read(memoryview(bytearray(BLOCK)), BLOCK)
    next(read)
    asked = play.core.extents(0, 8 * BLOCK)
    next(asked)
    reading, asking = play.session.flight
    play.target.cached.clear()
    play.session.end(reading, sense=POWER_ON)
    status(play, asking, deallocated=True)  # true at that moment
    assert isinstance(next(asked), float)
    reconnect(play.core, play.target)
    next(asked)
    (asking,) = [slot for slot in play.session.flight if slot.cdb[0] != opcodes.READ_16]
    status(play, asking, deallocated=False)
    with pytest.raises(StopIteration) as outcome:
        next(asked)
    assert outcome.value.value == [(0, 8 * BLOCK, 0)]


def status(play: Play, slot: Command, deallocated: bool) -> None:
    answer = lba_data.encode_lba_status([(0, 64, 1 if deallocated else 0)])
    assert slot.data is not None
    slot.data[: len(answer)] = answer
    play.session.end(slot)
