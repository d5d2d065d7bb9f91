"""The file system: a directory with one file per LUN.

Requests run as strands of pyfuse3's session loop, many at once; code between two awaits is atomic,
and what they await is the disk's, nothing of trio's own (iserblk/waiting/strands.py). The only
exception that may leave a method is FUSEError: any other ends the whole mount.

A file behaves as a block device does: its size is given, O_TRUNC and truncating change nothing,
writing stops at the end with ENOSPC, reading there gives nothing.
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

# Names and the number of files never change; sizes may (a LUN grown at the target).
_ENTRY_TIMEOUT = 3600.0
_ATTR_TIMEOUT = 1.0
# How often the target is asked for a size, at the most. (It reports a change only to a command: an
# idle LUN would not grow here before it is read.)
_ASK_S = 0.5

_FIRST_LUN = pyfuse3.ROOT_INODE + 1


class LunFiles(pyfuse3.Operations):
    """Inodes: the directory is ROOT_INODE, file ``n`` is ROOT_INODE + 1 + n, for ever. A file
    handle is the number of the file, so there is nothing to keep per open file.

    What is not overridden answers ENOSYS; the kernel then stops asking: for extended attributes
    (once per write otherwise), and for flush at close(2), which need not reach the disk.
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
        # A hint for cp and dd: requests that travel whole. st_blocks says that nothing is a hole.
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
        """Bring the size up to date, unless that was done a moment ago or another request is at
        it; what is known already is good enough when the target does not answer."""
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
        """Times may be set; a size at or below the LUN's changes nothing; owner and mode are the
        mount's."""
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
        """As full as a disk that has been partitioned: nothing is free."""
        answer = StatvfsData()
        answer.f_bsize = answer.f_frsize = 4096
        answer.f_blocks = sum(disk.size for disk in self._disks) // 4096
        answer.f_files = len(self._disks)
        answer.f_namemax = 255
        return answer

    # Files are neither made nor removed nor renamed here.

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
        """pyfuse3 takes any buffer, and hands it to the kernel before it awaits anything: so the
        buffer is free for the next request when this returns, though the reply still reads it.

        A fresh bytearray of 1 MiB costs 256 page faults, about as much as the whole protocol.
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
        """Of the directory: all files that were written."""
        for number, disk in enumerate(self._disks):
            if disk.dirty:
                await self.fsync(FileHandleT(number), datasync)

    async def flush_all(self) -> Sequence[str]:
        """Flush every LUN that was written since it was flushed; returns what failed, one line
        each."""
        failed = []
        for name, disk in zip(self._names, self._disks, strict=True):
            # (One without a write cache is sent nothing.)
            if disk.dirty:
                try:
                    await disk.flush()
                except IserblkError as error:
                    failed.append(f"{os.fsdecode(name)}: the last flush failed: {error}")
        return failed


def new_buffer() -> memoryview:
    return memoryview(bytearray(MAX_REQUEST))


def _fail(error: Exception, what: str) -> NoReturn:
    """Turn an error of the disk into the user's errno; one of ours into EIO and a traceback."""
    if isinstance(error, IserblkError):
        log.warning("%s: %s", what, error)
        raise FUSEError(error.errno) from None
    log.error("%s: internal error", what, exc_info=error)
    raise FUSEError(errno.EIO) from None
