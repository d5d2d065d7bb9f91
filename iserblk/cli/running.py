"""Runs the async body of a command: signals cancel it, and its errors are raised singly."""

from __future__ import annotations

import signal
import sys
from collections.abc import Awaitable, Callable
from typing import TypeVar

import trio

from iserblk.errors import first_error
from iserblk.waiting.descriptors import signals_noted

_ENDING = (signal.SIGINT, signal.SIGTERM)
T = TypeVar("T")


def run(body: Callable[[], Awaitable[T]]) -> T:
    """Run ``body`` in trio, and return its result. SIGINT and SIGTERM cancel ``body``, which may
    clean up; then the process ends with 128 + signal. From a group of errors (several tasks
    failed) raises the first IserblkError, else the first OSError, else the group.
    """
    try:
        with signals_noted(*_ENDING) as noted:
            results, number = trio.run(_with_signals, body, noted)
    except BaseExceptionGroup as group:
        raise first_error(group) from None
    if not results:
        sys.exit(128 + number)
    return results[0]


async def _with_signals(body: Callable[[], Awaitable[T]], early: list[int]) -> tuple[list[T], int]:
    """The result of ``body`` (an empty list if it was cancelled), and the number of the first
    signal. ``early``: signals that came before this was called."""
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
