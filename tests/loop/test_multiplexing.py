"""One task that waits for many descriptors: what comes is handled, in one turn, until it ends."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import trio

from iserblk.loop.multiplexing import Multiplexer, multiplexer
from tests.support.descriptors import descriptors, descriptors_to_begin_with
from tests.support.until import until

MANY = 100


@pytest.fixture
def lines() -> Iterator[list[tuple[socket.socket, socket.socket]]]:
    with ExitStack() as stack:
        pairs = []
        for _ in range(MANY):
            here, there = socket.socketpair()
            here.setblocking(False)
            pairs.append((stack.enter_context(here), stack.enter_context(there)))
        yield pairs


async def test_what_comes_is_handled(lines: list[tuple[socket.socket, socket.socket]]) -> None:
    """From each descriptor, again and again, without a task for any of them."""
    heard = [b""] * MANY
    shared = multiplexer()

    def ready(number: int) -> None:
        heard[number] += lines[number][0].recv(1)

    for number, (here, _) in enumerate(lines):
        shared.add(here.fileno(), lambda number=number: ready(number))  # type: ignore[misc]
    before = trio.lowlevel.current_statistics().tasks_living
    for _, there in lines:
        there.sendall(b"abc")  # what is left after a call makes another one
    await until(lambda: heard == [b"abc"] * MANY)
    for _, there in lines:
        there.sendall(b"d")
    await until(lambda: heard == [b"abcd"] * MANY)
    assert trio.lowlevel.current_statistics().tasks_living == before
    for here, _ in lines:
        shared.remove(here.fileno())


async def test_other_tasks_have_their_turn(
    lines: list[tuple[socket.socket, socket.socket]],
) -> None:
    """Though all descriptors stay ready."""
    shared = multiplexer()
    calls = 0

    def ready() -> None:
        nonlocal calls
        calls += 1

    for here, there in lines:
        shared.add(here.fileno(), ready)
        there.sendall(b"x")
    turns = 0
    while calls < 10 * MANY:
        await trio.lowlevel.checkpoint()
        turns += 1
    assert turns >= 10
    for here, _ in lines:
        shared.remove(here.fileno())


async def test_one_ends_another(lines: list[tuple[socket.socket, socket.socket]]) -> None:
    """Both have something; the first that is called closes the other, and nothing is called for a
    descriptor that is closed."""
    shared = multiplexer()
    (first, one), (second, other) = lines[:2]
    called: list[socket.socket] = []

    def ready(mine: socket.socket, theirs: socket.socket) -> None:
        called.append(mine)
        mine.recv(1)
        if theirs.fileno() >= 0:
            shared.remove(theirs.fileno())
            theirs.close()

    shared.add(first.fileno(), lambda: ready(first, second))
    shared.add(second.fileno(), lambda: ready(second, first))
    one.sendall(b"x")
    other.sendall(b"x")
    await until(lambda: called)
    for _ in range(5):
        await trio.lowlevel.checkpoint()
    assert len(called) == 1
    shared.remove(called[0].fileno())


async def test_none_is_left(lines: list[tuple[socket.socket, socket.socket]]) -> None:
    """Neither task nor descriptor, once the last descriptor is removed; then it begins anew."""
    before = (descriptors_to_begin_with(), trio.lowlevel.current_statistics().tasks_living)
    shared = multiplexer()
    here, there = lines[0]
    called: list[bytes] = []
    for number in range(3):
        shared.add(here.fileno(), lambda: called.append(here.recv(9)))
        there.sendall(b"x")
        await until(lambda number=number: len(called) > number)  # type: ignore[misc]
        shared.remove(here.fileno())
        assert descriptors() == before[0]
        if number == 1:
            await until(lambda: trio.lowlevel.current_statistics().tasks_living == before[1])


async def test_a_descriptor_that_cannot_be_watched(tmp_path: Path) -> None:
    before = descriptors_to_begin_with()
    with (tmp_path / "file").open("wb") as file, pytest.raises(OSError, match="not permitted"):
        multiplexer().add(file.fileno(), lambda: None)
    assert descriptors() == before


async def test_output(lines: list[tuple[socket.socket, socket.socket]]) -> None:
    """The function is called for a socket that takes more as long as that is wanted."""
    shared = multiplexer()
    here = lines[0][0]
    calls = 0

    def ready() -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            shared.watch_output(here.fileno(), False)

    shared.add(here.fileno(), ready)
    shared.watch_output(here.fileno(), True)
    await until(lambda: calls >= 3)
    for _ in range(5):
        await trio.lowlevel.checkpoint()
    assert calls == 3
    shared.remove(here.fileno())


async def test_what_is_for_later(lines: list[tuple[socket.socket, socket.socket]]) -> None:
    """It is called once, behind all that has come in this turn; also where the last descriptor was
    removed meanwhile."""
    shared = multiplexer()
    order: list[str] = []

    def ready(here: socket.socket) -> None:
        here.recv(1)
        order.append("came")
        shared.later(lambda: order.append("later"))
        shared.remove(here.fileno())

    for here, there in lines[:3]:
        shared.add(here.fileno(), lambda here=here: ready(here))  # type: ignore[misc]
        there.sendall(b"x")
    await until(lambda: len(order) == 6)
    assert order == ["came"] * 3 + ["later"] * 3


def test_each_loop_has_its_own(lines: list[tuple[socket.socket, socket.socket]]) -> None:
    found: list[Multiplexer] = []

    async def main() -> None:
        assert multiplexer() is multiplexer()
        found.append(multiplexer())

    trio.run(main)
    trio.run(main)
    assert found[0] is not found[1]
