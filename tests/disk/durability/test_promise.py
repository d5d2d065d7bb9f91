"""When a flush may succeed, for anything that the target reports."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from time import monotonic
from typing import Any

import pytest

from iserblk.commands.command import QUEUED, SENT, EndedByReset, InDoubt, Operation, Unanswered
from iserblk.disk.durability.journal import MemoryJournal
from iserblk.errors import CommandTimeout, IserblkError, ScsiError, WritesLost
from iserblk.initiator.session.slots import TaskSlot
from iserblk.scsi import opcodes
from iserblk.scsi import sense as sense_data
from iserblk.scsi.cdb import FUA
from iserblk.scsi.status import BUSY, CHECK_CONDITION, TASK_ABORTED
from tests.initiator.fake import CountingWaiter, FakeDriver
from tests.initiator.peer import Heard, disk_of, linked
from tests.support import logs
from tests.support.clocks import Clock

pytestmark = pytest.mark.logs(logs.LOST_WRITES)

WRITE = opcodes.WRITE_16
SYNC = opcodes.SYNCHRONIZE_CACHE_16
BLOCK = memoryview(bytes(512))

POWER_ON = sense_data.encode_fixed(sense_data.UNIT_ATTENTION, 0x29, 0x00)
INTERNAL_RESET = sense_data.encode_fixed(sense_data.UNIT_ATTENTION, 0x29, 0x04)
LUN_RESET = sense_data.encode_fixed(sense_data.UNIT_ATTENTION, 0x29, 0x03)
MODES_CHANGED = sense_data.encode_fixed(sense_data.UNIT_ATTENTION, 0x2A, 0x01)
DEFERRED = (
    bytes((sense_data.FIXED_DEFERRED,))
    + sense_data.encode_fixed(sense_data.MEDIUM_ERROR, 0x0C, 0x00)[1:]
)
MEDIUM_ERROR = sense_data.encode_fixed(sense_data.MEDIUM_ERROR, 0x0C, 0x00)


class Bench:
    """One LUN whose target the test plays; operations advance only when it says so."""

    def __init__(self, write_cache: bool = True, long_cdbs: bool = True) -> None:
        self.session, self.peer = linked(depth=8)
        self.session.drive(FakeDriver(self.session))
        self.disk = disk_of(self.session, write_cache, long_cdbs=long_cdbs)
        self._answered = 0

    def begin(self, operation: Operation[Any]) -> Operation[Any]:
        """Advance the operation to where it waits."""
        next(operation)
        return operation

    def heard(self) -> list[Heard]:
        """The commands that wait for an answer."""
        self.peer.poll()
        return self.peer.heard[self._answered :]

    def answer(self, *senses: bytes) -> None:
        """End the oldest commands: with these sense data, b"": GOOD."""
        waiting = self.heard()
        for heard, sense in zip(waiting, senses, strict=False):
            self.peer.respond(heard, status=2 if sense else 0, sense=sense)
        self._answered += len(senses)
        self.session.progress(monotonic())

    def passed_by(self) -> None:
        """The oldest command got its answer from the test."""
        self._answered += 1

    def end(self, operation: Operation[Any], *senses: bytes) -> None:
        """Answer one command after another until it ends; what is not in ``senses`` is GOOD."""
        answers = iter(senses)
        with pytest.raises(StopIteration):
            while True:
                self.answer(*[next(answers, b"")] * bool(self.heard()))
                next(operation)

    def run(self, operation: Operation[Any], *senses: bytes) -> None:
        try:
            next(operation)
        except StopIteration:
            return
        self.end(operation, *senses)

    def write(self, lba: int = 0) -> None:
        self.run(self.disk.write(BLOCK, lba * 512))

    def read(self, *senses: bytes) -> None:
        self.run(self.disk.read(memoryview(bytearray(512)), 0), *senses)

    def flush_fails(self) -> bool:
        try:
            self.run(self.disk.flush())
        except IserblkError as error:
            assert "lost" in str(error)
            return True
        return False


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.session.fail(IserblkError("end of test"))
    made.peer.close()


@pytest.mark.parametrize("sense", [POWER_ON, INTERNAL_RESET, DEFERRED])
def test_loss_after_a_write_fails_the_next_flush_once(bench: Bench, sense: bytes) -> None:
    bench.write()
    bench.read(sense)
    assert bench.flush_fails()
    assert not bench.flush_fails()


def test_power_loss_with_nothing_unflushed(bench: Bench) -> None:
    bench.read(POWER_ON)
    assert not bench.flush_fails()
    bench.write()
    assert not bench.flush_fails()
    bench.read(POWER_ON)
    bench.run(bench.disk.flush(), POWER_ON)
    for operation in (
        bench.disk.write(BLOCK, 0),
        bench.disk.write(BLOCK[:10], 5),
        bench.disk.trim(0, 512),
    ):
        bench.run(operation, POWER_ON)  # it was not executed, and is sent again
        assert not bench.flush_fails()


def test_reset_of_the_unit_loses_nothing(bench: Bench) -> None:
    bench.write()
    bench.read(LUN_RESET)
    assert not bench.flush_fails()


def test_each_reinstatement_with_something_unflushed_is_a_loss(bench: Bench) -> None:
    """Without a journal it is told; the target need not say anything (LIO, istgt)."""
    durability = bench.disk.durability
    durability.reinstated(1.0)  # nothing was written
    assert not bench.flush_fails()
    bench.write()
    bench.run(bench.disk.flush())
    durability.reinstated(2.0)  # all is flushed
    assert not bench.flush_fails()
    bench.run(bench.disk.write(BLOCK, 0, fua=True))
    durability.reinstated(3.0)
    assert not bench.flush_fails()
    bench.write()
    for _ in range(2):  # two logins after one loss of the connection
        durability.reinstated(4.0)
    assert durability.losses.count == 1
    assert bench.flush_fails() and not bench.flush_fails()
    bench.write()
    durability.reinstated(5.0)
    assert bench.flush_fails()


def test_reinstatement_while_only_commands_that_wait_would_change_something(bench: Bench) -> None:
    """They are sent on the new connection."""
    bench.session.queue.close_window()
    writing = bench.begin(bench.disk.write(BLOCK, 0))
    bench.disk.durability.reinstated(1.0)
    assert bench.disk.durability.losses.count == 0
    writing.close()


def test_reinstatement_while_a_flush_is_under_way(bench: Bench) -> None:
    bench.write()
    flushing = bench.begin(bench.disk.flush())
    bench.disk.durability.reinstated(1.0)
    bench.answer(b"")
    with pytest.raises(IserblkError, match="lost"):
        next(flushing)


def test_reinstatement_of_a_session_whose_lun_has_no_cache() -> None:
    bench = Bench(write_cache=False)
    bench.write()
    bench.disk.durability.reinstated(1.0)
    assert not bench.flush_fails()


NO_FSYNC = sense_data.encode_fixed(sense_data.NOT_READY, 0x08, 0x00)  # as LIO says it
HARDWARE_ERROR = sense_data.encode_fixed(sense_data.HARDWARE_ERROR, 0x44, 0x00)
ABORTED = sense_data.encode_fixed(sense_data.ABORTED_COMMAND, 0x00, 0x00)
NO_SPACE = sense_data.encode_fixed(sense_data.DATA_PROTECT, 0x27, 0x07)
BECOMING_READY = sense_data.encode_fixed(sense_data.NOT_READY, 0x04, 0x01)
REFUSED = sense_data.encode_fixed(sense_data.ILLEGAL_REQUEST, 0x24, 0x00)


@pytest.mark.parametrize("sense", [MEDIUM_ERROR, HARDWARE_ERROR, NO_FSYNC, ABORTED, NO_SPACE])
def test_failed_flush_is_a_loss(bench: Bench, sense: bytes) -> None:
    """The target has reported once that it could not write what it had cached, and forgets it: the
    flush has told its own client, and the next flush would tell the others."""
    bench.write()
    with pytest.raises(ScsiError) as raised:
        bench.run(bench.disk.flush(), sense)
    assert raised.value.losses == bench.disk.durability.losses.count == 1
    assert [heard.operation for heard in bench.peer.heard] == [WRITE, SYNC]
    assert not bench.flush_fails()


NOTHING = sense_data.encode_fixed(sense_data.NO_SENSE, 0x00, 0x00)


@pytest.mark.parametrize(
    ("status", "sense", "lost"),
    [
        (CHECK_CONDITION, b"", 1),  # as istgt says it
        (CHECK_CONDITION, NOTHING[:1], 1),  # cut off before its key
        (BUSY, b"", 0),
    ],
)
def test_flush_that_ends_without_a_sense_key(
    bench: Bench, status: int, sense: bytes, lost: int
) -> None:
    """Nothing is known of why it failed; BUSY tells that it was not begun."""
    bench.write()
    flushing = bench.begin(bench.disk.flush())
    (heard,) = bench.heard()[-1:]
    bench.peer.respond(heard, status=status, sense=sense)
    bench.session.progress(1.0)
    bench.passed_by()
    if lost:
        with pytest.raises(ScsiError) as raised:
            next(flushing)
        assert raised.value.losses == 1
    else:
        bench.end(flushing)
    assert bench.disk.durability.losses.count == lost
    assert not bench.flush_fails()


@pytest.mark.logs(logs.CARRIED_OUT)
def test_flush_that_succeeds_with_sense_data_loses_nothing(bench: Bench) -> None:
    bench.write()
    bench.run(bench.disk.flush(), NOTHING)
    assert bench.disk.durability.losses.count == 0


@pytest.mark.parametrize("fua", [True, False])
def test_a_write_that_ends_without_a_sense_key(bench: Bench, fua: bool) -> None:
    bench.write()
    writing = bench.begin(bench.disk.write(BLOCK, 512, fua=fua))
    bench.peer.respond(bench.heard()[-1], status=CHECK_CONDITION)
    bench.session.progress(1.0)
    bench.passed_by()
    with pytest.raises(ScsiError):
        next(writing)
    assert bench.disk.durability.losses.count == fua


@pytest.mark.parametrize(
    ("sense", "lost"),
    [(MEDIUM_ERROR, 1), (HARDWARE_ERROR, 1), (NO_FSYNC, 1), (NO_SPACE, 0)],
)
def test_a_write_with_fua_may_bring_the_only_report(bench: Bench, sense: bytes, lost: int) -> None:
    """tgtd calls fsync for it: the kernel reports what was lost of other writes, and forgets it."""
    bench.write()
    with contextlib.suppress(IserblkError):
        bench.run(bench.disk.write(BLOCK, 512, fua=True), sense)
    assert bench.disk.durability.losses.count == lost
    assert bench.flush_fails() is bool(lost)
    assert not bench.flush_fails()


def test_a_lun_with_short_commands_brings_its_only_report_with_them() -> None:
    """SYNCHRONIZE CACHE(10), and WRITE(10) with FUA."""
    bench = Bench(long_cdbs=False)
    bench.write()
    for count, operation in enumerate(
        [bench.disk.flush(), bench.disk.write(BLOCK, 512, fua=True)], 1
    ):
        with contextlib.suppress(IserblkError):
            bench.run(operation, MEDIUM_ERROR)
        assert bench.disk.durability.losses.count == count
    bench.session.fail(IserblkError("end of test"))
    bench.peer.close()


def test_a_write_with_fua_that_fails_alone_is_no_loss(bench: Bench) -> None:
    for _ in range(2):
        with pytest.raises(ScsiError):
            bench.run(bench.disk.write(BLOCK, 512, fua=True), MEDIUM_ERROR)
    bench.write()
    with pytest.raises(ScsiError):
        bench.run(bench.disk.write(BLOCK, 512), MEDIUM_ERROR)
    assert not bench.flush_fails()


@pytest.mark.parametrize("sense", [BECOMING_READY, POWER_ON, LUN_RESET])
def test_flush_that_was_not_begun_loses_nothing(bench: Bench, sense: bytes) -> None:
    bench.run(bench.disk.write(BLOCK, 0, fua=sense is POWER_ON))  # (which loses what is unflushed)
    bench.run(bench.disk.flush(), sense)
    assert bench.disk.durability.losses.count == 0


def test_flush_that_the_target_refuses_loses_nothing(bench: Bench) -> None:
    bench.write()
    with pytest.raises(ScsiError):
        bench.run(bench.disk.flush(), REFUSED)
    assert bench.disk.durability.losses.count == 0


@pytest.mark.parametrize("sense", [MEDIUM_ERROR, ABORTED])
def test_failed_flush_with_nothing_to_flush_is_no_loss(bench: Bench, sense: bytes) -> None:
    with pytest.raises(ScsiError):
        bench.run(bench.disk.flush(), *[sense] * 64)
    assert bench.disk.durability.losses.count == 0


def test_flush_waits_for_others_that_may_bring_the_only_report(bench: Bench) -> None:
    """The target begins one flush after the other, and reports to the first what it lost. The
    report comes later than the second's GOOD."""
    bench.write()
    first = bench.begin(bench.disk.flush())
    second = bench.begin(bench.disk.flush())
    answers = bench.heard()
    bench.peer.respond(answers[1])
    bench.session.progress(1.0)
    assert isinstance(next(second), float)  # it has ended, and does not count yet
    bench.peer.respond(answers[0], status=2, sense=MEDIUM_ERROR)
    bench.session.progress(1.0)
    with pytest.raises(ScsiError):
        next(first)
    with pytest.raises(IserblkError, match="lost"):
        next(second)


