"""One task of trio that waits for the descriptors of many connections.

A task that waits by itself costs, for each message, two passes through trio's loop, and a system
call that has the kernel watch its descriptor once more. With many connections, each with few
commands in flight, that is more than a command takes. Here descriptors stay registered with an
epoll instance, and one task waits for that: what has come on any of them is handled by plain calls,
all in one turn.
"""

from __future__ import annotations

from collections.abc import Callable

import trio

from iserblk.loop.gathering import Gathering
from iserblk.loop.tasks import until_readable

_AT_ONCE = 64  # descriptors, after which trio has a turn


class Multiplexer:
    """Calls a function for each of many descriptors, when that can be read from. As long as there
    are none it has no task, and no descriptor of its own.

    ``sharers``: those that count themselves here, to find out whether there are others. One that is
    alone waits by itself, which saves it the second look for what is ready."""

    def __init__(self) -> None:
        self.sharers = 0
        self._gathering: Gathering | None = None
        self._ready: dict[int, Callable[[], None]] = {}
        self._later: list[Callable[[], None]] = []

    def add(self, fd: int, ready: Callable[[], None]) -> None:
        """Call ``ready`` when ``fd`` can be read from, and again as long as it can; also when there
        is an error. ``ready`` must not wait, nor raise anything. Raises OSError when no descriptor
        is left, or the system has no room for it."""
        gathering = self._gathering
        if gathering is None:
            gathering = self._gathering = Gathering()
            trio.lowlevel.spawn_system_task(self._run, gathering, name="wait for connections")
        try:
            gathering.add(fd)
        except OSError:
            self._close_unused()
            raise
        self._ready[fd] = ready

    def watch_output(self, fd: int, wanted: bool) -> None:
        """``wanted``: call the function of ``fd`` also when it can be written to."""
        if self._gathering is not None:
            self._gathering.watch_output(fd, wanted)

    def remove(self, fd: int) -> None:
        """Call nothing for ``fd`` any more. To be called before it is closed."""
        del self._ready[fd]
        if self._gathering is not None:
            self._gathering.remove(fd)
            self._close_unused()

    def later(self, function: Callable[[], None]) -> None:
        """From a function of this multiplexer: call ``function`` in the next turn of the loop, in
        which tasks that were woken run before it or behind it. It must not wait, nor raise
        anything, but may call this again."""
        self._later.append(function)

    def behind_others(self, function: Callable[[], None]) -> None:
        """From anywhere in the loop: call ``function`` in another turn of it, behind what is ready
        now. It must not wait, nor raise anything."""
        trio.lowlevel.current_trio_token().run_sync_soon(function)

    def _close_unused(self) -> None:
        gathering = self._gathering
        if gathering is not None and not self._ready:
            self._gathering = None
            trio.lowlevel.notify_closing(gathering.fileno())
            gathering.close()

    @trio.lowlevel.enable_ki_protection  # an interrupt in ``ready`` would lose what has come
    async def _run(self, gathering: Gathering) -> None:
        functions = self._ready
        try:
            while not gathering.closed:
                await until_readable(gathering.fileno())
                if gathering.closed:
                    return
                for fd in gathering.ready(_AT_ONCE):
                    ready = functions.get(fd)
                    if ready is not None:  # else what came before it has ended its connection
                        ready()
                while self._later:
                    await self._run_later()
        except trio.ClosedResourceError:
            pass
        finally:
            gathering.close()

    async def _run_later(self) -> None:
        """Not to be cancelled: what was submitted meanwhile waits to be sent."""
        await trio.lowlevel.cancel_shielded_checkpoint()
        functions, self._later = self._later, []
        for function in functions:
            function()


_here: trio.lowlevel.RunVar[Multiplexer] = trio.lowlevel.RunVar("multiplexer")


def multiplexer() -> Multiplexer:
    """All connections of a trio loop share one."""
    try:
        return _here.get()
    except LookupError:
        made = Multiplexer()
        _here.set(made)
        return made
