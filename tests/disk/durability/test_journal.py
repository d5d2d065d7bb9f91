"""The journal's bound, its batches, and what is done about a loss with and without it."""

from __future__ import annotations

import errno
import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import groupby
from typing import Any

import pytest

from iserblk.commands.command import Command, Operation, PlainCommand, Unanswered
from iserblk.commands.running import ATTEMPTS
from iserblk.disk.durability.copies import CHUNK
from iserblk.disk.durability.journal import MemoryJournal
from iserblk.disk.lun.operations import DiskCore
from iserblk.disk.seam import FlushClient, Rest
from iserblk.errors import (
    CommandTimeout,
    ConnectionLost,
    IserblkError,
    OutOfRange,
    ScsiError,
    WritesLost,
)
from iserblk.scsi import opcodes
from iserblk.scsi import sense as sense_data
from iserblk.scsi.luns import encode
from iserblk.scsi.status import BUSY, RESERVATION_CONFLICT, TASK_ABORTED
from tests.disk import fake_target
from tests.disk.fake_target import (
    BLOCK,
    DEFERRED,
    MEDIUM_ERROR,
    POWER_ON,
    FakeSession,
    FakeTarget,
    reconnect,
    run,
)
from tests.initiator.fake import CountingWaiter
from tests.support import clocks, logs

pytestmark = pytest.mark.logs(logs.LOST_POWER, logs.LOST_WRITES, logs.SHRUNK)

BLOCKS = 64
ABORTED = sense_data.encode_fixed(sense_data.ABORTED_COMMAND, 0x00, 0x00)
SYNC = opcodes.SYNCHRONIZE_CACHE_16
WRITE = opcodes.WRITE_16


class Bench:
    def __init__(self, limit: int | None = 1 << 20, wce: bool = True) -> None:
        self.session = FakeSession()
        self.target = FakeTarget(BLOCKS)
        self.core: DiskCore = fake_target.disk(self.session, BLOCKS, 8 * BLOCK, wce)
        if limit is not None:
            self.core.keep_journal(limit)

    @property
    def kept(self) -> int:
        journal = self.core.durability.journal
        return journal.size if journal is not None else 0

    def run(self, operation: Operation[Any]) -> object:
        return run(operation, self.session, self.target)

    def write(self, first: int, blocks: int, byte: int, fua: bool = False) -> None:
        buffer = bytearray(bytes((byte,)) * blocks * BLOCK)
        self.run(self.core.write(memoryview(buffer), first * BLOCK, fua))
        buffer[:] = b"\xee" * len(buffer)

    def holds(self, first: int, blocks: int, byte: int) -> bool:
        return all(
            self.target.block(lba) == bytes((byte,)) * BLOCK for lba in range(first, first + blocks)
        )

    def report(self, sense: bytes) -> None:
        """End a read with this sense data; the connection stays."""
        waiter = CountingWaiter()
        slot = self.core.begin_read(memoryview(bytearray(BLOCK)), 0, waiter)
        assert slot is not None
        self.session.end(slot, sense=sense)
        self.core.dropped(slot)


def test_lost_cache_is_made_good() -> None:
    bench = Bench()
    bench.write(0, 20, 1)  # three commands
    bench.write(5, 3, 2)
    bench.run(bench.core.write(memoryview(b"\3" * 10), 30 * BLOCK + 7))  # part of a block
    bench.run(bench.core.zero(10 * BLOCK, 4 * BLOCK, False, False, False))
    bench.run(bench.core.trim(15 * BLOCK, 2 * BLOCK))
    before = [bench.target.block(lba) for lba in range(BLOCKS)]
    bench.target.cached.clear()
    reconnect(bench.core, bench.target)
    assert [bench.target.block(lba) for lba in range(BLOCKS)] == before
    bench.target.cached.clear()  # it is still not flushed: once more
    reconnect(bench.core, bench.target)
    assert [bench.target.block(lba) for lba in range(BLOCKS)] == before
    bench.run(bench.core.flush())
    assert bench.kept == 0
    assert bench.target.stable == before


def test_whatever_is_unflushed_is_sent_again_after_a_reinstatement() -> None:
    """LIO has lost its cache, and says nothing of it to a new nexus."""
    bench = Bench()
    bench.write(0, 1, 1)
    bench.target.cached.clear()
    bench.target.executed.clear()
    reconnect(bench.core, bench.target, lost=False)
    assert bench.target.executed == [WRITE]
    bench.run(bench.core.flush())
    assert bench.target.stable[0] == b"\1" * BLOCK
    reconnect(bench.core, bench.target, lost=False)
    reconnect(bench.core, bench.target)
    assert bench.target.executed == [WRITE, SYNC]


@pytest.mark.parametrize("bench", [Bench(wce=False), Bench(limit=None)])
def test_nothing_is_kept(bench: Bench) -> None:
    bench.write(0, 4, 1)
    assert bench.kept == 0


def test_fua_is_kept_only_behind_something_older() -> None:
    bench = Bench()
    bench.write(0, 1, 1, fua=True)
    assert bench.kept == 0
    bench.write(0, 2, 2)
    bench.write(0, 1, 3, fua=True)
    bench.target.cached.clear()
    reconnect(bench.core, bench.target)
    assert bench.holds(0, 1, 3) and bench.holds(1, 1, 2)


def test_fua_behind_what_is_unflushed_is_flushed_with_it() -> None:
    """Else the older write, sent again after a loss, may be all that a second loss leaves."""
    bench = Bench()
    bench.write(0, 2, 1)
    bench.target.executed.clear()
    bench.write(0, 1, 2, fua=True)
    assert bench.target.executed == [opcodes.WRITE_16, SYNC] and bench.kept == 0
    for _ in range(2):
        bench.target.cached.clear()
        reconnect(bench.core, bench.target)
    bench.target.cached.clear()
    assert bench.holds(0, 1, 2) and bench.holds(1, 1, 1)


@pytest.mark.parametrize("limit", [1 << 20, None])
def test_fua_of_a_lun_without_it_is_a_flush(limit: int | None) -> None:
    bench = Bench(limit)
    bench.core.info = replace(bench.core.info, fua=False)
    bench.write(0, 1, 1, fua=True)
    assert bench.target.executed == [opcodes.WRITE_16, SYNC]
    assert bench.target.stable[0] == b"\1" * BLOCK


def test_bound_forces_a_flush() -> None:
    bench = Bench(limit=8 * BLOCK)
    for at in range(8):
        bench.write(at, 1, at)
    assert bench.kept == 8 * BLOCK and SYNC not in bench.target.executed
    assert (
        bench.core.begin_write(memoryview(bytes(BLOCK)), 0, CountingWaiter()) is None
    )  # no room: the long way
    bench.write(8, 1, 8)
    assert bench.kept == BLOCK and bench.target.executed.count(SYNC) == 1
    bench.write(0, 20, 9)  # more than the bound: two commands more than fit
    assert bench.kept == 0 and bench.target.executed.count(SYNC) == 2
    assert bench.target.stable[:20] == [b"\x09" * BLOCK] * 20


@pytest.mark.parametrize(("kept", "in_flight"), [(5, 3), (4, 4), (3, 7)])
def test_what_is_in_flight_counts_up_to_half_of_the_bound(kept: int, in_flight: int) -> None:
    bench = Bench(limit=8 * BLOCK)
    bench.write(0, kept, 1)
    begun = 0
    while begun < 7 and bench.core.begin_write(
        memoryview(bytes(BLOCK)), (20 + begun) * BLOCK, CountingWaiter()
    ):
        begun += 1
    assert begun == in_flight


