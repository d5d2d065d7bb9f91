"""What a LUN says that it can, and refuses: learned from the first refusal, remembered, and logged
once. Requests that meet the refusal are carried out all the same, or fail as not supported."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import pytest

from iserblk.commands.command import Command, Operation
from iserblk.commands.running import is_unknown
from iserblk.disk.lun import refusals
from iserblk.disk.lun.operations import DiskCore
from iserblk.disk.seam import EXTENT_DATA, EXTENT_HOLE, EXTENT_ZERO
from iserblk.errors import IserblkError, NotSupported, OutOfRange, ScsiError, WriteProtected
from iserblk.scsi import cdb, opcodes
from iserblk.scsi.sense import DATA_PROTECT, ILLEGAL_REQUEST, encode_fixed
from tests.disk.fake_target import BLOCK, MEDIUM_ERROR, FakeSession, FakeTarget, disk
from tests.initiator.fake import CountingWaiter
from tests.support import logs

pytestmark = pytest.mark.logs(logs.REFUSED)

BLOCKS = 4096
UNKNOWN = encode_fixed(ILLEGAL_REQUEST, 0x20, 0x00)
INVALID = encode_fixed(ILLEGAL_REQUEST, 0x24, 0x00)
PARAMETER = encode_fixed(ILLEGAL_REQUEST, 0x26, 0x00)
RANGE = encode_fixed(ILLEGAL_REQUEST, 0x21, 0x00)
PROTECTED = encode_fixed(DATA_PROTECT, 0x27, 0x00)
X, NIL = b"x" * BLOCK, bytes(BLOCK)
Habit = Callable[[Command], bytes]


def operation(slot: Command) -> int:
    return slot.cdb[0]


def blocks_of(slot: Command) -> int:
    """Blocks that a command of 16 bytes, or UNMAP, is about."""
    if slot.cdb[0] == opcodes.UNMAP:
        assert slot.data is not None
        return int.from_bytes(slot.data[16:20], "big")
    return int.from_bytes(slot.cdb[10:14], "big")


def above(kinds: int | tuple[int, ...], blocks: int, sense: bytes = INVALID) -> Habit:
    """Refuses these commands from ``blocks`` + 1 blocks on."""
    which = (kinds,) if isinstance(kinds, int) else kinds
    return lambda slot: sense if slot.cdb[0] in which and blocks_of(slot) > blocks else b""


class Lun:
    """A LUN full of x, behind a session. ``habit`` returns the sense data with which a command is
    refused. ``refused``: blocks of each command that was."""

    def __init__(self, habit: Habit, wce: bool = True, journal: int = 0) -> None:
        self.habit = habit
        self.session = FakeSession()
        self.target = FakeTarget(BLOCKS)
        self.target.stable = [X] * BLOCKS
        self.core: DiskCore = disk(self.session, BLOCKS, wce=wce)
        self.core.geometry.max_unmap_blocks = 0xFFFFFFFF
        self.core.geometry.max_unmap_descriptors = 1
        if journal:
            self.core.keep_journal(journal)
        self.refused: list[int] = []
        self.sent: list[Command] = []
        self.most = 0

    def end_one(self) -> None:
        self.most = max(self.most, len(self.session.flight))
        slot = self.session.flight[0]
        sense = self.habit(slot)
        if sense:
            self.refused.append(blocks_of(slot))
        else:
            self.target.execute(slot)
        self.session.end(slot, sense=sense)

    def run(self, steps: Operation[object]) -> object:
        try:
            while True:
                step = next(steps)
                while not isinstance(step, float) and step.pending:
                    self.end_one()
        except StopIteration as stop:
            return stop.value
        finally:
            assert self.session.queue.busy == 0 and not self.session.flight

    def zero(self, first: int = 0, blocks: int = BLOCKS, **how: bool) -> None:
        values = {"may_trim": False, "fast": False, "fua": False, "patient": False, **how}
        self.run(self.core.zero(first * BLOCK, blocks * BLOCK, **values))

    def has(self, content: bytes, first: int = 0, stop: int = BLOCKS) -> bool:
        return all(self.target.block(at) == content for at in range(first, stop))

    def counts(self, kind: int) -> int:
        return self.target.executed.count(kind)


# -- WRITE SAME --------------------------------------------------------------------------------


@pytest.mark.parametrize("patient", [False, True])
@pytest.mark.parametrize("may_trim", [False, True])
def test_write_same_that_is_not_known(
    patient: bool, may_trim: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """As longhorn's, which says that it has it."""
    lun = Lun(lambda slot: UNKNOWN if operation(slot) == opcodes.WRITE_SAME_16 else b"")
    lun.zero(3, BLOCKS - 10, patient=patient, may_trim=may_trim)
    assert lun.has(NIL, 3, BLOCKS - 7) and lun.has(X, 0, 3) and lun.has(X, BLOCKS - 7)
    assert len(lun.refused) == 1 and lun.most > 1  # writes are several at once
    assert not lun.core.info.can_zero and not lun.core.info.zero_by_unmap
    lun.zero()
    assert lun.has(NIL) and len(lun.refused) == 1
    with pytest.raises(NotSupported):
        lun.zero(fast=True)
    assert len(caplog.records) == 1 and "zeroes are written" in caplog.text


