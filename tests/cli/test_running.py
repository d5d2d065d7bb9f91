"""Async bodies under signals and errors."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
import trio

from iserblk.cli.running import run
from iserblk.errors import BadArgument, ConnectionLost


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """``run`` leaves its own when a signal has come: the process is to end."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup, perhaps around all tests, ignores it
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_the_result_comes_out() -> None:
    async def body() -> int:
        return 7

    assert run(body) == 7


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_cancels_and_lets_clean_up(number: int, status: int) -> None:
    cleaned = []

    async def body() -> None:
        try:
            os.kill(os.getpid(), number)
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.lowlevel.checkpoint()
            cleaned.append(True)

    with pytest.raises(SystemExit) as ended:
        run(body)
    assert (ended.value.code, cleaned) == (status, [True])


def test_of_several_errors_ours_comes_out() -> None:
    async def fail(error: Exception) -> None:
        raise error

    async def body() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fail, ConnectionLost("gone"))
            nursery.start_soon(fail, ConnectionLost("gone"))

    with pytest.raises(ConnectionLost):
        run(body)


def test_a_plain_error_comes_out_as_it_is() -> None:
    async def body() -> None:
        raise BadArgument("x")

    with pytest.raises(BadArgument):
        run(body)


def test_a_bug_keeps_its_group() -> None:
    async def body() -> None:
        raise ZeroDivisionError

    with pytest.raises(BaseExceptionGroup) as caught:
        run(body)
    assert caught.group_contains(ZeroDivisionError)