@pytest.mark.parametrize("error", [CommandTimeout, Unanswered])
def test_flush_that_was_aborted_may_have_brought_the_only_report(
    bench: Bench, error: type[CommandTimeout]
) -> None:
    """Without a journal nothing can be sent again, and a later flush would prove nothing."""
    bench.write()
    flushing = bench.begin(bench.disk.flush())
    (slot,) = [slot for slot in bench.session.queue.tasks if slot.state >= SENT]
    bench.session.queue.end_aborted(slot, error("late"))
    with pytest.raises(CommandTimeout) as raised:
        next(flushing)
    assert raised.value.losses == bench.disk.durability.losses.count == 1


def _beside_a_write(bench: Bench) -> tuple[Operation[None], Operation[None]]:
    """A write is under way, and a flush that has nothing to flush. The target has carried both out,
    the write first: it could not keep it, and has told the flush, which is aborted."""
    writing = bench.begin(bench.disk.write(BLOCK, 0))
    flushing = bench.begin(bench.disk.flush())
    assert [heard.operation for heard in bench.heard()] == [WRITE, SYNC]
    slot = next(slot for slot in bench.session.queue.tasks if slot.cdb[0] == SYNC)
    bench.session.queue.end_aborted(slot, CommandTimeout("late"))
    return writing, flushing