# -- buffers that are taken over -------------------------------------------------------------------

HEAD = 64  # bytes in front of the data


def taken_over(bench: Bench, lba: int, byte: int, buffer: bytearray | None = None) -> bytearray:
    """Write a block whose buffer the journal takes over. Returns the one in its place."""
    buffer = buffer or bytearray(HEAD + BLOCK)
    buffer[HEAD:] = bytes((byte,)) * BLOCK
    slot = bench.core.begin_write(memoryview(buffer)[HEAD:], lba * BLOCK, CountingWaiter())
    assert slot is not None
    bench.target.execute(slot)
    bench.session.end(slot)
    other = bench.core.take_over(slot, buffer)
    assert other is not None and other is not buffer and len(other) == len(buffer)
    assert bench.core.ended_write(slot) is None
    other[:] = b"\xee" * len(other)  # it is the caller's
    return other


def test_buffer_that_was_taken_over_is_sent_again() -> None:
    bench = Bench()
    taken_over(bench, 0, 1)
    bench.write(0, 1, 2)
    taken_over(bench, 1, 3)
    assert bench.kept == 3 * BLOCK
    for _ in range(2):
        bench.target.cached.clear()
        reconnect(bench.core, bench.target)
        assert bench.holds(0, 1, 2) and bench.holds(1, 1, 3)
    bench.run(bench.core.flush())
    assert bench.kept == 0 and bench.target.stable[1] == b"\3" * BLOCK


@pytest.mark.parametrize("sense", [MEDIUM_ERROR, ABORTED])
def test_failed_flush_has_the_journal_sent_again_before_the_next(sense: bytes) -> None:
    """The target has dropped what it could not write, and the next SYNCHRONIZE CACHE succeeds."""
    bench = Bench()
    bench.write(0, 1, 1)
    flush = bench.core.flush()
    next(flush)
    bench.target.cached.clear()
    bench.session.end(bench.session.flight[0], sense=sense)
    bench.target.executed.clear()
    if sense is MEDIUM_ERROR:
        with pytest.raises(ScsiError) as raised:
            next(flush)
        assert not raised.value.losses
        flush = bench.core.flush()
    assert bench.session.disconnected
    bench.run(flush)
    assert bench.target.executed == [WRITE, SYNC]
    assert bench.target.stable[0] == b"\1" * BLOCK


def test_flush_that_is_aborted_several_times() -> None:
    """By other initiators, for example: each time what it was to cover is sent again first."""
    bench = Bench()
    bench.write(0, 1, 1)
    flush = bench.core.flush()
    next(flush)
    bench.target.executed.clear()
    for count in range(1, 4):
        bench.session.end(bench.session.flight[0], status=TASK_ABORTED)
        while not bench.session.flight:
            next(flush)
            if bench.session.disconnected:
                reconnect(bench.core, bench.target, lost=False)
        assert bench.target.executed == [WRITE] * count
    bench.run(flush)
    assert bench.target.executed == [WRITE] * 3 + [SYNC]


def test_flush_that_finds_no_room_many_times_may_still_be_aborted() -> None:
    """What is waited for leaves the tries that there are for what need not end."""
    bench = Bench()
    bench.write(0, 1, 1)
    flush = bench.core.flush()
    next(flush)
    for _ in range(2 * ATTEMPTS):
        bench.session.end(bench.session.flight[0], status=BUSY)
        while not bench.session.flight:
            next(flush)
    bench.session.end(bench.session.flight[0], status=TASK_ABORTED)
    while not bench.session.flight:
        next(flush)
        if bench.session.disconnected:
            reconnect(bench.core, bench.target, lost=False)
    bench.run(flush)
    assert bench.target.executed[-1] == SYNC


def test_flush_that_was_given_up_has_the_journal_sent_again_before_the_next() -> None:
    """It may have failed in the way that a target reports once. Until there is another flush, no
    connection is replaced for that: a client that dies in a flush disturbs no other."""
    bench = Bench()
    bench.write(0, 1, 1)
    flush = bench.core.flush()
    next(flush)
    bench.target.cached.clear()
    bench.session.end(bench.session.flight[0], error=CommandTimeout("late"))
    with pytest.raises(CommandTimeout):
        next(flush)
    assert not bench.session.disconnected
    bench.target.executed.clear()
    bench.run(bench.core.flush())
    assert bench.target.executed == [WRITE, SYNC]
    bench.run(bench.core.flush())
    assert bench.target.executed == [WRITE, SYNC, SYNC]


@pytest.mark.parametrize("part", [True, False])
def test_a_doubt_behind_a_replay_is_heard_on_the_next_connection(part: bool) -> None:
    """A flush is given up when the journal has been sent again, on a connection that is not in use
    yet: that connection is cut once it is, and the journal sent again on another."""
    bench = Bench()
    bench.write(0, 1, 1)
    flush = bench.core.flush()
    next(flush)
    resume, bench.session.resume = bench.session.resume, lambda: None  # type: ignore[method-assign]
    reconnect(bench.core, bench.target, lost=False)
    bench.session.end(bench.session.flight[0], error=CommandTimeout("late"))
    with pytest.raises(CommandTimeout):
        next(flush)
    work = bench.core.write(memoryview(b"x" * 10), 7) if part else bench.core.flush()
    next(work)
    bench.session.resume = resume  # type: ignore[method-assign]
    resume()
    bench.target.cached.clear()
    bench.target.executed.clear()
    bench.run(work)
    read = opcodes.READ_16
    executed = [operation for operation, _ in groupby(bench.target.executed)]
    assert executed == ([read, WRITE, read, WRITE] if part else [SYNC, WRITE, SYNC])
    assert bench.target.block(0)[-10:] == b"\1" * 10
    assert not bench.core.durability.losses.count


def test_flush_that_was_left_unanswered_is_sent_again_behind_what_it_was_to_cover() -> None:
    """The target may have failed it in the way that it reports once: what it was to cover is sent
    again first, on a new connection. The client waits, and hears of success."""
    bench = Bench()
    bench.write(0, 1, 1)
    flush = bench.core.flush()
    next(flush)
    bench.target.cached.clear()
    bench.target.executed.clear()
    bench.session.end(bench.session.flight[0], error=Unanswered("aborted"))
    bench.run(flush)
    assert bench.target.executed == [WRITE, SYNC]
    assert bench.target.stable[0] == b"\1" * BLOCK
    assert bench.core.durability.losses.count == 0


def test_write_that_was_left_unanswered_is_sent_again() -> None:
    bench = Bench()
    buffer = memoryview(bytes([7]) * BLOCK)
    writing = bench.core.write(buffer, 0)
    next(writing)
    bench.session.end(bench.session.flight[0], error=Unanswered("aborted"))
    bench.run(writing)
    assert bench.target.executed == [WRITE] and bench.target.cached[0] == bytes(buffer)
    assert bench.kept == BLOCK and bench.core.metrics.retries == 1


def shared() -> Bench:
    """Another host writes to the LUN, too."""
    bench = Bench(limit=None)
    bench.core.keep_journal(1 << 20, shared=True)
    return bench


