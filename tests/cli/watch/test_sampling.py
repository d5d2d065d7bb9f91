"""Looks at the machine while the page is being watched, and only then."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import trio
from trio.testing import MockClock

from iserblk.cli.watch.history import Look
from iserblk.cli.watch.sampling import EVERY_S, FIRST_S, KEEP_S, WAIT_S, Sampling


@asynccontextmanager
async def running(look: Callable[[], Awaitable[Look]]) -> AsyncIterator[Sampling]:
    sampling = Sampling(look)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(sampling.run)
        yield sampling
        nursery.cancel_scope.cancel()


class Looks:
    """Notes when there was a look, each of which takes ``seconds``."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.times: list[float] = []

    async def __call__(self) -> Look:
        began = trio.current_time()
        await trio.sleep(self.seconds)
        self.times.append(began)
        return Look(trio.current_time(), 0.0)


async def test_nobody_watches(autojump_clock: MockClock) -> None:
    looks = Looks()
    async with running(looks):
        await trio.sleep(1000)
    assert not looks.times


async def test_the_first_page_has_rates(autojump_clock: MockClock) -> None:
    """Of two looks; later ones come from the last look, at once."""
    looks = Looks()
    async with running(looks) as sampling:
        began = trio.current_time()
        await sampling.current()
        assert [each - began for each in looks.times] == [0.0, FIRST_S]
        before = trio.current_time()
        history = await sampling.current()
        assert trio.current_time() == before
        assert history.look.at == looks.times[-1]


async def test_any_number_of_browsers_make_no_more_looks(autojump_clock: MockClock) -> None:
    looks = Looks()
    async with running(looks) as sampling, trio.open_nursery() as nursery:
        for _ in range(50):
            nursery.start_soon(sampling.current)
        await trio.sleep(FIRST_S + 2.5 * EVERY_S)
    assert len(looks.times) == 4


async def test_looking_ends_and_begins_again(autojump_clock: MockClock) -> None:
    looks = Looks()
    async with running(looks) as sampling:
        await sampling.current()
        await trio.sleep(KEEP_S * 3)
        count = len(looks.times)
        assert looks.times[-1] - looks.times[0] <= KEEP_S
        began = trio.current_time()
        await sampling.current()
        assert len(looks.times) == count + 2
        assert looks.times[-2] >= began


async def test_a_look_that_takes_long_is_not_waited_for_twice(autojump_clock: MockClock) -> None:
    looks = Looks(seconds=6.0)
    async with running(looks) as sampling:
        began = trio.current_time()
        await sampling.current()
        assert trio.current_time() - began == 6.0 + WAIT_S
        assert len(looks.times) == 1