@pytest.mark.logs(logs.LOST_POWER)
@pytest.mark.parametrize("journal", [True, False])
def test_flush_that_was_aborted_beside_a_write_may_have_brought_the_only_report(
    bench: Bench, journal: bool
) -> None:
    durability = bench.disk.durability
    if journal:
        bench.disk.keep_journal(1 << 20)
    writing, flushing = _beside_a_write(bench)
    with pytest.raises(CommandTimeout) as raised:
        next(flushing)
    assert raised.value.losses == durability.losses.count == (not journal)
    bench.answer(b"")
    bench.passed_by()
    if journal:
        with pytest.raises(StopIteration):
            next(writing)
        assert durability.doubted and durability.renew()  # it is sent again before the next flush
    else:
        bench.end(writing)  # it was written again
        assert bench.peer.heard[-1].operation == WRITE


def test_flush_waits_for_one_with_nothing_to_flush(bench: Bench) -> None:
    """That one has not looked yet, and what it was told may be of what was written since."""
    writing, flushing = _beside_a_write(bench)
    bench.answer(b"")
    bench.passed_by()
    with pytest.raises(StopIteration):
        next(writing)
    later = bench.begin(bench.disk.flush())
    bench.answer(b"")
    assert isinstance(next(later), float)
    with pytest.raises(CommandTimeout):
        next(flushing)
    with pytest.raises(WritesLost):
        next(later)