def test_journal_of_a_shared_lun_is_compared_and_never_written() -> None:
    bench = shared()
    bench.write(0, 20, 1)
    bench.write(5, 3, 2)
    bench.run(bench.core.zero(10 * BLOCK, 4 * BLOCK, False, False, False))
    bench.run(bench.core.trim(15 * BLOCK, 2 * BLOCK))
    bench.target.cached[15] = b"\x55" * BLOCK  # unmapped: anything may be there
    bench.target.executed.clear()
    reconnect(bench.core, bench.target, lost=False)
    assert set(bench.target.executed) == {opcodes.READ_16}
    bench.run(bench.core.flush())  # nothing is lost
    assert bench.kept == 0


@pytest.mark.parametrize(("most", "lost"), [(1, 0), (3, 0), (0, 1)])
def test_shared_lun_that_lets_less_be_read_at_once_is_compared(most: int, lost: int) -> None:
    """What cannot be read at all, on the other hand, is not known to be there."""

    refused = sense_data.encode_fixed(sense_data.ILLEGAL_REQUEST, 0x24, 0x00)

    def refusal(slot: Command) -> bytes:
        blocks = int.from_bytes(slot.cdb[10:14], "big")
        return refused if slot.cdb[0] == opcodes.READ_16 and blocks > most else b""

    bench = shared()
    bench.write(0, 20, 1)
    bench.write(5, 3, 2)
    bench.run(bench.core.zero(10 * BLOCK, 4 * BLOCK, False, False, False))
    bench.target.refusal = refusal
    reconnect(bench.core, bench.target, lost=False)
    assert bench.core.durability.losses.count == lost


@pytest.mark.parametrize("at", [0, 5, 7, 12, 19])
def test_what_differs_on_a_shared_lun_is_lost(at: int) -> None:
    bench = shared()
    bench.write(0, 20, 1)
    bench.write(5, 3, 2)
    bench.run(bench.core.zero(10 * BLOCK, 4 * BLOCK, False, False, False))
    bench.target.cached[at] = b"\x55" * BLOCK
    for _ in range(2):  # the second finds nothing more that it could tell
        bench.target.executed.clear()
        reconnect(bench.core, bench.target, lost=False)
        assert set(bench.target.executed) <= {opcodes.READ_16}
    assert bench.core.durability.losses.count == 1
    with pytest.raises(IserblkError, match="lost"):
        bench.run(bench.core.flush())
    bench.run(bench.core.flush())


@pytest.mark.parametrize("operation", ["write", "zero"])
def test_what_waits_to_be_sent_may_be_on_a_shared_lun_already(operation: str) -> None:
    bench = shared()
    bench.write(0, 4, 1)
    if operation == "write":
        change = bench.core.write(memoryview(b"\2" * BLOCK), 2 * BLOCK)
    else:
        change = bench.core.zero(2 * BLOCK, BLOCK, False, False, False)
    next(change)
    (slot,) = bench.session.flight
    bench.target.execute(slot)  # and the answer is lost
    reconnect(bench.core, bench.target, lost=False)
    assert bench.core.durability.losses.count == 0
    bench.run(change)


def test_what_was_lost_below_a_write_that_fails_is_told() -> None:
    """That write waits while a shared LUN is compared. Its error says nothing of what was there
    before."""
    bench = shared()
    bench.write(0, 4, 1)
    waiter = CountingWaiter()
    slot = bench.core.begin_write(memoryview(b"\2" * BLOCK), 2 * BLOCK, waiter)
    assert slot is not None
    del bench.target.cached[2]
    reconnect(bench.core, bench.target, lost=False)
    bench.session.end(slot, sense=MEDIUM_ERROR)
    with pytest.raises(ScsiError):
        bench.core.ended_write(slot)
    with pytest.raises(IserblkError, match="lost"):
        bench.run(bench.core.flush())


def test_failed_flush_of_a_shared_lun_is_told() -> None:
    """A target may go on showing what it could not write: to compare would prove nothing."""
    bench = shared()
    bench.write(0, 1, 1)
    flush = bench.core.flush()
    next(flush)
    bench.session.end(bench.session.flight[0], sense=MEDIUM_ERROR)
    with pytest.raises(ScsiError) as raised:
        next(flush)
    assert raised.value.losses == 1


def test_buffer_is_given_away_again_when_a_flush_covers_it() -> None:
    bench = Bench()
    mine = [bytearray(HEAD + BLOCK) for _ in range(2)]
    others = [taken_over(bench, at, at, mine[at]) for at in range(2)]
    assert not any(other is buffer for other in others for buffer in mine)
    flush = bench.core.flush()
    next(flush)
    late = bytearray(HEAD + BLOCK)
    others.append(taken_over(bench, 2, 2, late))
    bench.session.end(bench.session.flight[0], sense=MEDIUM_ERROR)
    with pytest.raises(ScsiError):
        next(flush)
    others.append(taken_over(bench, 3, 3))  # nothing was flushed
    assert not any(other is buffer for other in others for buffer in (*mine, late))
    bench.run(bench.core.flush())
    assert bench.kept == 0
    again = [taken_over(bench, at, at) for at in range(4)]
    assert sum(any(each is buffer for buffer in (*mine, late)) for each in again) == 3


@pytest.mark.parametrize(
    ("size", "becomes"), [(CHUNK + HEAD, True), (2 * CHUNK, False), (CHUNK - 1, False)]
)
def test_buffer_that_no_write_uses_becomes_a_chunk(size: int, becomes: bool) -> None:
    """Where it fits: large writes and small ones, one after the other, need memory once."""
    bench = Bench(limit=8 * CHUNK)
    mine = bytearray(size)
    slot = bench.core.begin_write(memoryview(mine)[-BLOCK:], 0, CountingWaiter())
    assert slot is not None
    bench.target.execute(slot)
    bench.session.end(slot)
    assert bench.core.take_over(slot, mine) is not None
    assert bench.core.ended_write(slot) is None
    bench.run(bench.core.flush())
    bench.write(1, 1, 2)
    journal = bench.core.durability.journal
    assert journal is not None
    (entry,) = journal.begin_replay()
    assert entry.data is not None and bytes(entry.data) == b"\2" * BLOCK
    assert (entry.data.obj is mine) == becomes
    journal.end_replay()


def test_no_buffer_that_a_replay_sends_is_given_away() -> None:
    bench = Bench()
    mine = bytearray(HEAD + BLOCK)
    taken_over(bench, 0, 1, mine)
    journal = bench.core.durability.journal
    assert journal is not None
    (entry,) = journal.begin_replay()
    journal.flushed(journal.begin_flush())
    other = taken_over(bench, 1, 2)
    assert other is not mine
    assert entry.data is not None and bytes(entry.data) == b"\1" * BLOCK
    journal.end_replay()


def test_what_a_replay_sends_does_not_change_with_the_buffers_of_callers() -> None:
    """They get them back meanwhile: the rest of an operation fails, or a thread has looked."""
    slots = [PlainCommand(0), PlainCommand(1)]
    journal = MemoryJournal(1 << 20, BLOCK, slots)
    buffers = [bytearray(bytes((number,)) * BLOCK) for number in (1, 2)]
    for slot, buffer in zip(slots, buffers, strict=True):
        slot.first = slot.last = slot.index
        journal.add(slot, memoryview(buffer))
    number = journal.ended(slots[0], copy=False)
    entries = journal.begin_replay()
    journal.forget([number])
    journal.keep(slots[1])
    for buffer in buffers:
        buffer[:] = b"\xee" * BLOCK
    assert [bytes(each.data or b"") for each in entries] == [b"\1" * BLOCK, b"\2" * BLOCK]
    journal.end_replay()


