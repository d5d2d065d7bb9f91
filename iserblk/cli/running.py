"""Runs the async body of a command: signals cancel it, and its errors are raised singly."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

import trio

from iserblk.errors import first_error
from iserblk.loop import guest
from iserblk.loop.until_told import UntilTold, until_told

T = TypeVar("T")


def run(body: Callable[[], Awaitable[T]], *, hangup: bool = True, host: bool = False) -> T:
    """Run ``body`` in trio, and return its result. SIGINT, SIGTERM and SIGHUP cancel ``body``,
    which may clean up; then the process ends with 128 + signal. ``hangup``: see ``ending_signals``.
    ``host``: with a loop of our own, trio being its guest, for what serves many requests.
    From a group of errors (several tasks failed) raises the first IserblkError, else the first
    OSError, else the group.
    """
    try:
        with until_told(hangup=hangup) as heard:
            with_signals = partial(_with_signals, body, heard)
            results = (guest.run if host else trio.run)(with_signals)
    except BaseExceptionGroup as group:
        raise first_error(group) from None
    if not results:
        sys.exit(128 + heard.first)
    return results[0]


async def _with_signals(body: Callable[[], Awaitable[T]], heard: UntilTold) -> list[T]:
    """The result of ``body``; an empty list if a signal has cancelled it."""
    results: list[T] = []
    if heard.first:
        return results

    async def watch() -> None:
        await heard.begun()
        nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch)
        results.append(await body())
        nursery.cancel_scope.cancel()
    return results