def test_flush_waits_for_who_looks_what_has_become_of_a_write_with_fua(bench: Bench) -> None:
    """It was aborted, and may have brought the only report; its caller has yet to look."""
    bench.write()
    writing = bench.begin(bench.disk.write(BLOCK, 512, fua=True))
    flushing = bench.begin(bench.disk.flush())
    slot = next(slot for slot in bench.session.queue.tasks if slot.cdb[1] & FUA)
    bench.session.queue.end_aborted(slot, CommandTimeout("late"))
    bench.heard()
    bench.passed_by()
    bench.answer(b"")
    assert isinstance(next(flushing), float)
    with pytest.raises(CommandTimeout):
        next(writing)
    with pytest.raises(WritesLost):
        next(flushing)


@pytest.mark.parametrize("error", [CommandTimeout, Unanswered])
@pytest.mark.parametrize("unflushed", [True, False])
def test_a_write_with_fua_that_was_aborted_may_have_brought_the_only_report(
    bench: Bench, unflushed: bool, error: type[CommandTimeout]
) -> None:
    """Of what other writes have lost: without any, there is nothing to tell."""
    if unflushed:
        bench.write()
    writing = bench.begin(bench.disk.write(BLOCK, 512, fua=True))
    (slot,) = [slot for slot in bench.session.queue.tasks if slot.state >= SENT]
    bench.session.queue.end_aborted(slot, error("late"))
    bench.heard()
    bench.passed_by()
    if error is Unanswered:
        bench.end(writing)  # it was sent again
    else:
        with pytest.raises(CommandTimeout):
            next(writing)
    assert bench.disk.durability.losses.count == unflushed
    assert bench.flush_fails() is unflushed
    assert not bench.flush_fails()


