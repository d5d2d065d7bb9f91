"""The memory of the NBD server: what is used is bounded, what is free is used again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iserblk.nbd.buffers import HEADROOM, INTAKE, KEPT_BYTES, LEAST, Memory, size_of


@pytest.mark.parametrize(
    ("length", "size"),
    [(0, 4096), (1, 4096), (4096, 4096), (4097, 5120), (65536, 65536), (65537, 81920)],
)
def test_sizes(length: int, size: int) -> None:
    assert size_of(length) == size


@given(st.integers(LEAST, 1 << 25))
def test_a_quarter_more_at_most(length: int) -> None:
    size = size_of(length)
    assert length <= size <= length * 1.25
    assert size_of(size) == size


@pytest.mark.parametrize(
    ("clients", "guaranteed"), [(0, 1 << 20), (256, 1 << 20), (257, 1044495), (1024, 256 << 10)]
)
def test_many_clients_are_guaranteed_less_each(clients: int, guaranteed: int) -> None:
    memory = Memory()
    memory.guarantee(clients)
    assert memory.guaranteed == guaranteed


def test_a_buffer_is_used_again() -> None:
    memory = Memory()
    buffer = memory.buffer(8192)
    assert len(buffer) == HEADROOM + 8192 and memory.kept == 0
    memory.keep(buffer)
    assert memory.kept == 8192
    assert memory.buffer(4096) is not buffer
    assert memory.buffer(8192) is buffer and memory.kept == 0
    assert memory.buffer(8192) is not buffer


def test_what_is_kept_is_bounded() -> None:
    memory = Memory()
    for size in (4096, 1 << 20, 3 << 20, 4096, KEPT_BYTES, KEPT_BYTES + 4096):
        for _ in range(20):
            memory.keep(bytearray(HEADROOM + size))
            assert memory.kept <= KEPT_BYTES


def test_buffers_of_a_size_that_is_not_asked_for_any_more_make_room() -> None:
    memory = Memory()
    for _ in range(16):
        memory.keep(bytearray(HEADROOM + (1 << 20)))
    assert memory.kept == KEPT_BYTES
    latest = bytearray(HEADROOM + 4096)
    memory.keep(latest)
    assert memory.kept == 4096 and memory.buffer(4096) is latest


def test_what_clients_keep_is_counted() -> None:
    memory = Memory()
    memory.kept = KEPT_BYTES - 4096
    assert memory.keeps(4096) and not memory.keeps(4097)
    memory.keep(bytearray(HEADROOM + 8192))
    assert memory.kept == KEPT_BYTES - 4096


def test_intakes_are_used_again() -> None:
    memory = Memory()
    intakes = [memory.intake() for _ in range(20)]
    assert {len(each.view) for each in intakes} == {INTAKE}
    for each in intakes:
        memory.keep_intake(each)
    again = [memory.intake() for _ in range(20)]
    assert 0 < sum(each in intakes for each in again) < 20  # some, and not without bound


class Waiting:
    """Clients that wait, and the order in which they were woken."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.woken: list[str] = []
        self.first = lambda: self.woken.append("first")
        self.second = lambda: self.woken.append("second")


def test_those_that_wait_are_woken_once_in_the_order_in_which_they_came() -> None:
    memory = Memory(total=100)
    waiting = Waiting(memory)
    memory.used = 100
    assert memory.fits(0) and not memory.fits(1)
    assert not memory.starved
    for wake in (waiting.second, waiting.first, waiting.second):
        memory.wait(wake)
    assert memory.starved
    memory.share_out()
    assert waiting.woken == []  # nothing was given back
    memory.give_back(40)
    assert memory.fits(40) and not memory.fits(41)
    memory.share_out()
    memory.share_out()
    assert waiting.woken == ["second", "first"] and not memory.starved


def test_a_client_that_is_gone_is_not_woken() -> None:
    memory = Memory()
    waiting = Waiting(memory)
    memory.used = 10
    memory.wait(waiting.first)
    memory.wait(waiting.second)
    memory.forget(waiting.first)
    memory.forget(waiting.first)
    memory.give_back(10)
    memory.share_out()
    assert waiting.woken == ["second"]


def test_a_client_may_wait_again_when_it_is_woken() -> None:
    """What it wanted was not free; it is asked again at the next time only."""
    memory = Memory()
    asked: list[int] = []

    def wake() -> None:
        asked.append(memory.used)
        memory.wait(wake)

    memory.used = 10
    memory.wait(wake)
    for _ in range(2):
        memory.give_back(5)
        memory.share_out()
        memory.share_out()
    assert asked == [5, 0]
