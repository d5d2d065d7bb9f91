"""Runs the async body of a command: signals cancel it, and its own error comes out."""

from __future__ import annotations

import signal
import sys
from collections.abc import Awaitable, Callable
from typing import TypeVar

import trio

from iserblk.errors import IserblkError
from iserblk.waiting.descriptors import signals_noted

_ENDING = (signal.SIGINT, signal.SIGTERM)
T = TypeVar("T")


def run(body: Callable[[], Awaitable[T]]) -> T:
    """trio.run. SIGINT and SIGTERM cancel ``body``, which may clean up; then the process ends
    with 128 + signal. A group of errors (several tasks failed) comes out as the first of ours, or
    of the system.
    """
    try:
        with signals_noted(*_ENDING) as noted:
            results, number = trio.run(_with_signals, body, noted)
    except BaseExceptionGroup as group:
        raise _first(group) from None
    if not results:
        sys.exit(128 + number)
    return results[0]


async def _with_signals(body: Callable[[], Awaitable[T]], early: list[int]) -> tuple[list[T], int]:
    """What ``body`` returned, if it did, and the signal that came first; ``early``: those that came
    before this was called."""
    number = 0
    results: list[T] = []

    with trio.open_signal_receiver(*_ENDING) as signals:
        if early:
            return [], early[0]

        async def watch() -> None:
            nonlocal number
            number = await anext(signals)
            nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            results.append(await body())
            nursery.cancel_scope.cancel()
    return results, number


def _first(error: BaseException) -> BaseException:
    """The first IserblkError, else OSError, in a group of errors; the group where there is none."""
    if isinstance(error, BaseExceptionGroup):
        known = error.subgroup(IserblkError) or error.subgroup(OSError)
        return error if known is None else _first(known.exceptions[0])
    return error