@pytest.mark.parametrize("how", ["given up", "never sent", "by another initiator"])
def test_a_write_with_fua_that_ends_otherwise(bench: Bench, how: str) -> None:
    bench.write()
    queue = bench.session.queue
    if how == "never sent":
        queue.close_window()
    writing = bench.begin(bench.disk.write(BLOCK, 512, fua=True))
    (slot,) = [slot for slot in queue.tasks if slot.state >= QUEUED]
    if how == "given up":
        queue.end_aborted(slot, CommandTimeout("late"))
        writing.close()
    elif how == "never sent":
        queue.end_aborted(slot, CommandTimeout("late"))
        with pytest.raises(CommandTimeout):
            next(writing)
    else:
        bench.peer.respond(bench.heard()[-1], status=TASK_ABORTED)
        bench.session.progress(1.0)
        bench.passed_by()
        bench.end(writing)  # it was sent again
    assert bench.disk.durability.losses.count == (how == "given up")


def test_a_flush_of_a_write_is_sent_again_where_it_was_aborted_behind_a_loss(bench: Bench) -> None:
    """The loss is that of another write, which a flush of its client tells of. The write itself is
    carried out again."""
    bench.disk.info = replace(bench.disk.info, fua=False)
    bench.write()
    bench.run(bench.disk.write(BLOCK, 512, fua=True), b"", ABORTED)
    assert [heard.operation for heard in bench.peer.heard] == [
        WRITE,
        WRITE,
        SYNC,
        SYNC,
        WRITE,
        SYNC,
    ]
    assert bench.flush_fails()
    assert not bench.flush_fails()


def test_flush_that_another_initiator_has_aborted_is_sent_again(bench: Bench) -> None:
    """Its LOGICAL UNIT RESET is no failure of the target's own."""
    bench.write()
    flushing = bench.begin(bench.disk.flush())
    bench.peer.respond(bench.heard()[0], status=TASK_ABORTED)
    bench.session.progress(1.0)
    assert isinstance(next(flushing), float)
    bench.passed_by()
    bench.end(flushing)
    assert bench.disk.durability.losses.count == 0
    assert [heard.operation for heard in bench.peer.heard] == [WRITE, SYNC, SYNC]


@pytest.mark.logs(logs.LOST_POWER)
def test_flush_that_ended_without_a_status_may_have_brought_the_only_report(bench: Bench) -> None:
    """What it was to cover is sent again before it is."""
    bench.disk.keep_journal(1 << 20)
    bench.write()
    flushing = bench.begin(bench.disk.flush())
    (slot,) = [slot for slot in bench.session.queue.tasks if slot.state >= SENT]
    bench.session.queue.end_aborted(slot, ScsiError("ended without a status", TASK_ABORTED))
    assert isinstance(next(flushing), float)
    assert bench.disk.durability.doubted and not bench.disk.durability.losses.count


def test_flush_that_a_reset_of_our_own_has_ended_is_as_one_that_was_aborted(bench: Bench) -> None:
    """The target left another command unanswered, and its abort. The flush may have been told what
    could not be written, and nobody has heard it."""
    bench.write()
    flushing = bench.begin(bench.disk.flush())
    queue = bench.session.queue
    (slot,) = [slot for slot in queue.tasks if slot.state >= SENT]
    queue.end_aborted(slot, EndedByReset("ended by a LUN reset", TASK_ABORTED))
    with pytest.raises(EndedByReset) as raised:
        next(flushing)
    assert raised.value.losses == bench.disk.durability.losses.count == 1