def test_what_is_forgotten_while_a_flush_is_under_way_counts_once() -> None:
    """A size below 0 would let the journal pass for empty when it is not."""
    slots = [PlainCommand(0)]
    journal = MemoryJournal(1 << 20, BLOCK, slots)

    def write() -> int:
        slots[0].first = slots[0].last = 0
        journal.add(slots[0], memoryview(bytes(BLOCK)))
        return journal.ended(slots[0], copy=False)

    number = write()
    flush = journal.begin_flush()
    journal.forget([number])
    journal.flushed(flush)
    assert (journal.size, journal.active) == (0, False)
    write()
    assert (journal.size, journal.active) == (BLOCK, True)


@pytest.mark.parametrize(
    "bench", [Bench(), Bench(limit=None), Bench(wce=False)], ids=["failed", "off", "durable"]
)
def test_what_is_not_kept_is_not_taken_over(bench: Bench) -> None:
    buffer = bytearray(BLOCK)
    slot = bench.core.begin_write(memoryview(buffer), 0, CountingWaiter())
    assert slot is not None
    fails = bench.core.durability.journal is not None
    bench.session.end(slot, sense=MEDIUM_ERROR if fails else b"")
    assert bench.core.take_over(slot, buffer) is None
    if fails:
        with pytest.raises(ScsiError):
            bench.core.ended_write(slot)
    else:
        assert bench.core.ended_write(slot) is None
    assert bench.kept == 0


@pytest.mark.parametrize("sizes", [(1 << 20, 3 << 19), (3 << 19, 1 << 20)])
def test_memory_that_is_free_is_bounded_whatever_its_kind(sizes: tuple[int, int]) -> None:
    limit = 6 << 20
    journal = MemoryJournal(limit, BLOCK, [PlainCommand(0)])
    (change,) = journal.changes

    def keep(size: int, copies: bool) -> None:
        buffer = bytearray(HEAD + size)
        journal.add(change.slot, memoryview(buffer)[HEAD:])
        if copies:
            journal.keep(change.slot)
        else:
            assert journal.take_over(change.slot, buffer) is not None

    def free() -> int:
        buffers = sum(len(each) for kind in journal._spare_buffers.values() for each in kind)
        assert journal._spared == buffers
        return buffers + sum(len(each.data) for each in journal._spare)

    for copies, size in [(True, 1 << 16), *((False, size) for size in sizes)] * 2:
        for _ in range(limit // size):
            keep(size, copies)
        assert journal.size == limit
        journal.flushed(journal.begin_flush())
        assert limit - (1 << 20) <= free() <= limit + (limit >> 2)


# -- no memory -------------------------------------------------------------------------------------


@contextmanager
def no_memory(error: BaseException, chunks: int = 0) -> Iterator[None]:
    """For a chunk of the journal, behind so many more."""
    real = mmap.mmap
    left = chunks

    def refuse(*words: int) -> mmap.mmap:
        nonlocal left
        left -= 1
        if left < 0:
            raise error
        return real(*words)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mmap, "mmap", refuse)
        yield


NO_MEMORY = [MemoryError(), OSError(errno.ENOMEM, "Cannot allocate memory")]


@pytest.mark.parametrize("error", NO_MEMORY, ids=repr)
@pytest.mark.parametrize("ends", ["ended", "dropped", "operation", "large"])
def test_a_write_that_cannot_be_kept_is_not_acknowledged(ends: str, error: BaseException) -> None:
    """Its slot and its blocks are free, and nothing of it is sent again: neither what was copied
    of it, nor what the caller puts into its buffer."""
    bench = Bench()
    core, session = bench.core, bench.session
    length = 4 * BLOCK
    buffer = bytearray(b"\1" * length)
    with no_memory(error):
        if ends in ("ended", "dropped"):
            slot = core.begin_write(memoryview(buffer), 0, CountingWaiter())
            assert slot is not None
            bench.target.execute(slot)
            session.end(slot)
            if ends == "dropped":
                core.dropped(slot)
            else:
                with pytest.raises(IserblkError, match="no memory to keep a write"):
                    core.ended_write(slot)
        else:
            if ends == "large":  # several commands
                buffer = bytearray(b"\1" * 20 * BLOCK)
            with pytest.raises(IserblkError, match="no memory to keep a write"):
                bench.run(core.write(memoryview(buffer), 0))
    buffer[:] = b"\xee" * len(buffer)
    assert session.queue.busy == 0 and bench.kept == 0
    journal = core.durability.journal
    assert journal is not None and not journal.active and not journal.begin_replay()
    journal.end_replay()
    bench.write(0, 4, 2)
    assert bench.kept == length
    bench.run(core.flush())
    assert bench.kept == 0 and bench.target.stable[:4] == [b"\2" * BLOCK] * 4


def test_what_was_acknowledged_is_kept_where_a_later_write_cannot_be() -> None:
    """A write that meets the end of a chunk: no part of it stays behind, which an FUA write would
    not know of."""
    bench = Bench(limit=4 << 20)
    core = bench.core
    room = CHUNK // BLOCK  # blocks in a chunk
    for at in range(room - 2):
        bench.write(at % 8, 1, at & 0xFF)
    before = [bench.target.block(lba) for lba in range(BLOCKS)]
    kept = bench.kept
    with no_memory(MemoryError()):
        slot = core.begin_write(memoryview(bytearray(b"\xaa" * 4 * BLOCK)), 0, CountingWaiter())
        assert slot is not None
        bench.session.end(slot)
        with pytest.raises(IserblkError, match="no memory"):
            core.ended_write(slot)
    assert bench.kept == kept
    bench.target.cached.clear()
    reconnect(core, bench.target)
    assert [bench.target.block(lba) for lba in range(BLOCKS)] == before
    bench.run(core.flush())
    assert bench.kept == 0


def test_one_flushes_and_the_others_wait() -> None:
    bench = Bench(limit=2 * BLOCK)
    bench.write(0, 2, 1)
    writes = [bench.core.write(memoryview(bytes(BLOCK)), at * BLOCK) for at in range(4)]
    waiters = [next(each) for each in writes]
    assert [slot.cdb[0] for slot in bench.session.flight] == [SYNC]
    slot = bench.session.flight[0]
    bench.target.execute(slot)
    bench.session.end(slot)
    assert all(isinstance(each, CountingWaiter) for each in waiters)
    with pytest.raises(StopIteration):
        while True:
            next(writes[0])
            bench.session.end(bench.session.flight[0])
    assert [each.pending for each in waiters[1:]] == [0, 0, 0]  # type: ignore[union-attr]
    for each in writes[1:]:
        bench.run(each)


def test_failed_forced_flush_fails_the_write_that_needs_it() -> None:
    """If the write succeeded, the journal would grow beyond its bound."""
    bench = Bench(limit=BLOCK)
    bench.write(0, 1, 1)
    write = bench.core.write(memoryview(bytes(BLOCK)), BLOCK)
    next(write)
    bench.session.end(bench.session.flight[0], sense=MEDIUM_ERROR)
    with pytest.raises(ScsiError):
        next(write)
    assert bench.kept == BLOCK and bench.session.queue.busy == 0
    bench.write(1, 1, 2)  # the next write flushes again


