"""The face of a simulated world that is a file: the product's operations of a FUSE mount above the
disk, called as the kernel calls them, without a kernel and without a mount.

Each open file description is one who flushes (``Hearer``) to the history: open begins it, release
ends it, and fsync tells it of each loss once. The kernel waits for each answer, and releases a
description when all of its requests are answered: so none goes unheard. FUSE has no FUA: here it is
O_SYNC, a write with an fsync of the same description behind it. It has no zeroes, trims or extents,
either: in their place a description is closed and another one opened, the directory is fsynced, or
the attributes are asked for.

Truncation is left out. The end belongs to the file, not to a description: what a write behind it
makes zero depends on the order in which the product takes the requests of several programs, which
it tells nobody. (tests/fuse_mount/test_lun_file.py is about the end.)
"""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from random import Random
from typing import Any, Final, TypeVar

import pyfuse3
import trio
from outcome import Error, Outcome, Value
from pyfuse3 import FileHandleT, FUSEError, InodeT

from fuse_mount.operations import LunFiles
from fuse_mount.options import MountOptions
from iserblk.disk.ending import EndOfUse
from iserblk.disk.seam import AsyncDisk
from iserblk.loop.strands import Strands, open_strands
from tests.simulation.faces import (
    CLOSED_UNFLUSHED,
    EXTENTS,
    FLUSH,
    FUA,
    LEFT_BEHIND,
    READ,
    READS_AT_ONCE,
    TOLD_AT_THE_END,
    TOLD_BY_FSYNC,
    TOLD_BY_FSYNCDIR,
    TOLD_EACH,
    WRITE,
    Around,
)
from tests.simulation.history import Hearer, Wrong
from tests.simulation.nbd_wire import Gone

T = TypeVar("T")

NAME: Final = "lun0"
FILE: Final = InodeT(pyfuse3.ROOT_INODE + 1)
# Of a target that does not come in time. (EIO may be a loss, too.)
LATE: Final = frozenset((errno.ETIMEDOUT, errno.ECONNRESET, errno.ECONNREFUSED, errno.EPROTO))
_NO_CONTEXT: Final[Any] = None  # of the request: the product does not ask who it is


class _File:
    """An open file description. ``users``: requests under way. ``waits_for``: it has to hear of a
    loss that another one was told of, while both were open. ``inherits``: a file that was closed
    before it was opened had not heard of a loss."""

    def __init__(self, handle: FileHandleT, hearer: Hearer) -> None:
        self.handle = handle
        self.hearer = hearer
        self.users = 0
        self.is_dirty = False
        self.is_closed = False
        self.waits_for = False
        self.inherits = False