def test_write_with_fua_that_a_reset_of_our_own_has_ended(bench: Bench) -> None:
    bench.write()
    writing = bench.begin(bench.disk.write(BLOCK, 512, fua=True))
    queue = bench.session.queue
    (slot,) = [slot for slot in queue.tasks if slot.state >= SENT]
    queue.end_aborted(slot, EndedByReset("ended by a LUN reset", TASK_ABORTED))
    bench.heard()
    bench.passed_by()
    bench.end(writing)  # it was sent again
    assert bench.flush_fails()


def test_flush_that_is_aborted_in_a_reset_tells_of_what_that_lost(bench: Bench) -> None:
    """It says what was lost, and not that there is another initiator."""
    bench.write()
    flushing = bench.begin(bench.disk.flush())
    bench.disk.durability.losses.add()
    bench.peer.respond(bench.heard()[0], status=TASK_ABORTED)
    bench.session.progress(1.0)
    assert isinstance(next(flushing), float)
    bench.passed_by()
    with pytest.raises(WritesLost, match="were lost"):
        bench.end(flushing)
    assert [heard.operation for heard in bench.peer.heard] == [WRITE, SYNC, SYNC]


def test_no_cache_nothing_to_lose() -> None:
    bench = Bench(write_cache=False)
    bench.write()
    bench.read(POWER_ON)
    assert not bench.flush_fails()
    assert SYNC not in {heard.operation for heard in bench.peer.heard}


def test_cache_that_is_switched_on_later() -> None:
    """From then on ``flush`` sends SYNCHRONIZE CACHE."""
    bench = Bench(write_cache=False)
    bench.read(MODES_CHANGED)
    bench.write()
    bench.run(bench.disk.flush())
    assert bench.peer.heard[-1].operation == SYNC


def test_what_was_written_before_the_lun_became_read_only_is_flushed(bench: Bench) -> None:
    bench.write()
    bench.disk.info = replace(bench.disk.info, read_only=True)
    bench.run(bench.disk.flush())
    assert bench.peer.heard[-1].operation == SYNC
    heard = len(bench.peer.heard)
    bench.run(bench.disk.flush())
    assert len(bench.peer.heard) == heard


def test_power_loss_that_another_command_reports_while_a_flush_is_under_way(bench: Bench) -> None:
    """The cache is empty then, so SYNCHRONIZE CACHE succeeds all the same."""
    bench.write()
    reading = bench.begin(bench.disk.read(memoryview(bytearray(512)), 0))
    flushing = bench.begin(bench.disk.flush())
    bench.answer(POWER_ON, b"")
    with pytest.raises(IserblkError, match="lost"):
        next(flushing)
    bench.end(reading)
    assert not bench.flush_fails()


def test_every_flush_that_a_loss_spoils_fails(bench: Bench) -> None:
    bench.write()
    reading = bench.begin(bench.disk.read(memoryview(bytearray(512)), 0))
    flushes = [bench.begin(bench.disk.flush()) for _ in range(2)]
    bench.answer(POWER_ON, b"", b"")
    assert isinstance(next(flushes[0]), float)  # until the other has been heard, too
    for flushing in reversed(flushes):
        with pytest.raises(IserblkError, match="lost"):
            next(flushing)
    bench.end(reading)


def test_power_loss_right_behind_a_write(bench: Bench) -> None:
    """Both answers come at once: the write has not even been returned when the loss is heard."""
    writing = bench.begin(bench.disk.write(BLOCK, 0))
    reading = bench.begin(bench.disk.read(memoryview(bytearray(512)), 0))
    bench.answer(b"", POWER_ON)
    bench.end(reading)
    bench.end(writing)
    assert bench.flush_fails()


