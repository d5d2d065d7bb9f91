"""Protection from KeyboardInterrupt: where it is raised, and where not."""

from __future__ import annotations

import signal
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import pytest
import trio

from iserblk.loop.interrupts import uninterrupted

Body = Callable[[Callable[[], None]], Coroutine[Any, Any, None]]


async def body(work: Callable[[], None]) -> None:
    work()
    await trio.lowlevel.checkpoint()


def interrupted(function: Body) -> list[str]:
    """What ``function`` has done when KeyboardInterrupt, which comes in its middle, is raised."""
    done: list[str] = []

    def work() -> None:
        signal.raise_signal(signal.SIGINT)
        done.append("worked")

    async def main() -> None:
        with pytest.raises(KeyboardInterrupt):
            await function(work)

    trio.run(main)
    return done


def test_it_is_raised_where_the_function_waits() -> None:
    assert interrupted(body) == []
    assert interrupted(uninterrupted(body)) == ["worked"]


def test_the_function_may_have_no_code_object() -> None:
    """As a compiled one."""
    bare: Body = partial(body)
    assert not hasattr(bare, "__code__")
    assert interrupted(bare) == []
    assert interrupted(uninterrupted(bare)) == ["worked"]


async def test_arguments_results_and_errors_pass() -> None:
    @uninterrupted
    async def divide(number: int, by: int) -> float:
        await trio.lowlevel.checkpoint()
        return number / by

    assert await divide(6, by=3) == 2
    with pytest.raises(ZeroDivisionError):
        await divide(6, by=0)
    assert divide.__name__ == "divide"