@pytest.mark.parametrize("fails", [True, False])
def test_flush_drops_what_had_ended_before_it_began(fails: bool) -> None:
    bench = Bench()
    bench.write(0, 1, 1)
    flush = bench.core.flush()
    next(flush)
    waiter = CountingWaiter()
    slot = bench.core.begin_write(memoryview(b"\2" * BLOCK), BLOCK, waiter)
    assert slot is not None
    bench.session.end(slot)
    assert bench.core.ended_write(slot) is None
    assert bench.kept == 2 * BLOCK
    bench.session.end(bench.session.flight[0], sense=MEDIUM_ERROR if fails else b"")
    with pytest.raises(ScsiError if fails else StopIteration):
        next(flush)
    assert bench.kept == (2 * BLOCK if fails else BLOCK)
    bench.run(bench.core.flush())
    assert bench.kept == 0


def test_loss_on_a_living_connection_ends_it_before_a_flush_succeeds() -> None:
    bench = Bench()
    bench.write(0, 2, 1)
    flush = bench.core.flush()
    next(flush)
    bench.target.cached.clear()
    bench.report(POWER_ON)
    assert bench.session.disconnected
    slot = bench.session.flight[0]
    bench.target.execute(slot)  # the cache is empty: the flush succeeds
    bench.session.end(slot)
    assert isinstance(next(flush), float)
    reconnect(bench.core, bench.target, lost=False)
    bench.run(flush)
    assert bench.target.stable[:2] == [b"\1" * BLOCK] * 2
    assert bench.kept == 0


def test_a_flush_whose_end_is_looked_at_after_the_replay_only_is_done_again() -> None:
    """The target had nothing left to make durable when it said that it was. Its report came behind
    that; all was sent again, and the flush's thread slept meanwhile."""
    bench = Bench()
    bench.write(0, 1, 1)
    flush = bench.core.flush()
    next(flush)
    bench.target.cached.clear()
    (slot,) = bench.session.flight
    bench.target.execute(slot)
    bench.session.end(slot)
    bench.report(POWER_ON)
    reconnect(bench.core, bench.target, lost=False)
    bench.run(flush)
    assert bench.target.stable[0] == b"\1" * BLOCK and bench.kept == 0


def test_cache_lost_again_during_the_replay() -> None:
    """What had been sent again before is sent once more."""
    bench = Bench()
    bench.write(0, 1, 1)
    bench.write(20, 1, 2)
    bench.target.cached.clear()
    ended = 0

    def answer(fresh: FakeSession, slot: Command) -> None:
        nonlocal ended
        if not ended:
            bench.core.listen_resuming(fresh)  # type: ignore[arg-type]
        ended += 1
        if ended == 2:
            bench.target.cached.clear()
            fresh.end(slot, sense=POWER_ON)
            return
        bench.target.execute(slot)
        fresh.end(slot)

    _replay(bench, answer)
    assert bench.holds(0, 1, 1) and bench.holds(20, 1, 2)


def test_read_that_may_have_seen_the_past_is_done_again() -> None:
    bench = Bench()
    bench.write(0, 1, 1)
    bench.target.cached.clear()
    short = bytearray(BLOCK)
    slot = bench.core.begin_read(memoryview(short), 0, CountingWaiter())
    long = bytearray(BLOCK)
    read = bench.core.read(memoryview(long), 0)
    next(read)
    bench.report(POWER_ON)
    for each in list(bench.session.flight):
        bench.target.execute(each)
        bench.session.end(each)
    assert slot is not None
    rest = bench.core.ended(slot)
    assert rest is not None
    assert isinstance(next(read), float)
    reconnect(bench.core, bench.target, lost=False)
    bench.run(read)
    bench.run(bench.core.read(memoryview(short), 0, rest.deadline))
    assert bytes(short) == bytes(long) == b"\1" * BLOCK


@pytest.mark.parametrize("whole", [True, False])
def test_a_read_that_begins_before_the_replay_is_done_again(whole: bool) -> None:
    """On the connection whose target has told of the loss, and which is about to be cut."""
    bench = Bench()
    bench.write(0, 1, 1)
    bench.target.cached.clear()
    bench.report(POWER_ON)
    buffer = bytearray(BLOCK)
    operation = bench.core.read(memoryview(buffer), 0)
    slot = bench.core.begin_read(memoryview(buffer), 0, CountingWaiter()) if whole else None
    if slot is None:
        next(operation)
    (flying,) = bench.session.flight
    bench.target.execute(flying)
    bench.session.end(flying)
    assert buffer == bytes(BLOCK)
    if slot is not None:
        rest = bench.core.ended(slot)
        assert rest is not None
        operation = bench.core.read(memoryview(buffer), 0, rest.deadline)
    else:
        assert isinstance(next(operation), float)
    reconnect(bench.core, bench.target, lost=False)
    bench.run(operation)
    assert buffer == b"\1" * BLOCK


@pytest.mark.parametrize("bench", [Bench(limit=None)])
def test_without_a_journal_the_next_flush_fails(bench: Bench) -> None:
    bench.write(0, 1, 1)
    bench.target.cached.clear()
    reconnect(bench.core, bench.target)
    assert not bench.session.disconnected
    with pytest.raises(IserblkError, match="lost"):
        bench.run(bench.core.flush())
    bench.run(bench.core.flush())


def test_without_a_journal_what_is_in_flight_is_not_lost() -> None:
    """The session sends commands in flight again."""
    bench = Bench(limit=None)
    bench.core.begin_write(memoryview(bytes(BLOCK)), 0, CountingWaiter())
    reconnect(bench.core, bench.target)
    bench.run(bench.core.flush())


def test_deferred_error_fails_the_next_flush_with_a_journal_too() -> None:
    bench = Bench()
    bench.write(0, 1, 1)
    bench.report(DEFERRED)
    assert not bench.session.disconnected
    with pytest.raises(IserblkError, match="lost"):
        bench.run(bench.core.flush())


def _replay(bench: Bench, answer: Callable[[FakeSession, Command], None]) -> FakeSession:
    """Run a replay on a fresh session; ``answer`` ends each command. Returns the session."""
    bench.session.suspend()
    fresh = FakeSession()
    bench.core.durability.replay_needed = True
    replay = bench.core.replay(fresh)  # type: ignore[arg-type]
    try:
        while True:
            step = next(replay)
            while not isinstance(step, float) and step.pending:
                answer(fresh, fresh.flight[0])
    except StopIteration:
        return fresh
    finally:
        assert fresh.queue.busy == 0 and not fresh.flight


def test_what_the_lun_refuses_for_good_is_told_by_the_next_flush() -> None:
    bench = Bench()
    for at in range(3):
        bench.write(at, 1, 1)
    answers = iter([b"", MEDIUM_ERROR, b""])
    _replay(bench, lambda fresh, slot: fresh.end(slot, sense=next(answers)))
    bench.session.resume()
    with pytest.raises(IserblkError, match="lost"):
        bench.run(bench.core.flush())
    bench.run(bench.core.flush())
    assert bench.kept == 0


def test_replay_that_fails_with_its_connection_is_done_again_whole() -> None:
    bench = Bench()
    for at in range(3):
        bench.write(at, 1, 1)
    bench.target.cached.clear()
    with pytest.raises(ConnectionLost):
        _replay(bench, lambda fresh, slot: fresh.end(slot, error=ConnectionLost("gone")))
    assert bench.core.durability.replay_needed
    reconnect(bench.core, bench.target)
    assert bench.holds(0, 3, 1) and not bench.core.durability.replay_needed