@pytest.mark.parametrize("what", ["trim", "zero", "part", "fast"])
def test_everything_that_changes_the_medium_counts(bench: Bench, what: str) -> None:
    disk = bench.disk
    if what == "trim":
        bench.run(disk.trim(0, 4096))
    elif what == "zero":
        bench.run(disk.zero(0, 4096, False, False, False))
    elif what == "part":
        bench.run(disk.write(BLOCK[:100], 7))
    else:
        waiter = CountingWaiter()
        slot = disk.begin_write(BLOCK, 0, waiter)
        assert slot is not None
        bench.answer(b"")
        assert waiter.pending == 0 and not disk.ended_write(slot)
    bench.read(POWER_ON)
    assert bench.flush_fails()


def test_write_with_fua_needs_no_flush(bench: Bench) -> None:
    bench.run(bench.disk.write(BLOCK, 0, fua=True))
    bench.read(POWER_ON)
    assert not bench.flush_fails()


def test_flush_that_failed_or_was_given_up_has_flushed_nothing(bench: Bench) -> None:
    bench.write()
    flushing = bench.begin(bench.disk.flush())
    bench.answer(MEDIUM_ERROR)
    with pytest.raises(ScsiError):
        next(flushing)
    bench.read(POWER_ON)
    assert bench.flush_fails()
    bench.write()
    flushing = bench.begin(bench.disk.flush())
    bench.answer(b"")
    flushing.close()  # it was cancelled, and the driver has waited for its command
    bench.read(POWER_ON)
    assert bench.flush_fails()


