"""Waiting for a condition that no event announces: of another process, the kernel or a thread.

There is no time limit here: that of the test applies.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import trio

PAUSE_S = 0.01  # between two looks


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110 (there is no event)
        await trio.sleep(PAUSE_S)


def until_blocking(condition: Callable[[], object]) -> None:
    while not condition():
        time.sleep(PAUSE_S)