@pytest.mark.parametrize("ascq", [0x0B, 0x0C, 0x12])
def test_a_port_that_carries_out_nothing_is_not_the_lun(ascq: int) -> None:
    """The port refuses, not the LUN: through another port, or later, the replay succeeds."""
    bench = Bench()
    bench.write(0, 1, 1)
    bench.target.cached.clear()
    refused = sense_data.encode_fixed(sense_data.NOT_READY, 0x04, ascq)
    with pytest.raises(ScsiError):
        _replay(bench, lambda fresh, slot: fresh.end(slot, sense=refused))
    assert bench.core.durability.replay_needed
    reconnect(bench.core, bench.target)
    assert bench.holds(0, 1, 1) and not bench.core.durability.replay_needed


def test_replay_is_patient_with_a_busy_target() -> None:
    bench = Bench()
    for at in range(20):
        bench.write(at, 1, at)
    bench.target.cached.clear()
    times = 0

    def answer(fresh: FakeSession, slot: Command) -> None:
        nonlocal times
        times += 1
        if times % 3 == 0:
            bench.target.execute(slot)
            fresh.end(slot)
        else:
            fresh.end(slot, sense=POWER_ON) if times % 3 == 1 else fresh.end(slot, status=0x28)

    _replay(bench, answer)
    assert all(bench.holds(at, 1, at) for at in range(20))


# -- one deadline, and the size --------------------------------------------------------------------


def test_all_retries_share_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    now = 1000.0
    clocks.give(monkeypatch, lambda: now)
    operations = [
        bench.core.read(memoryview(bytearray(BLOCK)), 0),
        bench.core.write(memoryview(bytes(BLOCK)), 0),
        bench.core.trim(0, 8 * BLOCK),
        bench.core.flush(),
    ]
    for operation in operations:
        now = 1000.0
        with pytest.raises(ScsiError, match="BUSY"):
            while True:
                step = next(operation)
                if not isinstance(step, float):
                    (slot,) = bench.session.flight
                    assert slot.deadline == 1030.0
                    now += 10.0
                    bench.session.end(slot, status=8)
        assert now == 1030.0
    assert bench.session.queue.busy == 0


