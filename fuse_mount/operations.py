"""The FUSE file system: a directory with one file per LUN.

Many requests run at once, as strands of pyfuse3's session loop. Code between two awaits is atomic.
Requests may await only the methods of disks, nothing of trio (iserblk/loop/strands.py). The only
exception that may leave a method is FUSEError: any other ends the whole mount.

A file behaves like a block device. Its size is fixed: a write at the end fails with ENOSPC; a read
there returns nothing. Truncation sets an end, behind which holes read as zeroes (lun_file.py).
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import stat
from collections.abc import Mapping, Sequence
from typing import NoReturn

import pyfuse3
import trio
from pyfuse3 import (
    EntryAttributes,
    FileHandleT,
    FileInfo,
    FileNameT,
    FlagT,
    FUSEError,
    InodeT,
    ModeT,
    ReaddirToken,
    RequestContext,
    SetattrFields,
    StatvfsData,
)

from fuse_mount.lun_file import NO_END, LunFile
from fuse_mount.options import MountOptions
from iserblk.disk.ending import EndOfUse, all_unflushed, last_flush_failed, not_flushed
from iserblk.disk.seam import AsyncDisk, FlushClient
from iserblk.errors import CommandTimeout, IserblkError
from iserblk.loop.clock import since_epoch_ns

log = logging.getLogger(__name__)

# The largest request: libfuse 3 asks the kernel for 256 pages.
MAX_REQUEST = 1 << 20

# Seconds. Names and the number of files never change; sizes may, when a LUN grows at the target.
_ENTRY_TIMEOUT = 3600.0
_ATTR_TIMEOUT = 1.0

_FIRST_LUN = pyfuse3.ROOT_INODE + 1


class LunFiles(pyfuse3.Operations):
    """The operations of the file system. Inodes never change: the directory is ROOT_INODE, file
    ``n`` is ROOT_INODE + 1 + n. Each open file description has a handle of its own, which is never
    used again. It is a client of the LUN, and hears of each loss of writes once, by fsync.

    Operations that are not overridden answer ENOSYS, and the kernel never calls them again. This
    saves a request for extended attributes per write, and the flush at close(2). As with a file
    system of Linux's, close neither writes anything nor tells of a loss: the file description that
    ends leaves it to those that are opened later.
    """

    def __init__(
        self,
        disks: Mapping[str, AsyncDisk],
        options: MountOptions,
        ending: EndOfUse | None = None,
    ) -> None:
        super().__init__()
        self._ending = ending or EndOfUse()
        self._files = [LunFile(name, disk) for name, disk in disks.items()]
        self._names = [file.name for file in self._files]
        self._failures: dict[FileNameT, str] = {}  # of the last flushes, by file
        self._options = options
        self._started_ns = since_epoch_ns()
        self._idle_buffers: list[memoryview] = []
        self._open: dict[int, LunFile] = {}  # by handle
        self._writable: set[int] = set()  # of these
        self._closed = trio.Event()
        self._clients: dict[int, FlushClient] = {}  # by handle
        self._handles = itertools.count()

    # --- names and attributes ---

    def _directory(self) -> EntryAttributes:
        options = self._options
        entry = EntryAttributes()
        entry.st_ino = pyfuse3.ROOT_INODE
        entry.st_mode = ModeT(stat.S_IFDIR | 0o777 & ~options.umask)
        entry.st_nlink = 2
        entry.st_uid, entry.st_gid = options.uid, options.gid
        entry.st_atime_ns = entry.st_mtime_ns = entry.st_ctime_ns = self._started_ns
        entry.entry_timeout = entry.attr_timeout = _ENTRY_TIMEOUT
        return entry

    def _file(self, number: int) -> EntryAttributes:
        options = self._options
        file = self._files[number]
        disk = file.disk
        entry = EntryAttributes()
        entry.st_ino = InodeT(_FIRST_LUN + number)
        entry.st_mode = ModeT(
            stat.S_IFREG | (0o444 if self._read_only(file) else 0o666) & ~options.umask
        )
        entry.st_nlink = 1
        entry.st_uid, entry.st_gid = options.uid, options.gid
        end = file.shown_end
        size = min(end, disk.size)
        entry.st_size = size
        # A hint for cp and dd: the largest request that is not split. By st_blocks, nothing is a
        # hole.
        entry.st_blksize = min(MAX_REQUEST, disk.info.max_transfer)
        entry.st_blocks = -(-size // 512)
        entry.st_atime_ns = entry.st_mtime_ns = entry.st_ctime_ns = file.modified_ns
        entry.entry_timeout = _ENTRY_TIMEOUT
        # What is shown of an end holds for the moment: it goes with the last close(2).
        entry.attr_timeout = _ATTR_TIMEOUT if end == NO_END else 0.0
        return entry

    def _read_only(self, file: LunFile) -> bool:
        return self._options.read_only or file.disk.info.read_only

    def _attributes(self, inode: InodeT) -> EntryAttributes:
        if inode == pyfuse3.ROOT_INODE:
            return self._directory()
        return self._file(inode - _FIRST_LUN)

    async def lookup(
        self, parent_inode: InodeT, name: FileNameT, ctx: RequestContext
    ) -> EntryAttributes:
        if name not in self._names:
            raise FUSEError(errno.ENOENT)
        return self._file(self._names.index(name))

    async def getattr(self, inode: InodeT, ctx: RequestContext) -> EntryAttributes:
        if inode != pyfuse3.ROOT_INODE:
            await self._files[inode - _FIRST_LUN].ask_size()
        return self._attributes(inode)

    async def setattr(
        self,
        inode: InodeT,
        attr: EntryAttributes,
        fields: SetattrFields,
        fh: FileHandleT | None,
        ctx: RequestContext,
    ) -> EntryAttributes:
        """Set the modification time, or the end: a size up to that of the LUN; a larger size fails
        with EFBIG. Owner and mode cannot be changed (EPERM)."""
        if fields.update_mode or fields.update_uid or fields.update_gid:
            raise FUSEError(errno.EPERM)
        if inode != pyfuse3.ROOT_INODE:
            file = self._files[inode - _FIRST_LUN]
            if fields.update_size:
                await self._truncate(file, attr.st_size, fh)
            if fields.update_mtime:
                file.modified_ns = attr.st_mtime_ns
        return self._attributes(inode)

    async def _truncate(self, file: LunFile, size: int, handle: int | None) -> None:
        if self._read_only(file):
            raise FUSEError(errno.EROFS)
        if size > file.disk.size:
            await file.ask_size()
            if size > file.disk.size:
                raise FUSEError(errno.EFBIG)
        try:
            await file.truncate(size, handle)
        except Exception as error:
            _fail(error, "truncate")

    async def opendir(self, inode: InodeT, ctx: RequestContext) -> FileHandleT:
        return FileHandleT(inode)

    async def readdir(self, fh: FileHandleT, start_id: int, token: ReaddirToken) -> None:
        for number in range(start_id, len(self._names)):
            entry = self._file(number)
            if not pyfuse3.readdir_reply(token, self._names[number], entry, number + 1):
                return

    async def releasedir(self, fh: FileHandleT) -> None:
        return

    async def statfs(self, ctx: RequestContext) -> StatvfsData:
        """The sizes of all LUNs together; nothing is free, as on a partitioned disk."""
        answer = StatvfsData()
        answer.f_bsize = answer.f_frsize = 4096
        answer.f_blocks = sum(file.disk.size for file in self._files) // 4096
        answer.f_files = len(self._files)
        answer.f_namemax = 255
        return answer

    # Files cannot be created, removed or renamed.

    async def create(self, *_: object) -> NoReturn:
        raise FUSEError(errno.EPERM)

    async def mknod(self, *_: object) -> NoReturn:
        raise FUSEError(errno.EPERM)

    async def mkdir(self, *_: object) -> NoReturn:
        raise FUSEError(errno.EPERM)

    async def symlink(self, *_: object) -> NoReturn:
        raise FUSEError(errno.EPERM)

    async def link(self, *_: object) -> NoReturn:
        raise FUSEError(errno.EPERM)

    async def unlink(self, *_: object) -> NoReturn:
        raise FUSEError(errno.EPERM)

    async def rmdir(self, *_: object) -> NoReturn:
        raise FUSEError(errno.EPERM)

    async def rename(self, *_: object) -> NoReturn:
        raise FUSEError(errno.EPERM)

    # --- data ---

    async def open(self, inode: InodeT, flags: FlagT, ctx: RequestContext) -> FileInfo:
        file = self._files[inode - _FIRST_LUN]
        if flags & os.O_ACCMODE != os.O_RDONLY and self._read_only(file):
            raise FUSEError(errno.EROFS)
        handle = next(self._handles)
        if flags & os.O_TRUNC:  # else the kernel asks for it by setattr
            await self._truncate(file, 0, handle)
        file.opened(handle, flags)
        self._open[handle] = file
        if flags & os.O_ACCMODE != os.O_RDONLY:
            self._writable.add(handle)
        self._clients[handle] = file.disk.new_client()
        return FileInfo(
            fh=FileHandleT(handle),
            direct_io=self._options.direct_io,
            keep_cache=self._options.keep_cache,
        )

    async def release(self, fh: FileHandleT) -> None:
        self._open.pop(fh).closed(fh)
        self._writable.discard(fh)
        if not self._writable:
            self._closed.set()
        self._clients.pop(fh).ended()

    async def read(self, fh: FileHandleT, off: int, size: int) -> memoryview:  # type: ignore[override]
        """Read into a reused buffer, which belongs to this object.

        pyfuse3 accepts any buffer, and hands it to the kernel before it awaits anything. So another
        request may reuse the buffer as soon as this returns, although the reply is sent from it. A
        new bytearray of 1 MiB costs 256 page faults, about as much as the whole protocol.
        """
        file = self._open[fh]
        disk = file.disk
        if off + size > disk.size:
            await file.ask_size()
        size = min(size, disk.size - off)
        if size <= 0:
            return memoryview(b"")
        if off + size > file.end:
            file.read_behind(fh, off, off + size)
        buffer = self._idle_buffers.pop() if self._idle_buffers else new_buffer()
        try:
            await disk.read_into(buffer[:size], off)
        except Exception as error:
            _fail(error, "read")
        finally:
            self._idle_buffers.append(buffer)
        return buffer[:size]

    async def write(self, fh: FileHandleT, off: int, buf: bytes) -> int:
        file = self._open[fh]
        disk = file.disk
        data = memoryview(buf)
        if off + len(data) > disk.size:
            await file.ask_size()
        room = disk.size - off
        if len(data) > room:
            if room <= 0:
                raise FUSEError(errno.ENOSPC)
            data = data[:room]
        try:
            if off + len(data) > file.end:
                await file.write_behind(data, off)
            else:
                await disk.write(data, off)
        except Exception as error:
            _fail(error, "write")
        file.modified_ns = since_epoch_ns()
        return len(data)

    async def fsync(self, fh: FileHandleT, datasync: bool) -> None:
        await _flush(self._open[fh].disk, self._clients[fh])

    async def fsyncdir(self, fh: FileHandleT, datasync: bool) -> None:
        """fsync of the directory: flush every LUN that was written, for a client that begins now.
        Fails with ETIMEDOUT where a target that is away was given up, because the mount is to
        end."""
        for file in self._files:
            if file.disk.dirty:
                try:
                    await _flush(file.disk, file.disk.new_client())
                except FUSEError:
                    if self._ending.given_up():
                        raise FUSEError(errno.ETIMEDOUT) from None
                    raise

    async def flush_all(self) -> Sequence[str]:
        """Flush every LUN that was written since its last flush, all at once: a target that is away
        holds up no other. Nothing is open any more. Returns the errors, one line for each LUN that
        failed, or has lost writes of which a client that has ended was not told."""
        for client in self._clients.values():
            client.ended()
        self._failures.clear()
        async with trio.open_nursery() as flushes:
            for file in self._files:
                # (For a LUN without a write cache, the disk sends no command.)
                if file.disk.dirty:
                    flushes.start_soon(self._flush_last, file)
        return self._failed()

    async def _flush_last(self, file: LunFile) -> None:
        try:
            await file.disk.flush(file.disk.new_client())
        except IserblkError as error:
            name = os.fsdecode(file.name)
            self._failures[file.name] = last_flush_failed(name, file.disk, error)

    def _failed(self) -> list[str]:
        return [self._failures[name] for name in self._names if name in self._failures]

    def not_flushed(self) -> Sequence[str]:
        """The same, without a flush; of one that has ended, what it has told."""
        return self._failed() + [
            not_flushed(os.fsdecode(file.name), file.disk)
            for file in self._files
            if file.disk.dirty and file.name not in self._failures
        ]

    @property
    def written_to(self) -> Sequence[str]:
        """The names of the files that programs, or loop devices, have open for writing."""
        used = {self._open[handle].name for handle in self._writable}
        return [os.fsdecode(name) for name in sorted(used)]

    async def all_closed(self) -> None:
        """Wait until no file is open for writing."""
        while self._writable:
            self._closed = trio.Event()
            await self._closed.wait()

    @property
    def unflushed(self) -> int | None:
        """Bytes of all LUNs; None: not known."""
        return all_unflushed(file.disk for file in self._files)


async def _flush(disk: AsyncDisk, client: FlushClient) -> None:
    """The client is told by the reply, which follows at once."""
    try:
        await disk.flush(client)
    except Exception as error:
        if isinstance(error, IserblkError):
            client.told(error.losses)
        _fail(error, "fsync")


def new_buffer() -> memoryview:
    return memoryview(bytearray(MAX_REQUEST))


def _fail(error: Exception, what: str) -> NoReturn:
    """Convert an error of the disk to FUSEError with its errno. A bug becomes EIO, and a traceback
    in the log."""
    if isinstance(error, IserblkError):
        # Of a target that does not answer there is a line already; this one comes for each request.
        told = isinstance(error, CommandTimeout) and error.logged
        log.log(logging.INFO if told else logging.WARNING, "%s: %s", what, error)
        raise FUSEError(error.errno) from None
    log.error("%s: internal error", what, exc_info=error)
    raise FUSEError(errno.EIO) from None
