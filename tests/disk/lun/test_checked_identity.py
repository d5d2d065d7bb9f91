"""Reports after which another LUN may have the number: what is held back, compared, and let go."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from iserblk.commands.command import Operation, Waiter
from iserblk.commands.session import CommandSession
from iserblk.disk.lun.geometry import Geometry
from iserblk.disk.lun.operations import DiskCore
from iserblk.disk.seam import LunInfo
from iserblk.errors import CommandTimeout, IserblkError, LunChanged, NoSuchLun, NotSupported
from iserblk.scsi import luns, opcodes
from iserblk.scsi.sense import ILLEGAL_REQUEST, UNIT_ATTENTION, encode_descriptor, encode_fixed
from tests.initiator.fake import CountingWaiter, FakeDriver
from tests.initiator.peer import Heard, disk_of, linked

WRITE, READ, SYNC = opcodes.WRITE_16, opcodes.READ_16, opcodes.SYNCHRONIZE_CACHE_16
BLOCK = memoryview(bytes(512))
GONE = encode_fixed(ILLEGAL_REQUEST, 0x25, 0x00)
LIST_CHANGED = encode_fixed(UNIT_ATTENTION, 0x3F, 0x0E)
REPORTS = [
    (UNIT_ATTENTION, 0x29, 0x00),
    (UNIT_ATTENTION, 0x29, 0x03),
    (UNIT_ATTENTION, 0x29, 0x07),
    (UNIT_ATTENTION, 0x2A, 0x09),
    (UNIT_ATTENTION, 0x3F, 0x03),
    (UNIT_ATTENTION, 0x3F, 0x05),
    (UNIT_ATTENTION, 0x3F, 0x0E),
]
OTHERS = [
    (UNIT_ATTENTION, 0x2A, 0x01),
    (UNIT_ATTENTION, 0x2A, 0x03),
    (UNIT_ATTENTION, 0x38, 0x07),
    (ILLEGAL_REQUEST, 0x24, 0x00),
    (ILLEGAL_REQUEST, 0x26, 0x00),
]


class Looking:
    """One LUN's answers to the question what it is. ``answers``: what each look brings; the last
    one counts for all that follow. ``waits``: a look under way, which the test lets go."""

    def __init__(self, core: DiskCore) -> None:
        self.core = core
        self.answers: list[LunInfo | IserblkError] = [
            replace(core.info, serial="S1", identifiers=("naa.5000c500aabb0001",))
        ]
        self.count = 0
        self.waits: list[CountingWaiter] = []
        self.core.renew(self.same, core.geometry)
        core.look = self._look

    @property
    def same(self) -> LunInfo:
        return replace(self.core.info, serial="S1", identifiers=("naa.5000c500aabb0001",))

    @property
    def another(self) -> LunInfo:
        return replace(self.core.info, serial="S2", identifiers=("naa.5000c500aabb0002",))

    def _look(self, _session: CommandSession) -> Operation[tuple[LunInfo, Geometry]]:
        self.count += 1
        waiter = CountingWaiter()
        waiter.pending = 1
        self.waits.append(waiter)
        while waiter.pending:
            yield waiter
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, IserblkError):
            raise answer
        return answer, self.core.geometry

    def answer(self) -> None:
        self.waits.pop(0).task_done()


class Running:
    """An operation that advances as far as it can."""

    def __init__(self, operation: Operation[Any]) -> None:
        self.operation = operation
        self._waits: Waiter | None = None
        self.ended = False
        self.error: IserblkError | None = None
        self.go_on()

    def go_on(self) -> None:
        try:
            while not self.ended and (self._waits is None or not self._waits.pending):
                step = next(self.operation)
                self._waits = None if isinstance(step, float) else step
        except StopIteration:
            self.ended = True
        except IserblkError as error:
            self.ended, self.error = True, error


class Bench:
    """A disk whose target the test plays; LUN 1 is another one of its session."""

    def __init__(self, window: int = 1 << 16) -> None:
        self.session, self.peer = linked(depth=8, window=window)
        self.session.drive(FakeDriver(self.session))
        self.disk = disk_of(self.session, write_cache=False)
        self.looking = Looking(self.disk)
        self._answered = 0
        self._next = 0

    def waiting(self) -> list[Heard]:
        """What the target has heard, and not answered."""
        self.peer.poll()
        return self.peer.heard[self._answered :]

    @property
    def heard(self) -> list[int]:
        return [each.operation for each in self.waiting()]

    def answer(self, sense: bytes = b"", window: int = 1 << 20) -> None:
        """The oldest one ends; without ``sense``, well."""
        heard = self.waiting()[0]
        status = 2 if sense else 0
        self.peer.respond(heard, status=status, sense=sense, max_cmd_sn=window)
        self._answered += 1
        self.session.progress(1.0)

    def write(self) -> Running:
        """Of a block of its own."""
        self._next += 512
        return Running(self.disk.write(BLOCK, self._next))

    def read(self) -> Running:
        return Running(self.disk.read(memoryview(bytearray(512)), 0))


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.session.fail(IserblkError("end of test"))
    made.peer.close()


@pytest.mark.parametrize("encode", [encode_fixed, encode_descriptor])
@pytest.mark.parametrize("report", REPORTS, ids=str)
def test_nothing_is_sent_before_it_was_compared(
    bench: Bench, report: tuple[int, int, int], encode: Any
) -> None:
    one = bench.write()
    bench.answer(encode(*report))
    one.go_on()
    others = [bench.write(), bench.read(), Running(bench.disk.trim(1 << 16, 512))]
    assert bench.heard == [] and bench.looking.count == 1
    assert not any(each.ended for each in (one, *others))
    bench.looking.answer()
    one.go_on()
    assert bench.heard == [WRITE], "it was not carried out"
    bench.answer()
    for each in (one, *others):
        each.go_on()
        while bench.heard:
            bench.answer()
            each.go_on()
        assert each.ended and each.error is None
    assert bench.looking.count == 1, "once for all of them"


@pytest.mark.parametrize("report", OTHERS, ids=str)
def test_other_reports_are_about_the_same_lun(bench: Bench, report: tuple[int, int, int]) -> None:
    one = bench.write()
    bench.answer(encode_fixed(*report))
    one.go_on()
    if not one.ended:
        assert bench.heard == [WRITE]
    assert bench.looking.count == 0 and not bench.disk.identity.in_doubt


@pytest.mark.logs("another LUN is there now")
@pytest.mark.parametrize("report", [LIST_CHANGED, GONE])
def test_nothing_is_sent_to_another_lun(bench: Bench, report: bytes) -> None:
    """Neither then nor later, and it is looked at once."""
    bench.disk.durability.turn_volatile()
    bench.looking.answers = [bench.looking.another]
    one = bench.write()
    bench.answer(report)
    one.go_on()
    assert isinstance(one.error, NoSuchLun) is (report is GONE)
    begun = [bench.write(), bench.read(), Running(bench.disk.flush())]
    bench.looking.answer()
    later = [bench.write(), Running(bench.disk.zero(0, 4096, False, False, False))]
    for each in (one, *begun, *later):
        each.go_on()
    for each in begun + later:
        assert isinstance(each.error, LunChanged) and "S2" in str(each.error)
    assert bench.heard == [] and bench.looking.count == 1
    assert bench.disk.identity.is_another and not bench.disk.identity.gone


@pytest.mark.logs("is a tape")
def test_it_is_no_disk_any_more(bench: Bench) -> None:
    bench.looking.answers = [NotSupported("lun0: it is a tape")]
    one = bench.write()
    bench.answer(LIST_CHANGED)
    one.go_on()
    bench.looking.answer()
    one.go_on()
    assert isinstance(one.error, LunChanged) and "it is a tape" in str(one.error)
    assert bench.heard == []


def test_it_is_gone_and_comes_back(bench: Bench) -> None:
    """A write that has failed is not repeated; each later one is refused with a look."""
    gone, same = NoSuchLun("lun0: the target has no LUN 0"), bench.looking.same
    bench.looking.answers = [gone, gone, same]
    lost = bench.write()
    bench.answer(GONE)
    lost.go_on()
    assert isinstance(lost.error, NoSuchLun)
    for _ in range(2):
        one = bench.write()
        bench.looking.answer()
        one.go_on()
        assert isinstance(one.error, NoSuchLun) and bench.disk.identity.gone
        assert bench.heard == []
    back = bench.write()
    bench.looking.answer()
    back.go_on()
    assert bench.heard == [WRITE] and not bench.disk.identity.gone
    bench.answer()
    back.go_on()
    assert back.ended and back.error is None


def test_a_look_that_fails_is_repeated_by_the_next_request(bench: Bench) -> None:
    bench.looking.answers = [CommandTimeout("lun0: no answer"), bench.looking.same]
    one = bench.write()
    bench.answer(LIST_CHANGED)
    one.go_on()
    bench.looking.answer()
    one.go_on()
    assert isinstance(one.error, CommandTimeout) and bench.heard == []
    two = bench.write()
    assert bench.heard == []
    bench.looking.answer()
    two.go_on()
    assert bench.heard == [WRITE]


def test_an_operation_that_is_given_up_while_it_looks(bench: Bench) -> None:
    one = bench.write()
    bench.answer(LIST_CHANGED)
    one.go_on()
    two = bench.write()
    one.operation.close()
    bench.looking.waits.clear()
    two.go_on()  # another one looks
    assert bench.looking.count == 2
    bench.looking.answer()
    two.go_on()
    assert bench.heard == [WRITE]


def test_a_report_during_the_look_has_it_looked_at_again(bench: Bench) -> None:
    """The first command of a look takes away what the target had to report; what it has said
    before does not count."""
    one = bench.write()
    two = bench.write()
    bench.answer(LIST_CHANGED)
    one.go_on()
    bench.answer(LIST_CHANGED)
    bench.looking.answer()
    one.go_on()
    assert bench.looking.count == 2 and bench.heard == []
    bench.looking.answer()
    one.go_on()
    two.go_on()
    assert bench.heard == [WRITE, WRITE]


def test_one_that_changes_at_each_look(bench: Bench) -> None:
    one = bench.write()
    bench.answer(LIST_CHANGED)
    one.go_on()
    while not one.ended:
        bench.disk.identity.suspect("it has changed")
        bench.looking.answer()
        one.go_on()
    assert "has changed each time" in str(one.error) and bench.heard == []
    assert bench.looking.count == 10


def test_what_was_queued_is_held_back_too(bench: Bench) -> None:
    """Commands that wait for the target's window; and those that are begun without an operation."""
    bench = Bench(window=2)
    running = [bench.write() for _ in range(4)]
    waiter = CountingWaiter()
    slot = bench.disk.begin_read(memoryview(bytearray(512)), 512, waiter)
    assert slot is not None
    sent = len(bench.heard)
    bench.answer(LIST_CHANGED)  # which opens the window, too
    assert len(bench.waiting()) == sent - 1
    assert not waiter.pending, "the read is over"
    assert bench.disk.ended(slot) is not None
    bench.session.fail(IserblkError("end of test"))
    for each in running:
        each.go_on()
    bench.peer.close()


