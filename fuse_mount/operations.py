"""The FUSE file system: a directory with one file per LUN.

Many requests run at once, as strands of pyfuse3's session loop. Code between two awaits is atomic.
Requests may await only the methods of disks, nothing of trio (iserblk/waiting/strands.py). The only
exception that may leave a method is FUSEError: any other ends the whole mount.

A file behaves like a block device. Its size is fixed: O_TRUNC and truncation change nothing. A
write at the end fails with ENOSPC; a read there returns nothing.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import time
from collections.abc import Mapping, Sequence
from typing import NoReturn

import pyfuse3
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

from fuse_mount.options import MountOptions
from iserblk.disk.seam import AsyncDisk
from iserblk.errors import IserblkError

log = logging.getLogger(__name__)

# The largest request: libfuse 3 asks the kernel for 256 pages.
MAX_REQUEST = 1 << 20

# Seconds. Names and the number of files never change; sizes may, when a LUN grows at the target.
_ENTRY_TIMEOUT = 3600.0
_ATTR_TIMEOUT = 1.0
# Seconds, at least, between two requests to the target for a size. (A target reports a change only
# in the answer to a command: without asking, an idle LUN would not grow here until it is read.)
_ASK_S = 0.5

_FIRST_LUN = pyfuse3.ROOT_INODE + 1


class LunFiles(pyfuse3.Operations):
    """The operations of the file system. Inodes never change: the directory is ROOT_INODE, file
    ``n`` is ROOT_INODE + 1 + n. A file handle is the number of the file, so no state is kept per
    open file.

    Operations that are not overridden answer ENOSYS, and the kernel never calls them again. This
    saves a request for extended attributes per write, and the flush at close(2), which need not
    reach the disk.
    """

    def __init__(self, disks: Mapping[str, AsyncDisk], options: MountOptions) -> None:
        super().__init__()
        self._names = [os.fsencode(name) for name in disks]
        self._disks = list(disks.values())
        self._options = options
        now = time.time_ns()
        self._started_ns = now
        self._modified_ns = [now] * len(self._disks)
        self._idle_buffers: list[memoryview] = []
        self._asked = [float("-inf")] * len(self._disks)

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
        disk = self._disks[number]
        read_only = disk.info.read_only or options.read_only
        entry = EntryAttributes()
        entry.st_ino = InodeT(_FIRST_LUN + number)
        entry.st_mode = ModeT(stat.S_IFREG | (0o444 if read_only else 0o666) & ~options.umask)
        entry.st_nlink = 1
        entry.st_uid, entry.st_gid = options.uid, options.gid
        entry.st_size = disk.size
        # A hint for cp and dd: the largest request that is not split. By st_blocks, nothing is a
        # hole.
        entry.st_blksize = min(MAX_REQUEST, disk.info.max_transfer)
        entry.st_blocks = disk.size // 512
        entry.st_atime_ns = entry.st_mtime_ns = entry.st_ctime_ns = self._modified_ns[number]
        entry.entry_timeout = _ENTRY_TIMEOUT
        entry.attr_timeout = _ATTR_TIMEOUT
        return entry

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

    async def _ask_size(self, number: int) -> None:
        """Ask the target for the size, unless that was done a moment ago, or another request is
        doing it. If the target does not answer, the known size stays."""
        now = time.monotonic()
        if now >= self._asked[number] + _ASK_S:
            self._asked[number] = float("inf")
            try:
                await self._disks[number].refresh()
            except IserblkError as error:
                log.info("size: %s", error)
            finally:
                self._asked[number] = time.monotonic()

    async def getattr(self, inode: InodeT, ctx: RequestContext) -> EntryAttributes:
        if inode != pyfuse3.ROOT_INODE:
            await self._ask_size(inode - _FIRST_LUN)
        return self._attributes(inode)

    async def setattr(
        self,
        inode: InodeT,
        attr: EntryAttributes,
        fields: SetattrFields,
        fh: FileHandleT | None,
        ctx: RequestContext,
    ) -> EntryAttributes:
        """Set the modification time. A size up to that of the LUN is accepted and changes nothing;
        a larger size fails with EFBIG. Owner and mode cannot be changed (EPERM)."""
        if fields.update_mode or fields.update_uid or fields.update_gid:
            raise FUSEError(errno.EPERM)
        if inode != pyfuse3.ROOT_INODE:
            number = inode - _FIRST_LUN
            if fields.update_size and attr.st_size > self._disks[number].size:
                await self._ask_size(number)
                if attr.st_size > self._disks[number].size:
                    raise FUSEError(errno.EFBIG)
            if fields.update_mtime:
                self._modified_ns[number] = attr.st_mtime_ns
        return self._attributes(inode)

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
        answer.f_blocks = sum(disk.size for disk in self._disks) // 4096
        answer.f_files = len(self._disks)
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
        number = inode - _FIRST_LUN
        read_only = self._options.read_only or self._disks[number].info.read_only
        if read_only and flags & os.O_ACCMODE != os.O_RDONLY:
            raise FUSEError(errno.EROFS)
        return FileInfo(
            fh=FileHandleT(number),
            direct_io=self._options.direct_io,
            keep_cache=self._options.keep_cache,
        )

    async def release(self, fh: FileHandleT) -> None:
        return

    async def read(self, fh: FileHandleT, off: int, size: int) -> memoryview:  # type: ignore[override]
        """Read into a reused buffer, which belongs to this object.

        pyfuse3 accepts any buffer, and hands it to the kernel before it awaits anything. So another
        request may reuse the buffer as soon as this returns, although the reply is sent from it. A
        new bytearray of 1 MiB costs 256 page faults, about as much as the whole protocol.
        """
        disk = self._disks[fh]
        if off + size > disk.size:
            await self._ask_size(fh)
        size = min(size, disk.size - off)
        if size <= 0:
            return memoryview(b"")
        buffer = self._idle_buffers.pop() if self._idle_buffers else new_buffer()
        try:
            await disk.read_into(buffer[:size], off)
        except Exception as error:
            _fail(error, "read")
        finally:
            self._idle_buffers.append(buffer)
        return buffer[:size]

    async def write(self, fh: FileHandleT, off: int, buf: bytes) -> int:
        disk = self._disks[fh]
        data = memoryview(buf)
        if off + len(data) > disk.size:
            await self._ask_size(fh)
        room = disk.size - off
        if len(data) > room:
            if room <= 0:
                raise FUSEError(errno.ENOSPC)
            data = data[:room]
        try:
            await disk.write(data, off)
        except Exception as error:
            _fail(error, "write")
        self._modified_ns[fh] = time.time_ns()
        return len(data)

    async def fsync(self, fh: FileHandleT, datasync: bool) -> None:
        try:
            await self._disks[fh].flush()
        except Exception as error:
            _fail(error, "fsync")

    async def fsyncdir(self, fh: FileHandleT, datasync: bool) -> None:
        """fsync of the directory: flush every LUN that was written."""
        for number, disk in enumerate(self._disks):
            if disk.dirty:
                await self.fsync(FileHandleT(number), datasync)

    async def flush_all(self) -> Sequence[str]:
        """Flush every LUN that was written since its last flush. Returns the errors, one line for
        each LUN that failed."""
        failed = []
        for name, disk in zip(self._names, self._disks, strict=True):
            # (For a LUN without a write cache, the disk sends no command.)
            if disk.dirty:
                try:
                    await disk.flush()
                except IserblkError as error:
                    failed.append(f"{os.fsdecode(name)}: the last flush failed: {error}")
        return failed


def new_buffer() -> memoryview:
    return memoryview(bytearray(MAX_REQUEST))


def _fail(error: Exception, what: str) -> NoReturn:
    """Convert an error of the disk to FUSEError with its errno. A bug becomes EIO, and a traceback
    in the log."""
    if isinstance(error, IserblkError):
        log.warning("%s: %s", what, error)
        raise FUSEError(error.errno) from None
    log.error("%s: internal error", what, exc_info=error)
    raise FUSEError(errno.EIO) from None
