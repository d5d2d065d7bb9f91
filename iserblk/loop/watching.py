"""Messages that are handled in place of trio's sleep, by a plain call.

When a single message comes, trio ends its sleep, notes which task waits for the descriptor, lets it
run, and asks the kernel to watch the descriptor once more: two passes through its loop and three
system calls for a message that takes one call to receive. So while single messages follow each
other closely, an ``Attendant`` waits where trio would. It watches the descriptors of the
conversations, and what trio itself waits for, which for the kernel is one descriptor more. What
comes to the former is handled at once; for all else the wait ends, and trio goes on.
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import trio

from iserblk.loop.busy_polling import NEAR_S, Turns
from iserblk.loop.clock import monotonic
from iserblk.loop.instruments import BeforeWait
from iserblk.loop.interrupts import uninterrupted
from iserblk.loop.tasks import until_readable

MOST = 64  # messages, after which trio has a turn in any case
TURN_S = 0.02  # and so it has after this time: a message may bring a lot of work
_AT_ONCE: Final = 16  # descriptors

Ready = Callable[[], bool]


class Attention:
    """A descriptor for which a task waits in trio, and which may be attended to before that."""

    __slots__ = ("_attendant", "fd")

    def __init__(self) -> None:
        self._attendant: Attendant | None = None
        self.fd = -1  # which is attended to; -1: none

    def attend(self, fd: int, awake: float, ready: Ready) -> None:
        """The next message on ``fd`` is expected within NEAR_S, or until the monotonic time
        ``awake``. Until that time the processor does not sleep; 0: it does.

        ``ready`` is called when something has come, unless trio has noticed that before: then the
        task that waits for the descriptor runs. ``ready`` takes what there is; or it returns False,
        and leaves that to the task. It must not wait, nor raise anything. It is kept only as long
        as ``fd`` is attended to: it refers to the owner of this watch, and thousands of those may
        come and go before Python finds such circles.
        """
        attendant = self._attendant
        if attendant is None:
            attendant = self._attendant = _attendant()
        attendant.attend(self, fd, awake, ready)

    def close(self) -> None:
        """Attend no more. To be called before the descriptor is closed."""
        if self._attendant is not None:
            self._attendant.remove(self)


class Attendant:
    """Waits in place of one trio loop, for all its conversations.

    trio calls its instrument before each wait. If the time of that wait is not 0, no task can run,
    and none can until a descriptor of trio is ready, or the time is over, or ``ready`` has made one
    able to run. Whatever ends the waiting here, trio looks at its tasks and deadlines again before
    it sleeps.
    """

    def __init__(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._of_trio = -1  # the descriptor that is ready when one that trio waits for is
        self._epoll: select.epoll | None = None  # open while something is watched
        self._watched: dict[int, tuple[Attention, Ready]] = {}
        self._until = 0.0  # the next message is expected
        self._awake = 0.0
        self._looked = 0.0  # when the last wait began
        self._turns = Turns()
        self._instrument = BeforeWait(self._before_wait)
        self._installed = False
        trio.lowlevel.spawn_system_task(self._meet_trio, name="meet trio")

    @uninterrupted
    async def _meet_trio(self) -> None:
        """Find the descriptor behind which trio's are. Where there is none, or no /proc, everything
        is left to trio."""
        with suppress(OSError):  # no descriptor is left
            bell = os.eventfd(1, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            try:
                await until_readable(bell)  # trio stays registered for it
                self._of_trio = epoll_with(bell)
            finally:
                trio.lowlevel.notify_closing(bell)
                os.close(bell)

    def attend(self, attention: Attention, fd: int, awake: float, ready: Ready) -> None:
        if self._of_trio < 0:
            return
        if attention.fd != fd:
            try:
                self._add(attention, fd, ready)
            except OSError:  # no descriptor is left, or no memory of the kernel
                return
        self._awake = max(self._awake, awake)
        self._until = max(awake, monotonic() + NEAR_S)

    def _add(self, attention: Attention, fd: int, ready: Ready) -> None:
        self.remove(attention)
        if self._epoll is None:
            epoll = select.epoll()
            epoll.register(self._of_trio, select.EPOLLIN)
            self._epoll = epoll
            if not self._installed:
                self._installed = True
                trio.lowlevel.add_instrument(self._instrument)
        self._epoll.register(fd, select.EPOLLIN)
        self._watched[fd] = (attention, ready)
        attention.fd = fd

    def remove(self, attention: Attention) -> None:
        if attention.fd >= 0 and self._epoll is not None:
            self._epoll.unregister(attention.fd)
            del self._watched[attention.fd]
            attention.fd = -1
            if not self._watched:
                self._close()

    def _close(self) -> None:
        if self._epoll is not None:
            self._epoll.close()
            self._epoll = None

    def _before_wait(self, timeout: float) -> None:
        """See BeforeWait. ``ready`` is not interrupted: what has come would be lost."""
        if timeout <= 0:
            return
        now: float = monotonic()
        epoll = self._epoll
        if epoll is None or now >= self._until:
            self._dismiss()
            return
        instrument = self._instrument
        instrument.scheduled = False
        end = now + timeout
        enough = now + TURN_S
        for _ in range(MOST):
            found = self._wait(epoll, end)
            if len(found) == 1 and found[0][0] == self._of_trio:
                return
            if not found:
                break
            for fd, _ in found:
                # trio waits for these descriptors as well: whether there is something else, the
                # next look tells.
                attended = self._watched.get(fd)  # no other ``ready`` has closed it
                if attended is not None and not attended[1]() and fd == attended[0].fd:
                    self.remove(attended[0])
            if instrument.scheduled or self._epoll is not epoll or self._looked > enough:
                break
        # ``timeout`` is not right any more.
        self._token.run_sync_soon(_nothing, idempotent=True)

    def _wait(self, epoll: select.epoll, end: float) -> list[tuple[int, int]]:
        now: float = monotonic()
        self._looked = now
        turns = self._turns
        while now < self._awake and now < end and not turns.crowded(now):
            found = epoll.poll(0, _AT_ONCE)
            if found:
                return found
            now = turns.give_way()
        left = min(end, self._until) - now
        return epoll.poll(left, _AT_ONCE) if left > 0 else []

    def _dismiss(self) -> None:
        """With many messages under way each would have to be reported twice."""
        for attention, _ in list(self._watched.values()):
            self.remove(attention)
        self._close()
        self._installed = False
        trio.lowlevel.remove_instrument(self._instrument)


def _nothing() -> None:
    """trio wakes for it."""


def epoll_with(fd: int) -> int:
    """The epoll instance of this process that ``fd`` is registered with; -1: there is none, or the
    system does not tell (proc(5), /proc/pid/fdinfo)."""
    with suppress(OSError):
        for each in Path("/proc/self/fd").iterdir():
            with suppress(OSError):  # the descriptor of this loop is closed already
                if each.readlink().name == "anon_inode:[eventpoll]":
                    about = Path(f"/proc/self/fdinfo/{each.name}").read_text(encoding="ascii")
                    lines = [line.split() for line in about.splitlines()]
                    if any(line[:2] == ["tfd:", str(fd)] for line in lines):
                        return int(each.name)
    return -1


_here: trio.lowlevel.RunVar[Attendant] = trio.lowlevel.RunVar("attendant")


def _attendant() -> Attendant:
    """All connections of a trio loop share one."""
    try:
        return _here.get()
    except LookupError:
        attendant = Attendant()
        _here.set(attendant)
        return attendant
