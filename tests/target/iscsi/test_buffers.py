"""Buffers of connections: exact lengths, used again, and bounded together."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from ctypes import addressof, c_ubyte
from pathlib import Path

import pytest

from iserblk.target.iscsi.buffers import (
    BESIDE,
    GUARANTEED,
    SET_ASIDE,
    TOTAL,
    BufferPool,
    DataBudget,
    size_of,
)

MIB = 1 << 20


@pytest.mark.parametrize("length", [1, 511, 4096, 4097, 65536, MIB, MIB + 1, 5 * MIB])
def test_a_buffer_has_the_length_that_was_asked_for(length: int) -> None:
    buffer = BufferPool(DataBudget()).take(length)
    assert len(buffer) == length and not buffer.readonly


@pytest.mark.parametrize(("length", "next_length"), [(5000, 8000), (MIB - 1, MIB), (MIB, MIB - 1)])
def test_memory_is_used_again(length: int, next_length: int) -> None:
    pool = BufferPool(DataBudget())
    buffer = pool.take(length)
    buffer[:5] = b"first"
    pool.give(buffer)
    again = pool.take(next_length)
    assert again.obj is buffer.obj and bytes(again[:5]) == b"first"
    assert len(again) == next_length and again.format == "B"


@pytest.mark.parametrize("length", [4096, MIB, 2 * MIB])
def test_two_buffers_never_share_memory(length: int) -> None:
    pool = BufferPool(DataBudget())
    buffers = [pool.take(length) for _ in range(5)]
    for number, buffer in enumerate(buffers):
        buffer[:] = bytes([number]) * length
    for number, buffer in enumerate(buffers):
        assert bytes(buffer) == bytes([number]) * length


@pytest.mark.parametrize("length", [64 << 10, MIB, 2 * MIB])
def test_no_more_than_16_mib_wait_to_be_used_again(length: int) -> None:
    pool = BufferPool(DataBudget())
    kept = 16 * MIB // length
    buffers = [pool.take(length) for _ in range(kept + 4)]
    for buffer in buffers:
        pool.give(buffer)
    before = {id(buffer.obj) for buffer in buffers}
    again = [pool.take(length) for _ in buffers]
    assert len(before & {id(buffer.obj) for buffer in again}) == kept


def test_a_buffer_outlives_its_pool_and_its_neighbours() -> None:
    pool = BufferPool(DataBudget())
    buffer = pool.take(MIB)
    pool.close()
    del pool
    gc.collect()
    buffer[:] = b"x" * MIB
    assert bytes(buffer) == b"x" * MIB


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the kernel has no huge pages"
)
@pytest.mark.parametrize("length", [MIB, 2 * MIB])
def test_large_buffers_fill_huge_pages(length: int) -> None:
    buffer = BufferPool(DataBudget()).take(length)
    start = addressof(c_ubyte.from_buffer(buffer))
    assert start % length == 0
    assert "hg" in flags_of_memory(start)  # madvise(MADV_HUGEPAGE)


def flags_of_memory(address: int) -> list[str]:
    """VmFlags of the mapping: proc(5)."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if first == "VmFlags:" and inside:
            return rest
        if "-" in first and not first.endswith(":"):
            low, high = (int(each, 16) for each in first.split("-"))
            inside = low <= address < high
    return []


def test_what_is_out_counts_in_the_pool_and_in_the_budget() -> None:
    budget = DataBudget()
    one, two = BufferPool(budget), BufferPool(budget)
    held = one.take(5000)  # 8 KiB of memory
    two.take(4096)
    assert (one.used, two.used, budget.used) == (8192, 4096, 12288)
    one.give(held)
    assert (one.used, budget.used) == (0, 4096)


def test_growing_keeps_what_is_filled() -> None:
    pool = BufferPool(DataBudget())
    small = pool.take(4096)
    small[:3] = b"abc"
    large = pool.grow(small, 3, 100_000)
    assert bytes(large[:3]) == b"abc" and len(large) == 100_000
    assert pool.used == 131072
    assert len(pool.grow(None, 0, 10)) == 10


def test_a_pool_that_is_closed_gives_all_back() -> None:
    budget = DataBudget(most=8192)
    pool = BufferPool(budget)
    pool.take(8192)
    assert not budget.fits(1)
    woken: list[str] = []
    budget.wait(lambda: woken.append("one"))
    pool.close()
    assert budget.used == pool.used == 0 and woken == ["one"] and budget.fits(8192)


