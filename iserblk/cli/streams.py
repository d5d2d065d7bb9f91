"""Standard input and output as ends of a copy: ``-``.

Bytes come and go in order, without a seek. A thread reads or writes, and may have to wait for the
program at the other end of a pipe for as long as that likes; a signal does not wait for the thread.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import trio

from iserblk.cli.endpoints import Opened
from iserblk.errors import BadArgument, IserblkError
from iserblk.loop.blocking import readable, writable

T = TypeVar("T")


class Stream(Opened):
    """A descriptor of this process. ``size``: the bytes that are left of a file; None: not known,
    as of a pipe. ``done``: how many were read or written. The descriptor stays open."""

    def __init__(self, fd: int, path: str) -> None:
        """``path`` names it in messages. Raises BadArgument for a terminal."""
        if os.isatty(fd):
            remedy = "give it a file (< FILE)" if path == "stdin" else "write a file (> FILE)"
            raise BadArgument(f"{path} is a terminal: {remedy}, or a pipe")
        super().__init__(fd, path)
        self.done = 0
        mode = os.fstat(fd).st_mode
        self._seekable = stat.S_ISREG(mode) or stat.S_ISBLK(mode)
        self.size: int | None = None
        if self._seekable:
            here = os.lseek(fd, 0, os.SEEK_CUR)
            self.size = max(os.lseek(fd, 0, os.SEEK_END) - here, 0)
            os.lseek(fd, here, os.SEEK_SET)

    async def lock(self, to_write: bool) -> None:
        """A file may be behind it. Raises Busy."""
        if self._seekable:
            await super().lock(to_write)

    async def read_into(self, buffer: memoryview) -> int:
        """Fill ``buffer``; returns how many bytes there were, fewer only at the end. Raises
        IserblkError."""
        done = 0
        while done < len(buffer):
            count = await self._call(partial(os.readv, self.fd, [buffer[done:]]), readable)
            if not count:
                break
            done += count
            self.done += count
        return done

    async def write(self, buffer: memoryview) -> None:
        """Raises IserblkError, also where the reader has gone."""
        done = 0
        while done < len(buffer):
            count = await self._call(partial(os.write, self.fd, buffer[done:]), writable)
            done += count
            self.done += count

    async def flush(self) -> None:
        """Write a file to the disk. What has gone into a pipe is the other program's."""
        if self._seekable:
            await self._call(partial(os.fsync, self.fd), writable)

    async def _call(self, function: Callable[[], T], wait: Callable[[int, None], bool]) -> T:
        def call() -> T:
            while True:
                try:
                    return function()
                except BlockingIOError:  # another program has made the pipe so
                    wait(self.fd, None)

        try:
            return await trio.to_thread.run_sync(call, abandon_on_cancel=True)
        except BrokenPipeError:
            raise IserblkError(
                f"{self.path} was closed after {self.done} bytes: not all was taken"
            ) from None
        except OSError as error:
            words = error.strerror
            if error.errno == errno.EBADF:
                words = "it is closed"
            raise IserblkError(f"{self.path}: {words}, after {self.done} bytes") from None


def is_stream(place: Sequence[str]) -> bool:
    return list(place) == ["-"]
