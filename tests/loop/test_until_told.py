"""A task that waits for the signals, and the signals around ``trio.run``."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
import trio

from iserblk import endings
from iserblk.loop.until_told import until_told

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Ended(Exception):
    pass


def end(_number: int, _frame: object) -> None:
    raise Ended


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """What a process has before: handlers that raise."""
    before = {number: signal.signal(number, end) for number in NUMBERS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_without_a_signal_everything_is_as_before() -> None:
    with until_told() as told:
        trio.run(trio.lowlevel.checkpoint)
    assert told.first == 0
    for number in NUMBERS:
        with pytest.raises(Ended):
            signal.raise_signal(number)


@pytest.mark.parametrize("number", NUMBERS)
def test_a_signal_before_a_task_waits(number: signal.Signals) -> None:
    with until_told() as told:
        signal.raise_signal(number)
        assert trio.run(told.begun) == number
    signal.raise_signal(number)  # the end is not interrupted


def test_signals_while_a_task_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []

    async def wait(scope: trio.CancelScope) -> None:
        seen.append(await told.begun())
        await told.lost_patience()
        seen.append("impatient")
        scope.cancel()

    with until_told() as told:

        async def main() -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(wait, nursery.cancel_scope)
                await trio.testing.wait_all_tasks_blocked()
                signal.raise_signal(signal.SIGTERM)
                signal.raise_signal(signal.SIGHUP)
                await trio.testing.wait_all_tasks_blocked()
                assert seen == [signal.SIGTERM]
                monkeypatch.setattr(endings, "PATIENCE_S", 0.0)
                signal.raise_signal(signal.SIGINT)
                await trio.sleep_forever()

        trio.run(main)
    assert seen == [signal.SIGTERM, "impatient"]
    assert told.first == signal.SIGTERM


def test_a_signal_behind_the_loop() -> None:
    """The loop in which a task has waited has ended."""

    async def main() -> None:
        with trio.move_on_after(0):
            await told.begun()

    with until_told() as told:
        trio.run(main)
        signal.raise_signal(signal.SIGTERM)
        assert told.first == signal.SIGTERM


def test_hangup_may_mean_something_else() -> None:
    with until_told(hangup=False), pytest.raises(Ended):
        signal.raise_signal(signal.SIGHUP)