def test_those_who_wait_are_woken_in_their_order_while_there_is_room() -> None:
    budget = DataBudget(most=8192)
    pool = BufferPool(budget)
    held = pool.take(8192)
    woken: list[str] = []

    def first() -> None:
        woken.append("first")
        pool.take(8192)  # and nothing is left

    budget.wait(first)
    budget.wait(lambda: woken.append("second"))
    pool.give(held)
    budget.wake()
    assert woken == ["first"] and len(budget.waiting) == 1


def test_one_that_was_forgotten_is_not_woken() -> None:
    budget = DataBudget()
    woken: list[str] = []
    wake = lambda: woken.append("gone")  # noqa: E731
    budget.wait(wake)
    budget.forget(wake)
    budget.forget(wake)
    budget.wake()
    assert woken == []


def test_waking_within_waking_is_no_circle() -> None:
    budget = DataBudget()
    woken: list[str] = []

    def one() -> None:
        woken.append("one")
        budget.wake()

    budget.wait(one)
    budget.wait(lambda: woken.append("two"))
    budget.wake()
    assert woken == ["one", "two"]


def test_an_idle_session_keeps_no_free_buffers() -> None:
    budget = DataBudget()
    pool = BufferPool(budget)
    used, free = pool.take(4096), [pool.take(size) for size in (4096, 65536, MIB)]
    used[:4] = b"used"
    gone = [weakref.ref(buffer.obj) for buffer in free[2:]]
    while free:
        pool.give(free.pop())
    pool.trim()
    gc.collect()
    assert [ref() for ref in gone] == [None]
    assert (pool.used, budget.used) == (4096, 4096) and bytes(used[:4]) == b"used"
    pool.give(used)
    assert budget.used == 0 and pool.take(4096).obj is used.obj


def test_the_sessions_of_one_address_leave_half_to_others() -> None:
    budget = DataBudget(most=16 * MIB)
    one, two, other = (BufferPool(budget, address) for address in ("10.0.0.1", "10.0.0.1", "::1"))
    for pool in (one, two):
        assert budget.fits(4 * MIB, pool.address)
        pool.take(4 * MIB)
    assert budget.used_by("10.0.0.1") == 8 * MIB
    assert not budget.fits(4096, "10.0.0.1")
    assert budget.fits(8 * MIB, "::1") and budget.fits(8 * MIB)
    other.take(4 * MIB)
    one.close()
    assert budget.fits(4 * MIB, "10.0.0.1")


def test_a_share_that_is_used_up_presses_nobody_else() -> None:
    budget = DataBudget(most=16 * MIB)
    pool = BufferPool(budget, "10.0.0.1")
    pressed: list[None] = []
    budget.keepers[lambda: pressed.append(None)] = None
    pool.take(8 * MIB)
    assert not budget.admits(4096, "10.0.0.1") and not pressed
    assert budget.admits(4096, "10.0.0.2") and not pressed
    assert not budget.admits(16 * MIB, "10.0.0.2") and pressed


def test_those_of_an_address_without_a_share_are_asked_once() -> None:
    """Each event would else wake all that an address has waiting."""
    budget = DataBudget(most=16 * MIB)
    pool = BufferPool(budget, "10.0.0.1")
    pool.take(8 * MIB)
    woken: list[str] = []
    waiting = []

    def waits(address: str) -> None:
        def wake() -> None:
            woken.append(address)
            if not budget.fits(4096, address):
                budget.wait(wake, address)

        waiting.append(wake)
        budget.wait(wake, address)

    for _ in range(5):
        waits("10.0.0.1")
    waits("10.0.0.2")
    budget.wake()
    assert woken == ["10.0.0.1", "10.0.0.2"] and len(budget.waiting) == 5
    pool.close()
    assert woken[2:] == ["10.0.0.1"] * 5 and not budget.waiting


def test_free_buffers_count_and_go_when_there_is_too_much() -> None:
    """Of all sessions: each may keep 16 MiB, and there are many."""
    budget = DataBudget(most=16 * MIB)
    pools = [BufferPool(budget) for _ in range(8)]
    for pool in pools:
        pool.give(pool.take(4 * MIB))
        assert budget.used + budget.free <= 16 * MIB
    assert budget.free >= 4 * MIB and not budget.used
    for pool in pools:
        pool.close()
    assert budget.free == 0


