"""A pyfuse3 file system with one file that does nothing: the ceiling of our FUSE front-end.

    python null_fuse.py MOUNTPOINT BYTES        in the foreground, until SIGTERM or SIGINT

The file is called ``null``; it reads as zeroes and accepts writes of up to 1 MiB per request.
"""

from __future__ import annotations

import errno
import os
import signal
import stat
import sys

import pyfuse3
import trio

_NAME = b"null"
_INODE = pyfuse3.ROOT_INODE + 1
_ZEROES = bytes(1 << 20)


class NullFile(pyfuse3.Operations):
    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size

    async def getattr(self, inode: int, _context: object = None) -> pyfuse3.EntryAttributes:
        entry = pyfuse3.EntryAttributes()
        entry.st_ino = inode
        entry.st_uid = os.getuid()
        entry.st_gid = os.getgid()
        if inode == pyfuse3.ROOT_INODE:
            entry.st_mode = stat.S_IFDIR | 0o755
        else:
            entry.st_mode = stat.S_IFREG | 0o600
            entry.st_size = self._size
        return entry

    async def lookup(
        self, parent: int, name: bytes, context: object = None
    ) -> pyfuse3.EntryAttributes:
        if parent != pyfuse3.ROOT_INODE or name != _NAME:
            raise pyfuse3.FUSEError(errno.ENOENT)
        return await self.getattr(_INODE)

    async def setattr(
        self, inode: int, _attr: object, _fields: object, _fh: object, _context: object
    ) -> pyfuse3.EntryAttributes:
        return await self.getattr(inode)

    async def open(self, inode: int, _flags: int, _context: object) -> pyfuse3.FileInfo:
        return pyfuse3.FileInfo(fh=inode, direct_io=True)

    async def read(self, _fh: int, offset: int, size: int) -> bytes:
        size = min(size, self._size - offset)
        return _ZEROES if size == len(_ZEROES) else bytes(size)

    async def write(self, _fh: int, _offset: int, data: bytes) -> int:
        return len(data)


async def main(mountpoint: str, size: int) -> None:
    options = {*pyfuse3.default_options, "fsname=null"}
    pyfuse3.init(NullFile(size), mountpoint, options)
    try:
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(pyfuse3.main)
                async for _signal in signals:
                    nursery.cancel_scope.cancel()
                    break
    finally:
        pyfuse3.close(unmount=True)


if __name__ == "__main__":
    trio.run(main, sys.argv[1], int(sys.argv[2]))
