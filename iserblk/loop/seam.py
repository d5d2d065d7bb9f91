"""What a loop is for the code that it runs: plain calls, all in its own thread.

There are two: ``EpollLoop``, which has trio as its guest, and ``TrioLoop``, inside a trio loop of
the user's. Tests have a third, whose time is made up (``tests/simulation``). ``here.loop_here``
returns the one that runs the caller.

A function that a loop calls must not wait, nor raise anything: what it raises ends the loop's run.
KeyboardInterrupt is not raised in it.
"""

from __future__ import annotations

from typing import Protocol

from iserblk.loop.work import Ended, Function, Limit


class Timer(Protocol):
    """A function that is to be called at a time."""

    def cancel(self) -> None:
        """Call it no more. Does nothing when it has been called."""


class Watch(Protocol):
    """A descriptor that the loop waits for. ``fd`` is -1 when the watch is closed."""

    fd: int

    def want(self, readable: bool, writable: bool) -> None:
        """Call ``ready`` when the descriptor can be read from, or written to; at first: read from.
        An error of the descriptor and its end count as both. With neither, nothing is reported."""

    def expect(self, until: float) -> None:
        """The next message is expected at any moment: until the monotonic time ``until`` the
        processor need not sleep meanwhile."""

    def close(self) -> None:
        """Call ``ready`` no more. To be called before the descriptor is closed; may be called
        twice, and from ``ready``.

        A descriptor that was closed before all the same does no harm: ``want`` and ``close`` raise
        nothing, and behind ``close`` the loop hears of that descriptor no more, though another
        process may have a copy. Before that, ``ready`` may be called because of the copy. The
        number may be watched anew: the old watch is closed then."""


class Loop(Protocol):
    def now(self) -> float:
        """Monotonic seconds: what ``call_at`` takes."""

    def call_soon(self, function: Function) -> None:
        """Call ``function`` in the next turn, behind those that were given before."""

    def call_at(self, when: float, function: Function) -> Timer:
        """Call ``function`` at the time ``when``, or in the next turn if that is past; functions of
        one time in the order in which they were given."""

    def watch(self, fd: int, ready: Function) -> Watch:
        """Call ``ready`` when there is something to be read from ``fd``, and again in each turn as
        long as there is. Raises OSError when the system has no room, or ``fd`` is watched here
        already."""

    def stay_awake(self, until: float) -> None:
        """Something is expected at any moment, as ``Watch.expect``; ``wake`` counts, too."""

    def wake(self, function: Function) -> None:
        """As ``call_soon``, from any thread, and from a handler of a signal. Does nothing once the
        loop has ended."""

    def offload(self, work: Function, ended: Ended, limit: Limit) -> None:
        """Call ``work`` in a thread, behind what waits for ``limit``; then ``ended`` in the loop,
        with what ``work`` has raised, or why the system has no thread for it, or None. What is
        offloaded is never cancelled: whoever owns what ``work`` uses waits for ``ended``."""