def test_a_fast_zero_that_meets_the_refusal_is_not_supported() -> None:
    """The client writes zeroes then, with its own parallelism."""
    lun = Lun(lambda slot: UNKNOWN if operation(slot) == opcodes.WRITE_SAME_16 else b"")
    with pytest.raises(NotSupported):
        lun.zero(fast=True)
    assert opcodes.WRITE_16 not in lun.target.executed


@pytest.mark.parametrize("most", [200, 1024, 4095])
@pytest.mark.parametrize("sense", [INVALID, PARAMETER])
def test_write_same_above_a_length(
    most: int, sense: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """As 3PAR's: shorter ones, which are remembered."""
    lun = Lun(above(opcodes.WRITE_SAME_16, most, sense))
    lun.zero(0, BLOCKS, patient=True)
    assert lun.has(NIL) and lun.core.info.can_zero
    assert opcodes.WRITE_16 not in lun.target.executed
    assert most / 2 - 1 <= lun.core.geometry.max_write_same_blocks <= most
    found = len(lun.refused)
    lun.target.stable = [X] * BLOCKS
    lun.target.cached.clear()
    lun.zero()
    assert lun.has(NIL) and len(lun.refused) == found
    assert len(caplog.records) == 1


def test_write_same_of_hardly_anything_is_not_worth_it() -> None:
    lun = Lun(above(opcodes.WRITE_SAME_16, 4))
    lun.zero()
    assert lun.has(NIL) and not lun.core.info.can_zero
    assert opcodes.WRITE_SAME_16 not in lun.target.executed


def test_deallocation_that_is_refused() -> None:
    """The UNMAP bit, whatever the length. Without it WRITE SAME goes on, at full length."""

    def habit(slot: Command) -> bytes:
        unmap = operation(slot) == opcodes.WRITE_SAME_16 and slot.cdb[1] & 8
        return INVALID if unmap else b""

    lun = Lun(habit)
    lun.zero(may_trim=True)
    assert lun.has(NIL) and lun.core.info.can_zero and not lun.core.info.zero_by_unmap
    assert lun.counts(opcodes.WRITE_SAME_16) == 1 and opcodes.WRITE_16 not in lun.target.executed


@pytest.mark.parametrize("sense", [UNKNOWN, INVALID])
@pytest.mark.parametrize("limit", [0, 256])
def test_a_refusal_in_the_middle_with_several_in_flight(sense: bytes, limit: int) -> None:
    """A LUN that changes its mind, as another controller may have taken it over. What was done
    stays done, and the rest is done in another form."""
    lun = Lun(lambda slot: b"")
    lun.core.geometry.max_write_same_blocks = 512
    begun = 0

    def habit(slot: Command) -> bytes:
        nonlocal begun
        if operation(slot) != opcodes.WRITE_SAME_16:
            return b""
        begun += 1
        return sense if begun > 4 and blocks_of(slot) > limit else b""

    lun.habit = habit
    lun.zero(patient=True)
    assert lun.most > 1 and len(lun.refused) > 1
    assert lun.has(NIL)
    assert lun.core.info.can_zero is (limit > 0 and sense == INVALID)


@pytest.mark.parametrize("sense", [RANGE, PROTECTED, MEDIUM_ERROR])
def test_what_is_no_refusal_fails(sense: bytes) -> None:
    kinds = {RANGE: OutOfRange, PROTECTED: WriteProtected, MEDIUM_ERROR: ScsiError}
    lun = Lun(lambda slot: sense)
    lun.core.geometry.ndob = False
    for steps in (
        lun.core.zero(0, BLOCKS * BLOCK, False, False, False),
        lun.core.trim(0, BLOCKS * BLOCK),
        lun.core.write(memoryview(bytes(1 << 20)), 0),
    ):
        with pytest.raises(kinds[sense]):
            lun.run(steps)
    info = lun.core.info
    assert info.can_zero and info.can_trim and info.max_transfer == 1 << 20


def test_the_journal_has_the_zeroes_that_were_written_in_place() -> None:
    lun = Lun(
        lambda slot: UNKNOWN if operation(slot) == opcodes.WRITE_SAME_16 else b"", journal=4 << 20
    )
    lun.zero(0, 64)
    journal = lun.core.durability.journal
    assert journal is not None and journal.size == 64 * BLOCK


# -- UNMAP -------------------------------------------------------------------------------------


@pytest.mark.parametrize("patient", [False, True])
def test_unmap_that_is_not_known(patient: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    lun = Lun(lambda slot: UNKNOWN if operation(slot) == opcodes.UNMAP else b"")
    with pytest.raises(NotSupported, match="5/20/00") as raised:
        lun.run(lun.core.trim(0, BLOCKS * BLOCK, False, patient))
    assert raised.value.exit_status == 27
    assert not lun.core.info.can_trim and lun.has(X)
    with pytest.raises(NotSupported):
        lun.run(lun.core.trim(0, BLOCKS * BLOCK))
    assert len(lun.refused) == 1 and len(caplog.records) == 1


@pytest.mark.parametrize("sense", [INVALID, PARAMETER])
@pytest.mark.parametrize("granule", [0, 8, 100])
def test_unmap_above_a_length(granule: int, sense: bytes, caplog: pytest.LogCaptureFixture) -> None:
    lun = Lun(above(opcodes.UNMAP, 500, sense))
    lun.core.geometry.unmap_granularity = granule
    lun.run(lun.core.trim(0, BLOCKS * BLOCK))
    whole = BLOCKS - BLOCKS % max(granule, 1)
    assert lun.has(NIL, 0, whole) and lun.has(X, whole)
    found = len(lun.refused)
    assert 200 <= lun.core.geometry.max_unmap_blocks <= 500
    lun.run(lun.core.trim(0, BLOCKS * BLOCK))
    assert len(lun.refused) == found and len(caplog.records) == 1


def test_less_than_a_granule_is_not_tried() -> None:
    lun = Lun(lambda slot: INVALID if operation(slot) == opcodes.UNMAP else b"")
    lun.core.geometry.unmap_granularity = 512
    with pytest.raises(NotSupported):
        lun.run(lun.core.trim(0, BLOCKS * BLOCK))
    assert lun.refused == [4096, 2048, 1024, 512]


@pytest.mark.parametrize(("blocks", "descriptors"), [(0, 1), (8192, 0)])
def test_a_maximum_of_nothing_means_that_there_is_none(blocks: int, descriptors: int) -> None:
    """SBC-4. One refusal is enough then."""
    lun = Lun(lambda slot: PARAMETER if operation(slot) == opcodes.UNMAP else b"")
    lun.core.geometry.max_unmap_blocks = blocks
    lun.core.geometry.max_unmap_descriptors = descriptors
    with pytest.raises(NotSupported):
        lun.run(lun.core.trim(0, BLOCKS * BLOCK))
    assert len(lun.refused) == 1


# -- READ and WRITE ----------------------------------------------------------------------------

TRANSFERS = (opcodes.READ_16, opcodes.WRITE_16)


def write(lun: Lun, data: bytes, offset: int, fua: bool = False) -> None:
    lun.run(lun.core.write(memoryview(data), offset, fua))


def read(lun: Lun, length: int, offset: int) -> bytes:
    buffer = memoryview(bytearray(length))
    lun.run(lun.core.read(buffer, offset))
    return bytes(buffer)


@pytest.mark.parametrize("most", [1, 100, 256, 2047])
@pytest.mark.parametrize("first", ["read", "write"])
def test_transfers_above_a_length(first: str, most: int, caplog: pytest.LogCaptureFixture) -> None:
    lun = Lun(above(TRANSFERS, most))
    data = bytes(range(256)) * (BLOCK // 256 * 4000)
    if first == "read":
        assert read(lun, 4000 * BLOCK, 100) == (X * BLOCKS)[: 4000 * BLOCK]
    write(lun, data, 100)
    found = len(lun.refused)
    assert found
    assert read(lun, 4000 * BLOCK, 100) == data
    assert len(lun.refused) == found and len(caplog.records) == 1
    assert most / 2 - 1 <= lun.core.max_transfer / BLOCK <= most
    assert lun.core.max_transfer == lun.core.info.max_transfer


@pytest.mark.parametrize("kind", ["read", "write"])
def test_one_command_that_is_refused_goes_on_in_shorter_ones(kind: str) -> None:
    """The route of one command, without a coroutine."""
    lun = Lun(above(TRANSFERS, 64))
    core, waiter = lun.core, CountingWaiter()
    buffer = memoryview(bytearray(b"w" * 256 * BLOCK))
    begin, end = (
        (core.begin_read, core.ended) if kind == "read" else (core.begin_write, core.ended_write)
    )
    slot = begin(buffer, 0, waiter)
    assert slot is not None
    lun.end_one()
    rest = end(slot)
    assert rest is not None
    again = core.read if kind == "read" else core.write
    lun.run(again(buffer, 0, deadline=rest.deadline))
    assert lun.has(bytes(buffer[:BLOCK]), 0, 256)
    assert begin(buffer, 0, waiter) is None and core.max_transfer == 64 * BLOCK


def test_one_block_that_is_refused_is_an_error_and_teaches_nothing() -> None:
    """It has another reason than the length."""
    lun = Lun(lambda slot: INVALID if operation(slot) == opcodes.READ_16 else b"")
    with pytest.raises(ScsiError, match="5/24/00"):
        read(lun, 64 * BLOCK, 0)
    assert lun.core.max_transfer == 1 << 20


def test_fua_that_is_refused() -> None:
    """A flush takes its place, for this write and for later ones."""

    def habit(slot: Command) -> bytes:
        return INVALID if operation(slot) == opcodes.WRITE_16 and slot.cdb[1] & 8 else b""

    lun = Lun(habit)
    for count in (1, 2):
        write(lun, b"d" * 10000, 100, fua=True)
        assert lun.counts(opcodes.SYNCHRONIZE_CACHE_16) == count
        assert not lun.target.cached
    assert len(lun.refused) <= 2 and not lun.core.info.fua
    assert read(lun, 10000, 100) == b"d" * 10000


def test_read_and_write_of_16_bytes_that_are_not_known(caplog: pytest.LogCaptureFixture) -> None:
    lun = Lun(lambda slot: UNKNOWN if operation(slot) in TRANSFERS else b"")
    short: list[int] = []
    execute = lun.target.execute

    def with_short(slot: Command) -> None:
        if operation(slot) in (opcodes.READ_10, opcodes.WRITE_10):
            short.append(operation(slot))
            lba, blocks = slot.cdb[2:6], slot.cdb[7:9]
            slot.cdb[:] = bytes([slot.cdb[0] | 0xA8 & 0xA0, 0]) + bytes(14)
            slot.cdb[0] = opcodes.READ_16 if short[-1] == opcodes.READ_10 else opcodes.WRITE_16
            slot.cdb[6:10], slot.cdb[12:14] = lba, blocks
        execute(slot)

    lun.target.execute = with_short  # type: ignore[method-assign]
    write(lun, b"d" * 5000, 100)
    assert read(lun, 5000, 100) == b"d" * 5000
    assert opcodes.READ_10 in short and opcodes.WRITE_10 in short
    assert len(lun.refused) == 1 and len(caplog.records) == 1


@pytest.mark.parametrize("refuses", [True, False])
def test_a_lun_that_grows_beyond_what_its_commands_reach(
    refuses: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """READ(10) has 32 bits for the LBA."""
    lun = Lun(lambda slot: b"")
    if refuses:
        lun.core.refusals.lacks(refusals.LONG_TRANSFERS, "refused")
    caplog.clear()
    size = ((1 << 32) + 8) * BLOCK
    for _ in range(2):
        lun.core.renew(replace(lun.core.info, size=size), lun.core.geometry)
        most = (1 << 32) * BLOCK if refuses else size
        assert (lun.core.size, lun.core.info.size) == (most, most)
        lun.core.check(most - 1, 1)
        with pytest.raises(OutOfRange):
            lun.core.check(most, 1)
    warned = [each for each in caplog.records if each.levelname == "WARNING"]
    assert [str(size) in each.getMessage() for each in warned] == [True] * refuses


def test_a_large_lun_that_does_not_know_read_and_write_of_16_bytes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """READ(10) does not reach its blocks: the refusal is the caller's, and nothing else is sent."""
    lun = Lun(lambda slot: UNKNOWN)
    lun.core.renew(replace(lun.core.info, size=((1 << 32) + 8) * BLOCK), lun.core.geometry)
    with pytest.raises(ScsiError) as caught:
        write(lun, BLOCK * b"d", (1 << 32) * BLOCK)
    assert is_unknown(caught.value)
    with pytest.raises(ScsiError):
        read(lun, BLOCK, (1 << 32) * BLOCK)
    assert not lun.core.refusals.refused(refusals.LONG_TRANSFERS)
    assert len(lun.refused) == 2 and not lun.target.executed
    assert not [each for each in caplog.records if each.levelname == "WARNING"]


def test_a_lun_that_comes_back_without_read_capacity_16() -> None:
    """Then it is small, and may know READ(10) alone."""
    lun = Lun(lambda slot: b"")
    for long_cdbs, pack in ((False, cdb.pack_read10), (True, cdb.pack_read16)):
        lun.core.renew(lun.core.info, replace(lun.core.geometry, long_cdbs=long_cdbs))
        assert lun.core.pack_read is pack


def test_the_option_limits_from_the_start() -> None:
    lun = Lun(lambda slot: b"")
    lun.core.limit_transfer(5000)
    assert lun.core.max_transfer == 9 * BLOCK
    lun.core.limit_transfer(100)
    assert lun.core.max_transfer == BLOCK
    write(lun, b"d" * 5000, 100)
    assert read(lun, 5000, 100) == b"d" * 5000


# -- SYNCHRONIZE CACHE -------------------------------------------------------------------------

FLUSHES = (opcodes.SYNCHRONIZE_CACHE_10, opcodes.SYNCHRONIZE_CACHE_16)


def flush(lun: Lun) -> None:
    lun.run(lun.core.flush())


def test_no_flush_and_no_word_of_a_cache(caplog: pytest.LogCaptureFixture) -> None:
    """The LUN counts as write-through, with one warning."""
    lun = Lun(lambda slot: UNKNOWN if operation(slot) in FLUSHES else b"", journal=1 << 20)
    lun.core.geometry.tells_cache = False
    for byte in (b"1", b"2"):
        write(lun, byte * BLOCK, 0)
        flush(lun)
        write(lun, byte * BLOCK, BLOCK, fua=True)
    assert not lun.core.info.write_cache and len(lun.refused) == 2
    assert len(caplog.records) == 1 and "SYNCHRONIZE CACHE" in caplog.text
    journal = lun.core.durability.journal
    assert journal is not None and journal.size == 0


def test_a_cache_that_cannot_be_flushed_is_never_called_flushed() -> None:
    lun = Lun(lambda slot: UNKNOWN if operation(slot) in FLUSHES else b"", journal=1 << 20)
    for _ in range(3):
        write(lun, X, 0)
        with pytest.raises(IserblkError, match="WCE"):
            flush(lun)
    assert lun.core.info.write_cache
    journal = lun.core.durability.journal
    assert journal is not None and journal.size


def test_a_flush_that_fails_otherwise_teaches_nothing() -> None:
    lun = Lun(lambda slot: INVALID if operation(slot) in FLUSHES else b"")
    lun.core.geometry.tells_cache = False
    write(lun, X, 0)
    with pytest.raises(ScsiError, match="5/24/00"):
        flush(lun)
    assert lun.core.info.write_cache and lun.core.durability.volatile


def test_only_the_flush_of_10_bytes_is_known(caplog: pytest.LogCaptureFixture) -> None:
    lun = Lun(lambda slot: UNKNOWN if operation(slot) == opcodes.SYNCHRONIZE_CACHE_16 else b"")
    execute = lun.target.execute

    def with_short(slot: Command) -> None:
        if operation(slot) == opcodes.SYNCHRONIZE_CACHE_10:
            slot.cdb[0] = opcodes.SYNCHRONIZE_CACHE_16
        execute(slot)

    lun.target.execute = with_short  # type: ignore[method-assign]
    for _ in range(2):
        write(lun, NIL, 0)
        flush(lun)
        assert not lun.target.cached
    assert len(lun.refused) == 1 and len(caplog.records) == 1


# -- GET LBA STATUS ----------------------------------------------------------------------------


def extents(lun: Lun, first: int, blocks: int) -> object:
    return lun.run(lun.core.extents(first * BLOCK, blocks * BLOCK))


@pytest.mark.parametrize("sense", [INVALID, UNKNOWN, RANGE])
def test_status_that_is_refused_from_some_block_on(
    sense: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    def habit(slot: Command) -> bytes:
        asks = operation(slot) == opcodes.SERVICE_ACTION_IN_16 and slot.cdb[1] & 31 == 0x12
        return sense if asks and int.from_bytes(slot.cdb[2:10], "big") >= 4000 else b""

    lun = Lun(habit)
    lun.core.geometry.zero_when_unmapped = True
    lun.target.stable = [NIL] * BLOCKS
    hole = EXTENT_HOLE | EXTENT_ZERO
    for _ in range(2):
        assert extents(lun, 4010, 50) == [(4010 * BLOCK, 50 * BLOCK, EXTENT_DATA)]
        assert extents(lun, 4000, 50) == [(4000 * BLOCK, 50 * BLOCK, EXTENT_DATA)]
        assert extents(lun, 3999, 1) == [(3999 * BLOCK, BLOCK, hole)]
    assert len(lun.refused) == 2 and len(caplog.records) == 1
    assert lun.core.info.can_extents


@pytest.mark.logs(logs.SHRUNK)
def test_status_behind_the_end_of_a_lun_that_has_shrunk_is_an_error() -> None:
    lun = Lun(lambda slot: b"")
    lun.target.stable = lun.target.stable[:100]
    lun.habit = lambda slot: RANGE if slot.cdb[1] & 31 == 0x12 else b""
    with pytest.raises(OutOfRange):
        extents(lun, 200, 10)


@pytest.mark.parametrize("times", [8, -8])
def test_status_in_blocks_of_another_size(times: int, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing of it is believed any more."""
    lun = Lun(lambda slot: b"")
    lun.target.stable = [NIL] * 3600 + [X] * (BLOCKS - 3600)
    execute = lun.target.execute

    def counting(slot: Command) -> None:
        execute(slot)
        if slot.cdb[1] & 31 == 0x12:
            assert slot.data is not None
            for at in range(8, len(slot.data) - 15, 16):
                for field in (slice(at, at + 8), slice(at + 8, at + 12)):
                    value = int.from_bytes(slot.data[field], "big")
                    value = value * times if times > 0 else value // -times
                    slot.data[field] = value.to_bytes(field.stop - field.start, "big")

    lun.target.execute = counting  # type: ignore[method-assign]
    for _ in range(2):
        assert extents(lun, 3500, 200) == [(3500 * BLOCK, 200 * BLOCK, EXTENT_DATA)]
    assert not lun.core.info.can_extents
    assert len(caplog.records) == 1


# -- later connections -------------------------------------------------------------------------


def test_what_was_refused_is_not_believed_again_on_a_new_connection() -> None:
    lun = Lun(lambda slot: UNKNOWN if operation(slot) == opcodes.UNMAP else b"")
    lun.habit = lambda slot: (
        UNKNOWN
        if operation(slot) == opcodes.UNMAP
        else above(opcodes.WRITE_SAME_16, 1000)(slot) or above(TRANSFERS, 128)(slot)
    )
    with pytest.raises(NotSupported):
        lun.run(lun.core.trim(0, BLOCKS * BLOCK))
    lun.zero()
    write(lun, bytes(1 << 20), 0)
    fresh = disk(FakeSession(), BLOCKS)
    lun.core.renew(fresh.info, fresh.geometry)
    info, geometry = lun.core.info, lun.core.geometry
    assert geometry is fresh.geometry and geometry.max_write_same_blocks <= 1000
    assert not info.can_trim and lun.core.max_transfer == info.max_transfer <= 128 * BLOCK


def test_the_new_limits_hold_on_a_new_connection() -> None:
    lun = Lun(lambda slot: b"")
    fresh = disk(FakeSession(), BLOCKS, max_transfer=4096)
    fresh.geometry.max_unmap_blocks = 100
    fresh.geometry.max_write_same_blocks = 200
    lun.core.renew(fresh.info, fresh.geometry)
    lun.habit = lambda slot: (
        above(opcodes.UNMAP, 100)(slot)
        or above(opcodes.WRITE_SAME_16, 200)(slot)
        or above(TRANSFERS, 8)(slot)
    )
    lun.zero()
    lun.run(lun.core.trim(0, BLOCKS * BLOCK))
    write(lun, bytes(1 << 20), 0)
    assert not lun.refused


def test_a_cache_that_was_told_once_is_not_forgotten() -> None:
    """Where the LUN has no caching page on the new connection, and knows no SYNCHRONIZE CACHE."""
    lun = Lun(lambda slot: UNKNOWN if operation(slot) in FLUSHES else b"")
    fresh = disk(FakeSession(), BLOCKS)
    fresh.geometry.tells_cache = False
    lun.core.renew(fresh.info, fresh.geometry)
    write(lun, NIL, 0)
    with pytest.raises(IserblkError, match="WCE"):
        flush(lun)