def test_short_way_hands_its_deadline_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the request, which a stop of this process makes later, whatever its command had."""
    bench = Bench()
    clocks.give(monkeypatch, lambda: 4.0)
    for deadline in (34.0, 54.0):
        slot = bench.core.begin_read(memoryview(bytearray(BLOCK)), 0, CountingWaiter())
        assert slot is not None
        slot.begun, slot.deadline = 4_000_000_000, deadline
        bench.session.end(slot, status=8)
        assert bench.core.ended(slot) == Rest(4_000_000_000, 34.0)
    slot = bench.core.begin_write(memoryview(bytes(BLOCK)), 0, CountingWaiter())
    assert slot is not None
    slot.deadline = 3.0
    bench.session.end(slot, status=8)
    with pytest.raises(ScsiError):
        bench.core.ended_write(slot)


def test_capacity_that_changed_is_asked_for_before_anything_else() -> None:
    bench = Bench()
    bench.target.stable += [bytes(BLOCK)] * 16
    behind = memoryview(bytearray(BLOCK))
    with pytest.raises(OutOfRange):
        bench.run(bench.core.read(behind, BLOCKS * BLOCK))
    bench.report(fake_target.CAPACITY)
    bench.run(bench.core.read(behind, BLOCKS * BLOCK))
    assert bench.core.size == bench.core.info.size == (BLOCKS + 16) * BLOCK
    del bench.target.stable[32:]
    bench.report(fake_target.CAPACITY)
    with pytest.raises(OutOfRange, match=r"16384 bytes \(it had 40960 before it shrank\)"):
        bench.run(bench.core.write(behind, 32 * BLOCK))
    bench.run(bench.core.write(behind, 31 * BLOCK))


def test_capacity_that_cannot_be_read_is_asked_for_again() -> None:
    bench = Bench()
    bench.target.stable += [bytes(BLOCK)] * 16
    bench.report(fake_target.CAPACITY)
    read = bench.core.read(memoryview(bytearray(BLOCK)), 0)
    next(read)
    bench.session.end(bench.session.flight[0], sense=MEDIUM_ERROR)
    with pytest.raises(ScsiError):
        next(read)
    bench.run(bench.core.read(memoryview(bytearray(BLOCK)), 0))
    assert bench.core.size == (BLOCKS + 16) * BLOCK


@pytest.mark.parametrize("whole", [True, False], ids=["one command", "several"])
def test_a_read_that_is_looked_at_after_the_replay_only_is_done_again(whole: bool) -> None:
    """The old connection answered it after the report of the loss: with what was there
    before the write that was lost. Its thread sleeps until all is in order again."""
    bench = Bench()
    bench.write(0, 1, 1)
    buffer = bytearray(BLOCK)
    waiter = CountingWaiter()
    if whole:
        slot = bench.core.begin_read(memoryview(buffer), 0, waiter)
        assert slot is not None
    else:
        operation = bench.core.read(memoryview(buffer), 0)
        next(operation)
        slot = bench.session.flight[-1]
    bench.target.cached.clear()
    bench.report(POWER_ON)
    bench.target.execute(slot)
    bench.session.end(slot)
    assert buffer == bytes(BLOCK)
    reconnect(bench.core, bench.target, lost=False)
    assert not bench.core.durability.replay_needed and bench.holds(0, 1, 1)
    if whole:
        rest = bench.core.ended(slot)
        assert rest is not None
        operation = bench.core.read(memoryview(buffer), 0, rest.deadline)
    bench.run(operation)
    assert buffer == b"\1" * BLOCK


def test_a_read_that_was_answered_before_the_replay_is_done_again() -> None:
    """It began behind the report of the loss, on the connection that is about to be ended; its task
    looks when the replay is over."""
    bench = Bench()
    bench.write(0, 1, 1)
    bench.target.cached.clear()
    bench.report(POWER_ON)
    buffer = bytearray(BLOCK)
    slot = bench.core.begin_read(memoryview(buffer), 0, CountingWaiter())
    assert slot is not None
    bench.target.answer(bench.session, slot)
    reconnect(bench.core, bench.target, lost=False)
    assert not bench.core.durability.replay_needed
    assert buffer == bytes(BLOCK) and bench.core.ended(slot) is not None


@pytest.mark.parametrize("arrives", [True, False])
def test_a_block_is_changed_in_part_when_no_report_of_a_loss_is_on_its_way(arrives: bool) -> None:
    """The report comes over another connection, behind the answer to the read of the block, which
    shows what was there before a write that is lost. The write, sent behind the replay, would bring
    that back. The report may be lost with its connection."""
    bench = Bench()
    bench.write(0, 1, 1)
    other = bench.core.begin_read(memoryview(bytearray(BLOCK)), 5 * BLOCK, CountingWaiter())
    assert other is not None
    operation = bench.core.write(memoryview(b"x" * 10), 7)
    next(operation)
    (slot,) = [each for each in bench.session.flight if each is not other]
    bench.session.order[slot.index] = 1  # it was sent behind the other one
    bench.target.cached.clear()
    bench.target.execute(slot)
    bench.session.end(slot)
    next(operation)
    assert bench.session.flight == [other]
    if arrives:
        bench.session.end(other, sense=POWER_ON)
        bench.core.dropped(other)
    else:
        bench.session.suspend()
        assert isinstance(next(operation), float)
    reconnect(bench.core, bench.target, lost=False)
    bench.run(operation)
    assert bench.target.block(0) == b"\1" * 7 + b"x" * 10 + b"\1" * (BLOCK - 17)


def test_a_block_that_is_changed_in_part_waits_for_no_other_command() -> None:
    """Not for commands of other LUNs, for those that were sent behind its read on the same
    connection, nor for what has the slot of one that has ended."""
    bench = Bench()
    core, session = bench.core, bench.session
    buffer = memoryview(bytearray(BLOCK))
    older = core.begin_read(buffer, 5 * BLOCK, CountingWaiter())
    elsewhere = core.begin_read(buffer, 6 * BLOCK, CountingWaiter())
    assert older is not None and elsewhere is not None
    elsewhere.lun = encode(1)
    operation = core.write(memoryview(b"x" * 10), 7)
    next(operation)
    slot = session.flight[-1]
    younger = core.begin_read(buffer, 7 * BLOCK, CountingWaiter())
    assert younger is not None
    session.order = {slot.index: 1, younger.index: 2}
    bench.target.execute(slot)
    session.end(slot)
    assert isinstance(next(operation), float)
    session.end(older)
    assert not core.ended(older)
    again = core.begin_read(buffer, 8 * BLOCK, CountingWaiter())
    assert again is older
    next(operation)
    assert session.flight[:-1] == [elsewhere, younger, again]
    assert session.flight[-1].cdb[0] == WRITE
    bench.target.answer(session, session.flight[-1])
    with pytest.raises(StopIteration):
        next(operation)


@pytest.mark.parametrize("of", ["part", "flush"])
def test_no_report_is_waited_for_beyond_the_deadline(
    monkeypatch: pytest.MonkeyPatch, of: str
) -> None:
    """The target does not answer an older command. The block is no longer locked then."""
    bench = Bench()
    core, session = bench.core, bench.session
    now = 1000.0
    clocks.give(monkeypatch, lambda: now)
    bench.write(0, 1, 1)
    older = core.begin_read(memoryview(bytearray(BLOCK)), 5 * BLOCK, CountingWaiter())
    operation = core.write(memoryview(b"x" * 10), 7) if of == "part" else core.flush()
    next(operation)
    session.order[session.flight[-1].index] = 1
    bench.target.answer(session, session.flight[-1])
    assert isinstance(next(operation), float)
    now += 29.0
    assert isinstance(next(operation), float)
    now += 1.0
    with pytest.raises(CommandTimeout):
        next(operation)
    assert session.flight == [older]
    assert core.begin_write(memoryview(bytes(BLOCK)), 0, CountingWaiter()) is not None


@pytest.mark.parametrize("ends", ["badly", "late"])
def test_a_block_is_changed_in_part_when_no_flush_is_under_way(ends: str) -> None:
    """The flush, sent behind the read of the block, may bring the only report of a loss that the
    read has seen; or the report is lost when the flush is given up."""
    bench = Bench()
    bench.write(0, 1, 1)
    operation = bench.core.write(memoryview(b"x" * 10), 7)
    next(operation)
    (slot,) = bench.session.flight
    flush = bench.core.flush()
    next(flush)
    bench.session.order[bench.session.flight[-1].index] = 1
    bench.target.cached.clear()
    bench.target.execute(slot)
    bench.session.end(slot)
    assert isinstance(next(operation), float)
    (synchronize,) = bench.session.flight
    if ends == "badly":
        bench.session.end(synchronize, sense=MEDIUM_ERROR)
    else:
        bench.session.end(synchronize, error=CommandTimeout("late"))
    with pytest.raises(IserblkError):
        next(flush)
    bench.run(operation)
    assert bench.target.block(0) == b"\1" * 7 + b"x" * 10 + b"\1" * (BLOCK - 17)
    bench.run(bench.core.flush())
    assert bench.target.stable[0] == bench.target.block(0) and bench.kept == 0


def told(bench: Bench, client: FlushClient) -> bool:
    """Whether the next flush of ``client`` tells of a loss."""
    try:
        bench.run(bench.core.flush(client=client))
    except WritesLost as error:
        client.told(error.losses)
        return True
    return False


def _flushing_beside_a_part(bench: Bench) -> tuple[Operation[None], Operation[None]]:
    """A write of a part of a block, and a flush, both under way."""
    bench.write(0, 1, 1)
    writing = bench.core.write(memoryview(b"x" * 10), 7)
    next(writing)
    bench.target.answer(bench.session, bench.session.flight[0])
    next(writing)  # it writes
    flush = bench.core.flush()
    next(flush)
    return writing, flush


@pytest.mark.parametrize("first", [True, False])
def test_a_block_whose_part_is_under_way_when_a_flush_fails(first: bool) -> None:
    """The target drops the block behind the read of it; ``first``: the part is written before the
    flush fails. The rest is sent again, and no other client is told."""
    bench = Bench()
    other = bench.core.durability.losses.new_client()
    writing, flush = _flushing_beside_a_part(bench)
    write, failing = bench.session.flight
    assert (write.cdb[0], failing.cdb[0]) == (WRITE, SYNC)
    bench.target.cached.clear()
    if first:
        bench.target.answer(bench.session, write)
    bench.session.end(failing, sense=MEDIUM_ERROR)
    with pytest.raises(ScsiError) as raised:
        next(flush)
    assert not raised.value.losses
    bench.target.cached.clear()
    bench.run(writing)
    bench.run(bench.core.flush())
    assert bench.target.stable[0] == b"\1" * 7 + b"x" * 10 + b"\1" * (BLOCK - 17)
    assert not told(bench, bench.core.client) and not told(bench, other)


@pytest.mark.parametrize("sense", [ABORTED, MEDIUM_ERROR])
def test_a_flush_that_fails_says_nothing_of_a_block_that_was_changed_in_part(sense: bytes) -> None:
    """It was as it was written last: the journal has all of it, and makes it good. No other client
    hears of that."""
    bench = Bench()
    other = bench.core.durability.losses.new_client()
    bench.write(0, 1, 1)
    bench.run(bench.core.write(memoryview(b"x" * 10), 7))
    flush = bench.core.flush()
    next(flush)
    bench.target.cached.clear()
    bench.session.end(bench.session.flight[0], sense=sense)
    with suppress(StopIteration, ScsiError):
        while True:
            next(flush)
            if bench.core.durability.replay_needed:
                break
    reconnect(bench.core, bench.target, lost=False)
    bench.run(bench.core.flush())
    assert bench.core.durability.losses.count == 0 and not told(bench, other)
    assert bench.target.stable[0] == b"\1" * 7 + b"x" * 10 + b"\1" * (BLOCK - 17)


def dropped(bench: Bench) -> None:
    """The target has dropped what it had cached, and tells of it with the next flush only."""
    bench.target.cached.clear()
    reports = iter([True])

    def refusal(slot: Command) -> bytes:
        return MEDIUM_ERROR if slot.cdb[0] == SYNC and next(reports, False) else b""

    bench.target.refusal = refusal


@pytest.mark.parametrize("report", ["comes", "is lost with its connection", "is given up"])
def test_a_block_that_the_target_has_dropped_is_written_again_before_a_part_of_it(
    report: str,
) -> None:
    """It shows what was there before the write that it could not keep, and tells of that with the
    next flush only. The journal has what was written: so a flush comes before the part, and nobody
    has lost anything, also where the report itself does not come."""
    bench = Bench()
    other = bench.core.durability.losses.new_client()
    bench.write(0, 1, 1)
    dropped(bench)
    operation = bench.core.write(memoryview(b"x" * 10), 7)
    next(operation)
    bench.target.answer(bench.session, bench.session.flight[0])
    next(operation)
    (flush,) = bench.session.flight
    assert flush.cdb[0] == SYNC
    if report != "comes":
        assert bench.target.refusal(flush)  # the target has failed it, and forgets it
    if report == "is given up":
        bench.session.end(flush, error=CommandTimeout("late"))
    elif report == "is lost with its connection":
        reconnect(bench.core, bench.target, lost=False)
    bench.run(operation)
    assert not told(bench, bench.core.client) and not told(bench, other)
    assert bench.target.stable[0] == b"\1" * 7 + b"x" * 10 + b"\1" * (BLOCK - 17)


@pytest.mark.parametrize("ends", [{"sense": MEDIUM_ERROR}, {"status": RESERVATION_CONFLICT}])
def test_no_part_of_a_block_is_written_where_it_is_not_certain_what_the_rest_is(
    ends: dict[str, Any],
) -> None:
    """The flush fails in a way that leaves nothing to send again, or it fails again."""
    bench = Bench()
    bench.write(0, 1, 1)
    bench.write(1, 1, 1)
    bench.target.cached.clear()
    bench.target.executed.clear()
    operation = bench.core.write(memoryview(b"x" * 10), 7)
    next(operation)
    flushes = 0
    with pytest.raises(ScsiError):
        while True:
            for slot in bench.session.flight.copy():
                if slot.cdb[0] == SYNC:
                    flushes += 1
                    bench.session.end(slot, **ends)
                else:
                    bench.target.answer(bench.session, slot)
                    bench.target.cached.clear()
            next(operation)
            if bench.session.disconnected:
                reconnect(bench.core, bench.target, lost=False)
                bench.target.cached.clear()
    assert flushes == (2 if "sense" in ends else 1)
    assert bench.core.begin_write(memoryview(bytes(BLOCK)), 0, CountingWaiter()) is not None


@pytest.mark.parametrize("last", ["write", "zero", "trim", "flush", "elsewhere"])
def test_a_block_that_shows_what_was_written_last_needs_no_flush(last: str) -> None:
    bench = Bench()
    bench.write(0, 3, 1)
    if last == "write":
        bench.write(1, 1, 2)
    elif last == "zero":
        bench.run(bench.core.zero(BLOCK, BLOCK, False, False, False))
    elif last == "trim":  # it may show anything
        bench.run(bench.core.trim(BLOCK, BLOCK))
        bench.target.cached[1] = b"\5" * BLOCK
    elif last == "flush":
        bench.run(bench.core.flush())
        bench.target.stable[1] = b"\6" * BLOCK  # by another host
    at = 5 if last == "elsewhere" else 1
    rest = bench.target.block(at)
    bench.target.executed.clear()
    bench.run(bench.core.write(memoryview(b"x" * 10), at * BLOCK + 7))
    assert bench.target.executed == [opcodes.READ_16, WRITE]
    assert bench.target.block(at) == rest[:7] + b"x" * 10 + rest[17:]


def test_what_a_block_shows_behind_a_flush_is_what_it_is() -> None:
    """A write that has failed may have been carried out all the same: nothing older comes back."""
    bench = Bench()
    bench.write(0, 1, 1)
    bench.target.cached[0] = b"\2" * BLOCK
    for _ in range(2):
        bench.run(bench.core.write(memoryview(b"x" * 10), 7))
    assert bench.target.executed == [WRITE, opcodes.READ_16, SYNC] + 2 * [opcodes.READ_16, WRITE]
    assert bench.target.block(0) == b"\2" * 7 + b"x" * 10 + b"\2" * (BLOCK - 17)


def test_what_is_in_doubt_is_sent_again_before_a_block_is_changed_in_part() -> None:
    """A flush was given up: the target may have lost what the block was."""
    bench = Bench()
    bench.write(0, 1, 1)
    flush = bench.core.flush()
    next(flush)
    bench.target.cached.clear()
    bench.session.end(bench.session.flight[0], error=CommandTimeout("late"))
    with pytest.raises(CommandTimeout):
        next(flush)
    bench.run(bench.core.write(memoryview(b"x" * 10), 7))
    assert bench.target.block(0) == b"\1" * 7 + b"x" * 10 + b"\1" * (BLOCK - 17)


def test_a_read_of_a_block_that_was_never_sent_has_no_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It ends with its own error, and what it was for can be tried again."""
    bench = Bench()
    bench.write(0, 1, 1)
    place = bench.session.place

    def only_of_those_sent(slot: Command) -> object:
        assert slot.error is None
        return place(slot)

    monkeypatch.setattr(bench.session, "place", only_of_those_sent)
    operation = bench.core.write(memoryview(b"x" * 10), 7)
    next(operation)
    (slot,) = bench.session.flight
    bench.session.end(slot, error=ConnectionLost("no connection"))
    with pytest.raises(ConnectionLost, match="no connection"):
        bench.run(operation)
    bench.run(bench.core.write(memoryview(b"x" * 10), 7))
    assert bench.target.block(0) == b"\1" * 7 + b"x" * 10 + b"\1" * (BLOCK - 17)


