"""trio as the guest of a loop of our own, as trio documents it (``start_guest_run``).

trio waits for what its tasks wait for in a thread of its own; so what wakes a task costs more than
with ``trio.run``, by a tenth of a millisecond and more. What comes often is for plain calls.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import outcome
import trio

from iserblk.loop.epoll import EpollLoop
from iserblk.loop.here import hosts

T = TypeVar("T")


def run(body: Callable[[], Awaitable[T]]) -> T:
    """As ``trio.run``, with an EpollLoop for what ``loop_here`` is asked for. What a function of
    that loop raises cancels ``body``, and is raised here when that has ended."""
    loop = EpollLoop()
    results: list[outcome.Outcome[T]] = []
    scope = trio.CancelScope()
    problem: BaseException | None = None

    async def main() -> T:
        with scope:
            return await body()
        assert problem is not None  # nothing else cancels the scope
        raise problem  # where ``body`` has met that

    def done(result: outcome.Outcome[T]) -> None:
        results.append(result)
        loop.stopped = True

    before, hosts.loop = hosts.loop, loop
    try:
        trio.lowlevel.start_guest_run(
            main,
            run_sync_soon_threadsafe=loop.wake,
            run_sync_soon_not_threadsafe=loop.call_soon,
            done_callback=done,
            host_uses_signal_set_wakeup_fd=False,
        )
        while not loop.stopped:
            try:
                loop.run()
            except BaseException as error:
                problem = problem or error
                scope.cancel()
    finally:
        hosts.loop = before
        loop.close()
    (result,) = results
    if problem is not None and isinstance(result, outcome.Value):
        raise problem  # ``body`` had nothing to do any more that could be cancelled
    answer: T = result.unwrap()  # (outcome 1.2 has no types)
    return answer
