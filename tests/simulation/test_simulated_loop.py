"""What the simulated loop does beside the seam (tests/contract/test_loops.py)."""

from __future__ import annotations

import random
import secrets
import threading
from collections.abc import Awaitable, Callable

import pytest
import trio

from iserblk.loop import clock
from iserblk.loop.here import loop_here
from iserblk.loop.work import Limit
from tests.simulation import running
from tests.simulation.loop import FIRST_S
from tests.simulation.running import Simulation, Stuck

TASKS = 6


async def _events() -> list[object]:
    """What happens, in its order: tasks, functions, timers, work, descriptors."""
    seen: list[object] = []
    loop = loop_here()

    def note(*what: object) -> None:
        seen.append((*what, loop.now(), random.random(), secrets.token_bytes(2)))

    async def task(number: int) -> None:
        for turn in range(3):
            await trio.sleep(0.001)
            note("task", number, turn)

    async with trio.open_nursery() as nursery:
        for number in range(TASKS):
            nursery.start_soon(task, number)
            loop.call_soon(lambda number=number: note("soon", number))  # type: ignore[misc]
            loop.call_at(
                loop.now() + 0.001,
                lambda number=number: note("timer", number),  # type: ignore[misc]
            )
            loop.offload(
                lambda number=number: note("work", number),  # type: ignore[misc]
                lambda _error, number=number: note("ended", number),  # type: ignore[misc]
                Limit(1),
            )
    return seen


def _sockets(simulation: Simulation) -> Callable[[], Awaitable[list[object]]]:
    """Which of several sockets, each with a message, is called first, and so on."""
    pairs = [simulation.network.pair() for _ in range(TASKS)]
    order: list[object] = []

    async def body() -> list[object]:
        ended = trio.Event()

        def ready(number: int) -> None:
            pairs[number][0].recv(1)
            order.append(number)
            if len(order) == TASKS:
                ended.set()

        for _, there in pairs:
            there.sendall(b"x")
        await trio.sleep(1.0)
        watches = [
            loop_here().watch(pairs[number][0].fileno(), lambda number=number: ready(number))  # type: ignore[misc]
            for number in range(TASKS)
        ]
        await ended.wait()
        for watch in watches:
            watch.close()
        return order

    return body


def test_a_seed_decides_on_the_order() -> None:
    """The same again, also of what is random; and another one for another seed."""
    first = Simulation(1).run(_events)
    assert Simulation(1).run(_events) == first
    assert len(first) == TASKS * 7
    assert Simulation(2).run(_events) != first


def test_a_seed_decides_which_socket_comes_first() -> None:
    def order(seed: int) -> list[object]:
        simulation = Simulation(seed)
        return simulation.run(_sockets(simulation))

    assert order(1) == order(1)
    assert sorted(map(str, order(1))) == [str(number) for number in range(TASKS)]
    assert len({tuple(order(seed)) for seed in range(8)}) > 1


def test_nothing_sleeps() -> None:
    """A year goes by; the clock of the product shows it, and the real one comes back."""
    year = 365 * 86400.0
    before = clock.monotonic()

    async def body() -> tuple[float, int, float]:
        loop = loop_here()
        ended = trio.Event()
        loop.call_at(loop.now() + year, ended.set)
        began = trio.current_time()
        await ended.wait()
        return clock.monotonic(), clock.nanoseconds(), trio.current_time() - began

    now, nanoseconds, passed = Simulation().run(body)
    assert FIRST_S + year <= now < FIRST_S + year + 1.0
    assert nanoseconds == int(now * 1e9)
    assert year <= passed < year + 1.0
    assert before <= clock.monotonic() < before + year


def test_work_is_done_in_order_within_its_limit() -> None:
    most = 2
    limit = Limit(most)
    running: set[int] = set()
    crowd: list[int] = []
    ended: list[BaseException | None] = []
    problem = ValueError("it breaks")

    def work(number: int) -> None:
        crowd.append(limit.busy)
        running.add(number)
        if number == 3:
            raise problem

    async def body() -> None:
        loop, done = loop_here(), trio.Event()

        def over(error: BaseException | None) -> None:
            ended.append(error)
            if len(ended) == 8:
                done.set()

        for number in range(8):
            loop.offload(lambda number=number: work(number), over, limit)  # type: ignore[misc]
            assert not running  # not at once
        assert (limit.busy, limit.waiting) == (most, 8 - most)
        await done.wait()
        assert (limit.busy, limit.waiting) == (0, 0)

    Simulation().run(body)
    assert running == set(range(8))
    assert max(crowd) == most
    assert [error for error in ended if error is not None] == [problem]


@pytest.mark.parametrize("released", [2, 1])
def test_work_that_waits_for_other_work(released: int) -> None:
    """It does not keep the loop from doing that. Or it has had its time."""
    heard: list[object] = []

    async def body() -> None:
        loop, over = loop_here(), trio.Event()
        semaphore = threading.Semaphore(0)

        def waiting() -> None:
            heard.append([semaphore.acquire(timeout=5.0) for _ in range(2)])

        def ended(error: BaseException | None) -> None:
            heard.append(error)
            over.set()

        loop.offload(waiting, ended, Limit(1))
        await trio.sleep(1.0)
        for _ in range(released):
            loop.offload(semaphore.release, lambda _error: None, Limit(1))
            await trio.sleep(1.0)
        await over.wait()

    Simulation().run(body)
    assert heard == [[True, released == 2], None]


def test_a_body_that_waits_for_ever_is_told() -> None:
    with pytest.raises(Stuck, match="for ever"):
        Simulation().run(trio.sleep_forever)


def test_a_body_that_goes_on_for_ever_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "MOST_IDLE", 100)
    simulation = Simulation()
    turns = 0

    async def body() -> None:
        def again() -> None:
            nonlocal turns
            turns += 1
            if turns < 300:
                simulation.progress()
            simulation.loop.call_soon(again)

        again()
        await trio.sleep_forever()

    with pytest.raises(Stuck, match="nothing ends"):
        simulation.run(body)
    assert turns >= 400


def test_a_function_that_raises_is_raised() -> None:
    cleaned: list[bool] = []

    def function() -> None:
        raise ZeroDivisionError

    async def body() -> None:
        loop_here().call_soon(function)
        try:
            await trio.sleep_forever()
        finally:
            cleaned.append(True)

    with pytest.raises(ZeroDivisionError):
        Simulation().run(body)
    assert cleaned == [True]


def test_a_task_waits_for_a_socket() -> None:
    simulation = Simulation()
    here, there = simulation.network.pair()
    loop = simulation.loop

    async def body() -> bytes:
        with trio.move_on_after(1.0) as scope:
            await loop.until_readable(here)
        assert scope.cancelled_caught
        async with trio.open_nursery() as nursery:
            nursery.start_soon(loop.until_readable, here)
            await trio.sleep(0.1)
            with pytest.raises(trio.BusyResourceError):
                await loop.until_readable(here.fileno())
            there.sendall(b"x")
        await loop.until_writable(here)
        with pytest.raises(OSError, match="Bad file descriptor"):
            await loop.until_readable(here.fileno() + 1000)
        return here.recv(9)

    assert simulation.run(body) == b"x"
