"""The range lock of sub-block writes."""

from __future__ import annotations

from iserblk.commands.command import FREE, QUEUED, TAKEN, Command, PlainCommand
from iserblk.disk.ranges import RangeLock
from tests.initiator.fake import CountingWaiter

LUN = bytes(8)


def lock_and_slots() -> tuple[RangeLock, list[PlainCommand]]:
    slots = [PlainCommand(index) for index in range(4)]
    return RangeLock(slots, LUN), slots


def begin(slot: Command) -> Command:
    slot.state = TAKEN
    return slot


def test_locked_blocks_cannot_be_claimed() -> None:
    lock, slots = lock_and_slots()
    waiter = CountingWaiter()
    assert lock.lock(10, 12, waiter)
    for first, last in ((10, 10), (12, 20), (0, 10), (11, 11), (0, 99)):
        assert not lock.claim(begin(slots[0]), first, last, None)
    assert lock.claim(slots[0], 13, 20, None) and lock.claim(slots[1], 0, 9, None)
    assert waiter.pending == 0


def test_who_is_refused_hears_of_the_unlock() -> None:
    lock, slots = lock_and_slots()
    waiter = CountingWaiter()
    assert lock.lock(5, 5, CountingWaiter())
    assert not lock.claim(begin(slots[0]), 5, 6, waiter) and waiter.pending == 1
    second = CountingWaiter()
    assert not lock.lock(5, 9, second) and second.pending == 1
    lock.unlock(5, 5)
    assert waiter.woken == second.woken == 1
    assert lock.claim(slots[0], 5, 6, waiter)


def test_quiet_waits_for_writes_under_way() -> None:
    lock, slots = lock_and_slots()
    waiter = CountingWaiter()
    assert lock.claim(begin(slots[0]), 3, 7, None)
    assert lock.claim(begin(slots[1]), 20, 21, None)
    assert lock.lock(7, 7, waiter)
    assert not lock.quiet(7, 7, waiter) and waiter.pending == 1
    slots[0].state = FREE
    slots[0].last = -1
    lock.changed()
    assert waiter.woken == 1
    assert lock.quiet(7, 7, waiter) and waiter.pending == 0


def test_writes_to_other_luns_do_not_count() -> None:
    slots = [PlainCommand(0)]
    ours, theirs = RangeLock(slots, LUN), RangeLock(slots, b"\0\1" + bytes(6))
    assert theirs.claim(begin(slots[0]), 0, 100, None)
    assert ours.quiet(0, 100, CountingWaiter())


def test_nobody_waits_nobody_is_woken() -> None:
    lock, slots = lock_and_slots()
    waiter = CountingWaiter()
    assert lock.lock(1, 1, waiter)
    assert not lock.claim(begin(slots[0]), 1, 1, None)
    lock.unlock(1, 1)
    assert waiter.woken == 0


def test_changes_of_other_luns_are_not_its_own() -> None:
    """A session has one list of commands for all of its LUNs."""
    lock, slots = lock_and_slots()
    other = RangeLock(slots, bytes(7) + b"\1")
    assert other.claim(begin(slots[0]), 0, 9, None)
    slots[0].state = QUEUED
    assert other.queued() == [slots[0]] and lock.queued() == []
    assert other.changing(None) and not lock.changing(None)
    assert not lock.changing_outside(lambda _slot: False)