@pytest.mark.plain("a method of the compiled form cannot be replaced")
def test_a_flush_that_fails_is_never_seen_to_have_flushed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread may ask at any moment: the one that ends nbdkit does."""
    disk, seen = bench.disk, list[bool]()
    disk.keep_journal(1 << 20)
    bench.run(disk.write(BLOCK, 0))
    token = disk.durability.begin_flush()
    look = lambda *_: seen.append(disk.durability.unflushed)  # noqa: E731
    monkeypatch.setattr(MemoryJournal, "not_flushed", look)
    disk.durability.end_flush(token, done=False)
    assert seen == [True] and disk.durability.unflushed


def test_deferred_error_executes_its_command_again(bench: Bench) -> None:
    bench.run(bench.disk.write(BLOCK, 0), DEFERRED)
    assert [heard.operation for heard in bench.heard()] == []
    # The third behind the loss, as a write that the target has carried out may be part of it.
    assert [heard.operation for heard in bench.peer.heard] == [WRITE, WRITE, WRITE]


def test_a_write_that_a_flush_overtook_is_repeated(bench: Bench) -> None:
    """The target has the data in its cache, cannot write that, and says so before it answers the
    write: its client has been told before the write is acknowledged."""
    bench.write()
    writing = bench.begin(bench.disk.write(BLOCK, 512))
    waiter = CountingWaiter()
    slot = bench.disk.begin_write(BLOCK, 1024, waiter)
    assert slot is not None
    flushing = bench.begin(bench.disk.flush())
    bench.answer(b"", b"", MEDIUM_ERROR)
    with pytest.raises(ScsiError):
        while True:
            next(flushing)
    assert bench.disk.ended_write(slot) is not None  # to be written again
    bench.end(writing)
    assert [heard.operation for heard in bench.peer.heard] == [WRITE] * 3 + [SYNC, WRITE]
    slot = bench.disk.begin_write(BLOCK, 1024, waiter)
    assert slot is not None
    bench.answer(b"")
    assert not bench.disk.ended_write(slot)
    assert not bench.flush_fails()


def test_a_write_behind_a_loss_keeps_its_buffer(bench: Bench) -> None:
    """It is needed for the write once more."""
    bench.disk.keep_journal(1 << 20)
    buffer = bytearray(BLOCK)
    slot = bench.disk.begin_write(memoryview(buffer), 0, CountingWaiter())
    assert slot is not None
    bench.answer(b"")
    bench.disk.durability.losses.add()
    assert bench.disk.take_over(slot, buffer) is None
    assert bench.disk.ended_write(slot) is not None


def _several(bench: Bench, zeroes: bool) -> Operation[None]:
    """A change of several commands, one after the other: its ends are parts of blocks."""
    if zeroes:
        return bench.disk.zero(256, 1024, may_trim=False, fast=False, fua=False)
    return bench.disk.write(memoryview(bytes(1024)), 256)


def _lose_behind_the_first(bench: Bench, change: Operation[None], when: float = 2.0) -> None:
    bench.answer(b"")
    next(change)
    bench.disk.durability.reinstated(when)


@pytest.mark.parametrize("zeroes", [False, True])
def test_a_change_of_several_commands_is_repeated_behind_a_loss(bench: Bench, zeroes: bool) -> None:
    """The loss was that of its first command, too. It is told before the change ends: the next
    flush succeeds, and is to cover all of the change."""
    bench.run(_several(bench, zeroes))
    bench.run(bench.disk.flush())
    first = bench.peer.heard[0].operation
    once = [each.operation for each in bench.peer.heard].count(first)
    change = bench.begin(_several(bench, zeroes))
    _lose_behind_the_first(bench, change)
    assert bench.flush_fails()
    bench.end(change)
    assert [each.operation for each in bench.peer.heard].count(first) >= 3 * once
    assert not bench.flush_fails()


def test_a_change_that_meets_a_loss_again_is_repeated_again(bench: Bench) -> None:
    change = bench.begin(_several(bench, False))
    _lose_behind_the_first(bench, change)
    assert bench.flush_fails()
    heard = len(bench.peer.heard)
    while [each.operation for each in bench.peer.heard[heard:]].count(WRITE) < 3:
        bench.answer(*[b""] * bool(bench.heard()))
        next(change)  # until it has begun again, with its first command
    _lose_behind_the_first(bench, change, 3.0)
    bench.end(change)
    assert [each.operation for each in bench.peer.heard].count(WRITE) == 3 * 3
    assert bench.flush_fails()
    assert not bench.flush_fails()


def test_command_that_missed_its_deadline_is_not_sent_again(bench: Bench) -> None:
    """One deadline per request: the caller has waited long enough."""
    waiter = CountingWaiter()
    slot = bench.disk.begin_read(memoryview(bytearray(512)), 0, waiter)
    assert isinstance(slot, TaskSlot)
    bench.session.queue.end_aborted(slot, CommandTimeout("late"))
    with pytest.raises(CommandTimeout):
        bench.disk.ended(slot)
    assert bench.session.queue.busy == 0 and slot.error is None


def test_flush_that_was_held_back_until_its_deadline_has_brought_no_report(
    clock: Clock, bench: Bench
) -> None:
    bench.write()
    flushing = bench.begin(bench.disk.flush(deadline=clock.now + 1.0))
    (slot,) = [slot for slot in bench.session.queue.tasks if slot.state >= SENT]
    clock.now = slot.deadline
    bench.session.queue.end_aborted(slot, InDoubt("held back"))
    with pytest.raises(InDoubt):
        next(flushing)
    assert bench.disk.durability.losses.count == 0


@pytest.mark.parametrize("cancelled", [False, True])
@pytest.mark.parametrize("waits_for", ["a slot", "the window"])
def test_flush_that_was_never_sent_has_brought_no_report(
    bench: Bench, waits_for: str, cancelled: bool
) -> None:
    """Its deadline has come, or its client is gone: what was written before is not lost by that."""
    queue = bench.session.queue
    bench.write()
    if waits_for == "a slot":
        taken = [slot for slot in iter(queue.take_now, None)]
        flushing = bench.begin(bench.disk.flush(deadline=0.001))  # long over
    else:
        taken = []
        queue.close_window()
        flushing = bench.begin(bench.disk.flush())
    assert bench.heard() == []
    for slot in queue.tasks:
        if slot.state == QUEUED:
            queue.end_aborted(slot, CommandTimeout("late"))
    queue.wake_takers()
    if cancelled:
        flushing.close()
    else:
        with pytest.raises(CommandTimeout):
            next(flushing)
    assert bench.disk.durability.losses.count == 0 and bench.disk.durability.unflushed
    for slot in taken:
        queue.release(slot)


@pytest.mark.parametrize("cancelled", [False, True])
def test_flush_that_was_sent_and_aborted_may_have_brought_a_report(
    bench: Bench, cancelled: bool
) -> None:
    bench.write()
    flushing = bench.begin(bench.disk.flush())
    (slot,) = [slot for slot in bench.session.queue.tasks if slot.state >= SENT]
    bench.session.queue.end_aborted(slot, CommandTimeout("late"))
    if cancelled:
        flushing.close()
    else:
        with pytest.raises(CommandTimeout):
            next(flushing)
    assert bench.disk.durability.losses.count == 1
