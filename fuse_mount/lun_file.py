"""A file of the mount: a LUN, and where the file ends.

Programs that copy a file with holes empty the destination, skip the holes, and count on zeroes
there. A LUN cannot become shorter. So its file has an *end*, which belongs to the file, not to an
open file:

- At first, and whenever it would reach the size of the LUN, there is no end: a write changes only
  what it writes, as on a block device.
- Truncation to less than the size of the LUN sets the end. The bytes behind it stay as they are.
- A write that begins behind the end first makes the bytes from the end to its offset zero, and a
  truncation that extends the file makes those up to the new end zero. If zeroes cannot be written,
  the request fails, and the end stays.
- A write that reaches beyond the end moves the end.
- A program that has the file open for reading and writing, and reads behind the end, uses the LUN
  as a disk: a loop device, qemu, fsck. What it has seen must not become zero, so the end is
  forgotten; but not while a program that has truncated the file has it open. Then it is forgotten
  when that closes it: the other program may have read all before. A read that begins in front of
  the end, and reaches behind it, moves the end only behind what was read: a program may read its
  header with a buffer that is larger.

All that is kept in memory: a new mount knows of no end.
"""

from __future__ import annotations

import logging
import os
import sys
from collections import deque
from typing import Final

import trio

from iserblk.disk.seam import AsyncDisk
from iserblk.errors import IserblkError
from iserblk.loop.clock import monotonic, since_epoch_ns
from iserblk.loop.strands import elsewhere

log = logging.getLogger(__name__)

NO_END: Final = sys.maxsize

# Seconds, at least, between two requests to the target for a size. (A target reports a change only
# in the answer to a command: without asking, an idle LUN would not grow here until it is read.)
_ASK_S = 0.5


class LunFile:
    """``end``: bytes, or NO_END. A write up to there needs nothing but the disk; any other has to
    go through ``write_behind``."""

    def __init__(self, name: str, disk: AsyncDisk) -> None:
        self.name = os.fsencode(name)
        self.disk = disk
        self.end = NO_END
        self.modified_ns = since_epoch_ns()
        self._truncators: set[int] = set()  # open files, by their handles
        self._updaters: set[int] = set()
        self._asked = float("-inf")
        self._moving = False
        self._waiting: deque[trio.Event] = deque()

    async def ask_size(self) -> None:
        """Ask the target for the size, unless that was done a moment ago, or another request is
        doing it. If the target does not answer, the known size stays."""
        now = monotonic()
        if now >= self._asked + _ASK_S:
            self._asked = float("inf")
            try:
                await self.disk.refresh()
            except IserblkError as error:
                log.info("size: %s", error)
            finally:
                self._asked = monotonic()

    # --- the end ---

    @property
    def shown_end(self) -> int:
        """The size for stat(2) if that is not the LUN's, else NO_END: as long as a program that has
        truncated the file has it open, that is its end. Some programs (dd, ddrescue) look how long
        the file has become, and extend it, if it ends with a hole."""
        return self.end if self._truncators else NO_END

    def opened(self, handle: int, flags: int) -> None:
        """``flags``: those of open(2)."""
        if flags & os.O_ACCMODE == os.O_RDWR:
            self._updaters.add(handle)

    def closed(self, handle: int) -> None:
        """The open file ``handle`` is gone."""
        self._updaters.discard(handle)
        if handle in self._truncators:
            self._truncators.remove(handle)
            if self._updaters and self.end != NO_END:
                self._forget()

    def read_behind(self, handle: int, begin: int, stop: int) -> None:
        """A read through ``handle``, of the bytes from ``begin`` to ``stop``, reaches behind the
        end."""
        if handle in self._updaters:
            self._forget(stop if begin < self.end else NO_END)

    def _forget(self, stop: int = NO_END) -> None:
        """The end is behind ``stop``, if it may be moved now."""
        if not self._truncators and not self._moving:
            if stop == NO_END:
                log.info("%s: used as a disk: its end is forgotten", os.fsdecode(self.name))
            self._move(stop)

    async def truncate(self, size: int, handle: int | None) -> None:
        """Set the end to ``size``, at most the LUN's. ``handle``: the open file that does so, None
        with truncate(2). Raises what ``AsyncDisk.zero`` raises; the end is then where it was."""
        await self._take_turn()
        try:
            if size > self.end:
                await self._zero(size)
            elif size < min(self.end, self.disk.size):
                log.info(
                    "%s: cut to %d bytes; until it is unmounted, a write that begins behind its end"
                    " has zeroes before it",
                    os.fsdecode(self.name),
                    size,
                )
            self._move(size)
        finally:
            self._pass_on()
        if handle is not None:
            self._truncators.add(handle)
        self.modified_ns = since_epoch_ns()

    async def write_behind(self, data: memoryview, offset: int) -> None:
        """Write ``data``, which ends behind the end. Raises what ``AsyncDisk.zero`` and ``write``
        raise; the end is then not behind ``offset``.

        One such write, or truncation, at a time: what another one writes behind the end must not be
        zeroed afterwards. Writes up to the end may go on; no gap has their bytes.
        """
        await self._take_turn()
        try:
            if offset > self.end:
                await self._zero(offset)
                self._move(offset)
            await self.disk.write(data, offset)
            self._move(max(self.end, offset + len(data)))
        finally:
            self._pass_on()

    async def _zero(self, stop: int) -> None:
        """Make the bytes from the end to ``stop`` zero. With a time limit for each step only, as
        there may be any number of bytes."""
        log.debug("%s: zeroes from %d to %d", os.fsdecode(self.name), self.end, stop)
        await self.disk.zero(self.end, stop - self.end, may_trim=True, patient=True)

    def _move(self, end: int) -> None:
        self.end = end if end < self.disk.size else NO_END

    async def _take_turn(self) -> None:
        """Get the right to move the end: in the order of the calls, one at a time. Its holder calls
        ``_pass_on``."""
        if self._moving:
            mine = trio.Event()
            self._waiting.append(mine)
            try:
                await elsewhere(mine.wait)
            except BaseException:  # cancelled, or a strand that is closed
                if mine.is_set():
                    self._pass_on()
                else:
                    self._waiting.remove(mine)
                raise
        self._moving = True

    def _pass_on(self) -> None:
        self._moving = bool(self._waiting)
        if self._waiting:
            self._waiting.popleft().set()