def test_what_was_being_read_is_read_again(bench: Bench) -> None:
    """It may have come from the other LUN."""
    one, two = bench.read(), bench.read()
    bench.answer(LIST_CHANGED)
    one.go_on()
    bench.answer()
    two.go_on()
    assert not two.ended and bench.heard == []
    bench.looking.answer()
    one.go_on()
    two.go_on()
    assert bench.heard == [READ, READ]


class Two(Bench):
    """With another LUN in the session."""

    def __init__(self) -> None:
        super().__init__()
        info = replace(self.disk.info, lun=1, name="lun1")
        self.other = DiskCore(self.session, luns.encode(1), info, self.disk.geometry)
        self.other_looking = Looking(self.other)


def test_all_luns_are_compared_when_the_list_has_changed() -> None:
    """A target may report that once only, by any LUN. Where each LUN reports it, there is no second
    round."""
    bench = Two()
    one = bench.write()
    bench.answer(LIST_CHANGED)
    one.go_on()
    other = Running(bench.other.write(BLOCK, 0))
    assert bench.heard == [] and bench.other_looking.count == 1
    bench.looking.answer()
    one.go_on()
    bench.answer()
    one.go_on()
    assert one.ended and not bench.disk.identity.in_doubt
    probe = Running(bench.other.refresh())  # it waits for the look, too
    slot = bench.session.queue.take_now()
    assert slot is not None
    slot.lun, slot.sense = bench.other.lun, LIST_CHANGED
    bench.session.listeners.hear(slot)  # its own report of the same change
    assert not bench.disk.identity.in_doubt
    bench.session.listeners.hear(slot)  # another change
    assert bench.disk.identity.in_doubt
    bench.session.queue.release(slot)
    bench.session.fail(IserblkError("end of test"))
    for each in (other, probe):
        each.go_on()
    bench.peer.close()