def test_what_is_held_beside_buffers_counts() -> None:
    budget = DataBudget(most=8192)
    pool = BufferPool(budget, "10.0.0.1")
    pool.account(4096)
    assert budget.fits(4096) and not budget.fits(4097)


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("sessions", [1, 100, 1024])
def test_what_is_guaranteed_to_all_has_a_bound_as_well(sessions: int, at_once: bool) -> None:
    """However many there are, and whether they are there before the first takes anything: the
    limit, and a quarter of it. (Memory that nothing touches is only counted.)"""
    budget = DataBudget()
    holder = BufferPool(budget)
    while budget.fits(MIB):
        holder.take(MIB)
    assert budget.used == TOTAL
    pools = [BufferPool(budget) for _ in range(sessions)] if at_once else []
    piece = 128 << 10
    for number in range(sessions):
        pool = pools[number] if at_once else BufferPool(budget)
        while budget.guarantees(pool.used, piece, GUARANTEED):
            pool.take(piece)
        if at_once:
            assert pool.used >= piece  # each has its part
    assert budget.used <= TOTAL + TOTAL // SET_ASIDE
    if sessions == 1:
        assert budget.used == TOTAL + GUARANTEED


def test_what_is_held_beside_buffers_counts_for_the_address() -> None:
    budget = DataBudget(most=16 * MIB)
    pool, other = BufferPool(budget, "10.0.0.1"), BufferPool(budget, "10.0.0.2")
    pool.account(8 * MIB)
    assert (pool.beside, budget.beside, budget.used_by("10.0.0.1")) == (8 * MIB, 8 * MIB, 8 * MIB)
    assert not budget.fits(4096, "10.0.0.1") and budget.fits(4096, "10.0.0.2")
    assert not pool.may_hold(4096) and other.may_hold(4096)
    pool.account(-8 * MIB)
    assert not budget.beside and not budget.used_by("10.0.0.1")
    full = BufferPool(budget, "10.0.0.3")
    full.take(8 * MIB)
    other.take(8 * MIB)
    assert pool.may_hold(BESIDE) and not pool.may_hold(BESIDE + 1)


def test_of_many_that_wait_for_much_one_is_woken() -> None:
    """The first of each address; and all keep their places."""
    budget = DataBudget(most=16 * MIB)
    pool = BufferPool(budget, "10.0.0.1")
    held = [pool.take(4096) for _ in range(2048)]
    woken: list[tuple[str, int]] = []

    def waiter(address: str, number: int) -> Callable[[], None]:
        def wake() -> None:
            woken.append((address, number))
            if not budget.fits(8 * MIB, address):
                budget.wait(wake, address)

        return wake

    for number in range(100):
        for address in ("10.0.0.1", "10.0.0.2"):
            budget.wait(waiter(address, number), address)
    BufferPool(budget, "10.0.0.2").take(MIB)
    for _ in range(2):
        pool.give(held.pop())
        budget.wake()
    assert woken == [("10.0.0.1", 0), ("10.0.0.2", 0)] * 2
    assert len(budget.waiting) == 200


@pytest.mark.parametrize("length", [1, 4096, 4097, 65536, MIB + 1])
def test_the_size_of_a_buffer_is_known_before(length: int) -> None:
    pool = BufferPool(DataBudget())
    pool.take(length)
    assert pool.used == size_of(length)


def test_what_the_sessions_of_each_address_hold() -> None:
    """Free buffers left out. Of all addresses it is what is held in all."""
    budget = DataBudget()
    one, two, other, idle = (
        BufferPool(budget, address) for address in ("10.0.0.1", "10.0.0.1", "::1", "10.0.0.2")
    )
    one.take(4096)
    two.account(100)
    other.take(8192)
    other.account(1)
    idle.give(idle.take(4096))
    assert budget.held_by_address() == {"10.0.0.1": 4196, "::1": 8193}
    assert budget.largest() == 8193
    assert sum(budget.held_by_address().values()) == budget.used + budget.beside
    for pool in (one, two, other, idle):
        pool.close()
    assert not budget.held_by_address() and budget.largest() == 0
