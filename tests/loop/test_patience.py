"""Time-outs that count only the time in which the process runs."""

from __future__ import annotations

import math

import pytest
import trio
import trio.testing

from iserblk.loop.patience import BUSY_S, SLICE_S, Patience, fail_after, move_on_after

COUNTER = "count time-outs"


class Looks(trio.abc.Instrument):
    """``count``: steps of the task that counts."""

    def __init__(self) -> None:
        self.count = 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.count += task.name == COUNTER


def counters() -> int:
    """Tasks of trio's own that count."""
    root = trio.lowlevel.current_root_task()
    assert root is not None
    return sum(
        task.name == COUNTER for nursery in root.child_nurseries for task in nursery.child_tasks
    )


@pytest.mark.parametrize("seconds", [0.0, 0.2, SLICE_S, 10.0])
async def test_a_silent_peer_is_waited_for_as_long(
    autojump_clock: trio.testing.MockClock, seconds: float
) -> None:
    began = trio.current_time()
    with pytest.raises(trio.TooSlowError), fail_after(seconds):
        await trio.sleep_forever()
    assert trio.current_time() - began == pytest.approx(seconds)
    with move_on_after(seconds) as scope:
        await trio.sleep_forever()
    assert scope.cancelled_caught
    assert trio.current_time() - began == pytest.approx(2 * seconds)
    await trio.testing.wait_all_tasks_blocked()
    assert not counters()


async def test_a_stopped_process_has_waited_for_nothing(mock_clock: trio.testing.MockClock) -> None:
    """However long: what has come meanwhile is taken in, and what comes then."""
    answers: list[trio.Event] = [trio.Event() for _ in range(3)]
    heard = []

    async def ask() -> None:
        with fail_after(10):
            for answer in answers:
                await answer.wait()
                heard.append(answer)
                await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        await trio.testing.wait_all_tasks_blocked()
        answers[0].set()
        mock_clock.jump(1000)
        await trio.testing.wait_all_tasks_blocked()
        mock_clock.jump(1000)
        await trio.testing.wait_all_tasks_blocked()
        answers[1].set()
        await trio.testing.wait_all_tasks_blocked()
        answers[2].set()
    assert heard == answers


async def test_silence_after_a_stop_counts_again(mock_clock: trio.testing.MockClock) -> None:
    with move_on_after(10) as scope:
        mock_clock.jump(1000)
        await trio.testing.wait_all_tasks_blocked()
        began = trio.current_time()
        mock_clock.autojump_threshold = 0
        await trio.sleep_forever()
    assert scope.cancelled_caught
    assert 10 - SLICE_S - BUSY_S <= trio.current_time() - began <= 10


async def test_several_waits_share_their_time(autojump_clock: trio.testing.MockClock) -> None:
    """As those for the addresses of one name."""
    patience = Patience(10)
    for pause in (3, 4.2):
        with patience.required():
            await trio.sleep(pause)
    began = trio.current_time()
    with pytest.raises(trio.TooSlowError), patience.required():
        await trio.sleep_forever()
    assert trio.current_time() - began == pytest.approx(2.8)
    with patience.limit() as scope:
        await trio.sleep_forever()
    assert scope.cancelled_caught and trio.current_time() - began == pytest.approx(2.8)


async def test_waits_that_begin_and_end_beside_others(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Each has its own time, and one task counts for all."""
    ended: dict[float, float] = {}

    async def wait(after: float, seconds: float) -> None:
        await trio.sleep(after)
        with move_on_after(seconds):
            await trio.sleep_forever()
        ended[seconds] = trio.current_time()

    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        for after, seconds in ((0, 5.0), (0.3, 0.1), (1.1, 2.0), (4.9, 0.3)):
            nursery.start_soon(wait, after, seconds)
        await trio.sleep(1.5)
        assert counters() == 1
    assert ended == {
        seconds: pytest.approx(began + end)
        for seconds, end in ((0.1, 0.4), (2.0, 3.1), (5.0, 5.0), (0.3, 5.2))
    }


async def test_without_a_limit_nothing_counts(autojump_clock: trio.testing.MockClock) -> None:
    with move_on_after(math.inf) as scope:
        await trio.sleep(3600)
        assert not counters()
    assert not scope.cancelled_caught


async def test_what_the_body_raises_comes_out(autojump_clock: trio.testing.MockClock) -> None:
    with pytest.raises(ZeroDivisionError), fail_after(5):
        await trio.sleep(1)
        raise ZeroDivisionError
    with trio.CancelScope() as outer, fail_after(5):
        outer.cancel()
        await trio.sleep_forever()
    assert outer.cancelled_caught


async def test_a_wait_that_takes_its_time_to_end_is_not_looked_at_all_the_time(
    mock_clock: trio.testing.MockClock,
) -> None:
    """A body that shields its clean-up, or waits for a thread, goes on after its time is over."""
    cleaned = trio.Event()
    looks = Looks()

    async def linger() -> None:
        with move_on_after(SLICE_S), trio.CancelScope(shield=True):
            await cleaned.wait()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(linger)
        await trio.testing.wait_all_tasks_blocked()
        trio.lowlevel.add_instrument(looks)
        mock_clock.jump(SLICE_S)
        for _ in range(100):
            await trio.lowlevel.checkpoint()
        trio.lowlevel.remove_instrument(looks)
        cleaned.set()
    assert 0 < looks.count < 10