@pytest.mark.parametrize("limit", [1 << 20, None])
def test_what_the_last_flush_is_for(limit: int | None) -> None:
    bench = Bench(limit)
    durability = bench.core.durability
    assert not durability.wants_flush()
    bench.run(bench.core.read(memoryview(bytearray(BLOCK)), 0))
    assert not durability.wants_flush()
    slot = bench.core.begin_write(memoryview(bytes(BLOCK)), 0, CountingWaiter())
    assert slot is not None and durability.wants_flush()  # in flight
    bench.target.execute(slot)
    bench.session.end(slot)
    bench.core.ended_write(slot)
    assert durability.wants_flush()
    bench.run(bench.core.flush())
    assert not durability.wants_flush()
    bench.report(DEFERRED)
    assert durability.wants_flush()  # there is a loss to tell
    with pytest.raises(IserblkError, match="lost"):
        bench.run(bench.core.flush())
    assert not durability.wants_flush()


def test_a_flush_waits_for_the_end_of_an_older_command() -> None:
    """What the target has told with it may be still under way, on another connection."""
    bench = Bench()
    bench.write(0, 1, 1)
    read = bench.core.begin_read(memoryview(bytearray(BLOCK)), 0, CountingWaiter())
    assert read is not None
    flush = bench.core.flush()
    next(flush)
    (synchronize,) = [slot for slot in bench.session.flight if slot is not read]
    bench.session.order = {read.index: 1, synchronize.index: 2}
    bench.target.execute(synchronize)
    bench.session.end(synchronize)
    assert isinstance(next(flush), float) and isinstance(next(flush), float)
    bench.target.execute(read)
    bench.session.end(read)
    bench.core.ended(read)
    with pytest.raises(StopIteration):
        next(flush)
