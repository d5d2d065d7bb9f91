"""Nothing is unflushed when a session leaves its connection as planned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from time import monotonic

import pytest

from iserblk.commands.command import Operation
from iserblk.commands.session import CommandSession
from iserblk.disk.lun.geometry import Geometry
from iserblk.disk.lun.operations import DiskCore
from iserblk.disk.lun.passthrough import send
from iserblk.disk.seam import LunInfo
from iserblk.disk.settling import settle
from iserblk.errors import CommandTimeout, NoSuchLun, ScsiError
from iserblk.scsi import opcodes
from iserblk.scsi.luns import encode
from tests.disk import fake_target
from tests.disk.fake_target import BLOCK, MEDIUM_ERROR, FakeSession, FakeTarget
from tests.initiator.fake import CountingWaiter
from tests.support import logs

pytestmark = pytest.mark.logs(logs.LOST_WRITES)

SYNC = opcodes.SYNCHRONIZE_CACHE_16
ONE = memoryview(b"\1" * BLOCK)


class Bench:
    def __init__(self) -> None:
        self.session = FakeSession()
        self.target = FakeTarget(8)
        self.core = fake_target.disk(self.session, 8)
        self.left: list[bool] = []  # whether something was unflushed then

    def another_core(self) -> DiskCore:
        info = replace(self.core.info, lun=1, name="lun1")
        return DiskCore(self.session, encode(1), info, self.core.geometry)  # type: ignore[arg-type]

    def leave(self) -> None:
        self.left.append(self.core.durability.unflushed)

    def settle(self, deadline: float = 0.0) -> None:
        steps = settle([self.core], deadline or monotonic() + 30, self.leave)
        fake_target.run(steps, self.session, self.target)


def test_what_is_unflushed_is_flushed_before_it_leaves() -> None:
    bench = Bench()
    fake_target.run(bench.core.write(ONE, 0), bench.session, bench.target)
    bench.settle()
    assert bench.left == [False] and bench.target.executed[-1] == SYNC
    bench.settle()
    assert bench.left == [False, False] and bench.target.executed.count(SYNC) == 1


BEGINNINGS: list[Callable[[Bench], object]] = [
    lambda bench: bench.core.write(ONE, BLOCK),
    lambda bench: bench.core.write(ONE, BLOCK, fua=True),
    lambda bench: bench.core.write(ONE[:10], 5),
    lambda bench: bench.core.trim(0, BLOCK),
    lambda bench: bench.core.zero(0, BLOCK, False, False, False),
    lambda bench: send(bench.core, bytes([opcodes.FORMAT_UNIT, 0, 0, 0, 0, 0]), None, None, None),
]


@pytest.mark.parametrize("begin", BEGINNINGS)
def test_no_change_is_begun_meanwhile(begin: Callable[[Bench], object]) -> None:
    bench = Bench()
    first = bench.core.begin_write(ONE, 0, CountingWaiter())
    assert first is not None
    leaving = settle([bench.core], monotonic() + 30, bench.leave)
    assert isinstance(next(leaving), float)  # until the write has ended
    assert bench.core.begin_write(ONE, BLOCK, CountingWaiter()) is None
    other = begin(bench)
    assert isinstance(next(other), float)  # type: ignore[call-overload]
    bench.target.execute(first)
    bench.session.end(first)
    assert bench.core.ended_write(first) is None
    fake_target.run(leaving, bench.session, bench.target)
    assert bench.left == [False] and not bench.target.cached
    other.close()  # type: ignore[attr-defined]
    again = bench.core.begin_write(ONE, BLOCK, CountingWaiter())
    assert again is not None
    bench.session.end(again)
    bench.core.dropped(again)


def test_reads_go_on_meanwhile() -> None:
    bench = Bench()
    bench.core.pause_changes(True)
    slot = bench.core.begin_read(memoryview(bytearray(BLOCK)), 0, CountingWaiter())
    assert slot is not None
    bench.session.end(slot)
    bench.core.dropped(slot)


def test_flush_that_fails_leaves_nothing_paused() -> None:
    bench = Bench()
    fake_target.run(bench.core.write(ONE, 0), bench.session, bench.target)
    leaving = settle([bench.core], monotonic() + 30, bench.leave)
    next(leaving)
    bench.session.end(bench.session.flight[0], sense=MEDIUM_ERROR)
    with pytest.raises(ScsiError):
        next(leaving)
    assert not bench.left
    fake_target.run(bench.core.write(ONE, 0), bench.session, bench.target)


def test_change_that_takes_too_long() -> None:
    bench = Bench()
    slot = bench.core.begin_write(ONE, 0, CountingWaiter())
    assert slot is not None
    with pytest.raises(CommandTimeout):
        bench.settle(deadline=monotonic() - 1)
    assert not bench.left
    bench.session.end(slot)
    bench.core.dropped(slot)


def test_limits_that_change_meanwhile_do_not_let_writes_begin() -> None:
    bench = Bench()
    bench.core.pause_changes(True)
    bench.core.narrow()
    assert bench.core.begin_write(ONE, 0, CountingWaiter()) is None
    bench.core.pause_changes(False)
    slot = bench.core.begin_write(ONE, 0, CountingWaiter())
    assert slot is not None
    bench.session.end(slot)
    bench.core.dropped(slot)


def test_no_lun_is_unflushed_when_the_last_one_is_flushed() -> None:
    """A change that was begun before the pause may wait for a range, and end while the next LUN is
    flushed."""
    bench = Bench()
    session, target, core, other = bench.session, bench.target, bench.core, bench.another_core()
    assert core.ranges.lock(0, 0, CountingWaiter())
    late = core.write(ONE[:10], 5)
    waits = next(late)
    assert not isinstance(waits, float)
    slot = other.begin_write(ONE, BLOCK, CountingWaiter())
    assert slot is not None
    leaving = settle(
        [core, other],
        monotonic() + 30,
        lambda: bench.left.append(core.durability.unflushed or other.durability.unflushed),
    )
    assert isinstance(next(leaving), float)
    core.ranges.unlock(0, 0)
    target.answer(session, slot)
    assert other.ended_write(slot) is None
    fake_target.run(late, session, target)
    fake_target.run(leaving, session, target)
    assert bench.left == [False]


def test_one_lun_that_cannot_be_flushed_does_not_keep_the_others_unflushed() -> None:
    bench = Bench()
    session, target, core, other = bench.session, bench.target, bench.core, bench.another_core()
    for each in (core, other):
        fake_target.run(each.write(ONE, 0), session, target)
    leaving = settle([core, other], monotonic() + 30, bench.leave)
    next(leaving)
    session.end(session.flight[0], sense=MEDIUM_ERROR)
    with pytest.raises(ScsiError):
        fake_target.run(leaving, session, target)
    assert not bench.left and core.durability.unflushed and not other.durability.unflushed


def test_a_lun_that_is_gone_keeps_no_other_from_leaving() -> None:
    bench = Bench()
    session, target, core, other = bench.session, bench.target, bench.core, bench.another_core()
    for each in (core, other):
        fake_target.run(each.write(ONE, 0), session, target)

    def look(_session: CommandSession) -> Operation[tuple[LunInfo, Geometry]]:
        yield 0.0
        raise NoSuchLun("lun0: the target has no LUN 0")

    core.look = look
    core.identity.suspect("it may be gone")
    with pytest.raises(NoSuchLun):
        bench.settle()
    fake_target.run(settle([core, other], monotonic() + 30, bench.leave), session, target)
    assert bench.left == [True] and not other.durability.unflushed