def test_other_luns_go_on_while_one_is_in_doubt() -> None:
    bench = Two()
    one = bench.write()
    bench.answer(encode_fixed(UNIT_ATTENTION, 0x3F, 0x05))
    one.go_on()
    other = Running(bench.other.write(BLOCK, 0))
    assert bench.heard == [WRITE]
    bench.answer()
    other.go_on()
    assert other.ended and other.error is None and not one.ended
    bench.session.fail(IserblkError("end of test"))
    one.go_on()
    bench.peer.close()


def test_a_deadline_holds_for_those_that_wait_for_the_look(bench: Bench) -> None:
    one = bench.write()
    bench.answer(LIST_CHANGED)
    one.go_on()
    two = Running(bench.disk.identity.reassure(0.5))  # long over
    assert isinstance(two.error, CommandTimeout)
    bench.looking.answer()
    one.go_on()
    assert bench.heard == [WRITE]


@pytest.mark.plain("replaces a method of a session")
def test_on_a_fresh_connection_a_report_counts_once_it_was_compared(bench: Bench) -> None:
    """The first command after a login brings 29/00 with many targets. Behind the comparison, while
    the journal is sent, it ends the attempt: the next one compares again."""
    fresh, far = linked(depth=4)
    fresh.drive(FakeDriver(fresh))
    bench.disk.listen_resuming(fresh)
    cut: list[bool] = []
    fresh.disconnect = lambda: cut.append(True)  # type: ignore[method-assign]
    slot = fresh.queue.take_now()
    assert slot is not None
    slot.lun, slot.sense = bench.disk.lun, encode_fixed(UNIT_ATTENTION, 0x29, 0x00)
    fresh.listeners.hear(slot)
    bench.disk.begin_check()
    fresh.listeners.hear(slot)
    assert not cut
    bench.disk.checked()
    fresh.listeners.hear(slot)
    assert cut == [True]
    bench.disk.begin_check()
    fresh.listeners.hear(slot)
    assert cut == [True]
    fresh.fail(IserblkError("end of test"))
    far.close()


def test_a_new_connection_ends_the_doubt(bench: Bench) -> None:
    bench.disk.identity.suspect("it may be another")
    assert bench.disk.identity.in_doubt
    bench.disk.begin_check()
    bench.disk.checked()
    one = bench.write()
    assert bench.heard == [WRITE] and not bench.disk.identity.in_doubt
    assert not one.ended


def test_what_was_held_back_ends_once_though_the_session_ends_meanwhile() -> None:
    """Another thread may end it; then the slot may have another command already."""
    bench = Bench(window=2)
    running = [bench.write() for _ in range(4)]
    waiter = CountingWaiter()
    slot = bench.disk.begin_read(memoryview(bytearray(512)), 512, waiter)
    assert slot is not None and waiter.pending == 1
    queue = bench.session.queue
    refused = queue.doubt(bench.disk.lun)
    assert slot in refused
    bench.session.fail(IserblkError("the end"))
    queue.refuse(refused)
    assert waiter.pending == 0
    with pytest.raises(IserblkError, match="the end"):
        bench.disk.ended(slot)
    for each in running:
        each.go_on()
        assert each.ended
    bench.peer.close()