class FuseFace:
    """``places``: open files at a time. ``seed``: of all that is decided here."""

    def __init__(
        self, around: Around, disk: AsyncDisk, ending: EndOfUse, places: int, seed: str
    ) -> None:
        self._around = around
        self._chance = Random(f"fuse {seed}")
        self._disk = disk
        self._size = disk.size
        self._files = LunFiles({NAME: disk}, MountOptions(), ending)
        self._places: list[_File | None] = [None] * places
        self._opening = [trio.Lock() for _ in range(places)]
        self._open: dict[_File, None] = {}
        self._reads = 0
        self._has_left = False
        self._strands: Strands

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """At the end all is closed and, unless the machine has died, flushed."""
        async with open_strands() as self._strands:
            yield
            for number in range(len(self._places)):
                await self._close(number)
            if self._open or self._files.written_to:
                raise Wrong(f"{len(self._open)} files are open; {self._files.written_to}")
            await self._files.all_closed()
            if not self._around.is_over():
                await self._flush_last()

    def die(self) -> None:
        """The requests end by themselves."""

    async def _call(self, request: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """As pyfuse3's loop does: in a strand."""
        ended = trio.Event()
        result: list[Outcome[T]] = []

        async def body() -> None:
            try:
                result.append(Value(await request()))
            except Exception as error:
                result.append(Error(error))
            ended.set()

        self._strands.start_soon(body)
        await ended.wait()
        value: T = result[0].unwrap()  # (outcome has no types)
        return value

    # -- open files -------------------------------------------------------------------------------

    async def _file(self, number: int) -> _File:
        """That of a place, opened if there is none; ``_done`` is to follow."""
        async with self._opening[number]:
            file = self._places[number]
            if file is None:
                flags = os.O_RDONLY if number == 1 else os.O_RDWR
                file = await self._call(lambda: self._opened(flags))
                self._places[number] = file
            file.users += 1
            return file

    async def _opened(self, flags: int) -> _File:
        files = self._files
        entry = await files.lookup(pyfuse3.ROOT_INODE, os.fsencode(NAME), _NO_CONTEXT)
        if entry.st_ino != FILE:
            raise Wrong(f"the file is inode {entry.st_ino}")
        info = await files.open(FILE, flags, _NO_CONTEXT)
        if not info.direct_io:
            raise Wrong("the kernel caches what is in the file")
        file = _File(info.fh, self._around.history.begin_hearer())
        file.inherits = self._has_left and bool(file.hearer.owed)
        self._open[file] = None
        self._around.trace("file %d is open", info.fh)
        return file

    async def _done(self, file: _File) -> None:
        file.users -= 1
        if file.is_closed and not file.users:
            await self._call(lambda: self._release(file))

    async def _close(self, number: int) -> None:
        """close(2); the kernel releases the file behind its last request."""
        file, self._places[number] = self._places[number], None
        if file is not None:
            file.is_closed = True
            file.users += 1
            await self._done(file)

    async def _release(self, file: _File) -> None:
        if file.is_dirty:
            self._around.count(CLOSED_UNFLUSHED)
        self._has_left = self._has_left or bool(file.hearer.owed)
        await self._files.release(file.handle)
        self._around.history.end_hearer(file.hearer)
        del self._open[file]
        self._around.trace("file %d is closed", file.handle)

    # -- requests ---------------------------------------------------------------------------------

    async def operate(self, chance: Random, kind: str, at: int, count: int) -> None:
        """Raises Wrong; Gone where the machine has died."""
        number = chance.randrange(len(self._places))
        if kind == EXTENTS:
            await self._call(self._fsyncdir if chance.random() < 0.5 else self._getattr)
            return
        if kind not in (READ, WRITE, FUA, FLUSH):
            await self._close(number)
            return
        if kind in (WRITE, FUA) and number == 1:  # it is open for reading
            number = 0
        file = await self._file(number)
        try:
            if kind == READ:
                await self._call(lambda: self._read(file, at, count))
                return
            if kind != FLUSH:
                done = await self._call(lambda: self._write(file, kind, at, count))
                if kind == WRITE or not done:
                    return
            await self._call(lambda: self._fsync(file))
        finally:
            await self._done(file)

    async def _read(self, file: _File, at: int, count: int) -> None:
        history, now, size = self._around.history, self._around.loop.now, self._around.history.size
        read = history.begin_read(at, now())
        data = None
        self._reads += 1
        if self._reads > 1:
            self._around.count(READS_AT_ONCE)
        try:
            answer = await self._files.read(file.handle, self._around.place(at), count * size)
            data = bytes(answer)  # before the next request uses the buffer
            if len(data) != count * size:
                raise Wrong(f"a read of {count * size} bytes returns {len(data)}")
        except FUSEError as error:
            self._check_refusal(READ, error)
        finally:
            self._reads -= 1
        self._around.look()
        history.end_read(read, data, now())

    async def _write(self, file: _File, kind: str, at: int, count: int) -> bool:
        """Returns whether it has succeeded."""
        history, now = self._around.history, self._around.loop.now
        change = history.begin_change(at, count, now())
        self._around.trace("version %d, %d at %d", change.version, count, at)
        data = history.data(change)
        done = True
        try:
            written = await self._files.write(file.handle, self._around.place(at), data)
            if written != len(data):
                raise Wrong(f"a write of {len(data)} bytes has written {written}")
        except FUSEError as error:
            self._check_refusal(kind, error)
            done = False
        self._around.look()
        file.is_dirty = file.is_dirty or done
        history.end_change(change, now(), done)
        return done

    async def _fsync(self, file: _File) -> None:
        begun = self._around.loop.now()
        try:
            await self._files.fsync(file.handle, self._chance.random() < 0.5)
        except FUSEError as error:
            if not self._has_told(error):
                return
            self._around.count(TOLD_BY_FSYNC)
            if file.waits_for:
                self._around.count(TOLD_EACH)
            if file.inherits:
                self._around.count(LEFT_BEHIND)
            owed = {each for each in self._open if each.hearer.owed and each is not file}
            for each in owed:
                each.waits_for = True
            file.waits_for = file.inherits = self._has_left = False
            self._end_with_loss(begun, file.hearer)
        else:
            file.is_dirty = False
            self._around.history.end_flush(begun, self._around.loop.now(), file.hearer)

    async def _fsyncdir(self) -> None:
        """For one who begins now, and has no file open."""
        history, now = self._around.history, self._around.loop.now
        begun, hearer = now(), history.begin_hearer()
        try:
            await self._files.fsyncdir(FileHandleT(pyfuse3.ROOT_INODE), False)
        except FUSEError as error:
            if self._has_told(error):
                self._around.count(TOLD_BY_FSYNCDIR)
                self._end_with_loss(begun, hearer)
            hearer.owed.clear()  # nobody takes its place: the next one begins anew, too
        else:
            history.end_flush(begun, now(), hearer)
        history.end_hearer(hearer)

    async def _getattr(self) -> None:
        entry = await self._files.getattr(FILE, _NO_CONTEXT)
        if entry.st_size != self._size:
            raise Wrong(f"the file has {entry.st_size} bytes, and the LUN {self._size}")

    async def _flush_last(self) -> None:
        """At the end of the mount, which tells its user."""
        history, now = self._around.history, self._around.loop.now
        begun, hearer = now(), history.begin_hearer()
        told = list(await self._files.flush_all())
        if self._around.is_over():
            return
        self._around.look()
        if told != list(self._files.not_flushed()):
            raise Wrong(f"the last flush tells {told}, and then {self._files.not_flushed()}")
        if told:
            self._around.trace("the last flush of the files: %s", told[0])
            self._around.count(TOLD_AT_THE_END)
            failed = self._around.may_fail(FLUSH)
            # The disk cannot know that the user has read it.
            history.end_flush_with_loss(begun, now(), failed, hearer, False)
        else:
            history.end_flush(begun, now(), hearer)
        history.end_hearer(hearer)

    # -- errors -----------------------------------------------------------------------------------

    def _has_told(self, error: FUSEError) -> bool:
        """Whether a flush that has failed may have told of a loss. Raises Wrong, and Gone."""
        if self._around.is_over():
            raise Gone from error
        self._around.look()
        if error.errno in LATE:
            self._check_refusal(FLUSH, error)
            return False
        if error.errno != errno.EIO:
            raise Wrong(f"an fsync fails with {errno.errorcode[error.errno]}")
        return True

    def _end_with_loss(self, begun: float, hearer: Hearer) -> None:
        self._around.trace("an fsync tells of a loss")
        failed = self._around.may_fail(FLUSH)
        self._around.history.end_flush_with_loss(begun, self._around.loop.now(), failed, hearer)

    def _check_refusal(self, kind: str, error: FUSEError) -> None:
        name = errno.errorcode[error.errno]
        if self._around.is_over():
            return
        if error.errno not in LATE | {errno.EIO} or not self._around.may_fail(kind):
            raise Wrong(f"{kind} fails with {name}")
        self._around.trace("%s fails with %s", kind, name)
