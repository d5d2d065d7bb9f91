"""Waiting for a condition that no event announces: of another process, the kernel or a thread.

There is no time limit here: that of the test applies.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import trio

from iserblk.initiator.session.sending import SendQueue

PAUSE_S = 0.01  # between two looks
LOOK_S = 60.0  # that of a session at its LUNs takes no longer, also on an emulated machine


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110 (there is no event)
        await trio.sleep(PAUSE_S)


def until_blocking(condition: Callable[[], object]) -> None:
    while not condition():
        time.sleep(PAUSE_S)


async def all_ended(queue: SendQueue) -> None:
    """No command is under way, once one that looks at a LUN has ended: a session sends such every
    few seconds. Raises TooSlowError."""
    with trio.fail_after(LOOK_S):
        await until(lambda: queue.busy == 0)
