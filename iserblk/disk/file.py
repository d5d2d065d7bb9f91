"""A disk as a binary file object of Python: what ``BlockingLun.open`` returns.

Readable by what reads files: tarfile, zipfile, gzip, shutil, pyarrow. A disk has one size, so it is
like a block device, not like a regular file: opening for writing does not empty it, ``truncate``
is not supported, and a write that reaches the end is cut there, or fails with ENOSPC at the end.

Errors are OSErrors, as with every file: the number is the ``errno`` of the IserblkError, which is
the ``__cause__``. Methods of a closed file raise ValueError.
"""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, BinaryIO, cast

from iserblk.disk.seam import BlockingDisk
from iserblk.errors import BadArgument, IserblkError, OutOfRange, WriteProtected

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

BUFFER = 128 << 10  # bytes; a command for each 8 KiB, Python's default, would take most of the time

_MODES = {
    "rb": (True, False),
    "wb": (False, True),
    "r+b": (True, True),
    "rb+": (True, True),
    "w+b": (True, True),
    "wb+": (True, True),
}


@contextmanager
def _as_os_errors() -> Iterator[None]:
    try:
        yield
    except IserblkError as error:
        raise OSError(error.errno, str(error)) from error


class DiskFile(io.RawIOBase):
    """Bytes ``start`` to ``start + length`` of a disk, without a buffer: each call is one request
    to the disk, of any alignment. ``length`` None: to the end, wherever that is by then.

    The position belongs to the file: one thread at a time may use it. Several files of one disk may
    be used at once, as the disk itself.
    """

    def __init__(
        self, disk: BlockingDisk, mode: str, start: int = 0, length: int | None = None
    ) -> None:
        self._disk = disk
        self.mode = mode
        self._readable, self._writable = _MODES[mode]
        self._start = start
        self._length = length
        self._at = 0

    @property
    def name(self) -> str:
        """The export name of the disk, ``lun0``."""
        return self._disk.info.name

    @property
    def size(self) -> int:
        """Bytes."""
        room = max(0, self._disk.size - self._start)
        return room if self._length is None else min(room, self._length)

    def readable(self) -> bool:
        self._check_open()
        return self._readable

    def writable(self) -> bool:
        self._check_open()
        return self._writable

    def seekable(self) -> bool:
        self._check_open()
        return True

    def tell(self) -> int:
        self._check_open()
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Positions behind the end are allowed: there is nothing to read, and no room to write."""
        self._check_open()
        if whence not in (os.SEEK_SET, os.SEEK_CUR, os.SEEK_END):
            raise ValueError(f"whence is 0, 1 or 2, not {whence}")
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self.size}[whence]
        if base + offset < 0:
            raise OSError(errno.EINVAL, f"{self.name}: position {base + offset} is before the file")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        """Fill ``buffer`` from the position on, as far as the file goes; returns the number of
        bytes. Nothing refers to ``buffer`` afterwards."""
        self._check_open()
        if not self._readable:
            raise io.UnsupportedOperation(f"{self.name} is open for writing only")
        with memoryview(buffer) as given, given.cast("B") as view:
            if view.readonly:
                raise TypeError("readinto needs a buffer that can be written to")
            count = max(0, min(len(view), self.size - self._at))
            if count:
                with _as_os_errors(), view[:count] as part:
                    self._disk.read_into(part, self._start + self._at)
                self._at += count
            return count

    def readall(self) -> bytes:
        """The rest of the file, in one request: it has to fit into memory."""
        self._check_open()
        data = bytearray(max(0, self.size - self._at))
        count = self.readinto(data)
        return bytes(data[:count])

    def write(self, data: ReadableBuffer, /) -> int:
        """Write at the position; returns the number of bytes, which is less than ``data`` has where
        the file ends. Not on stable storage before ``flush``. Blocks that are covered in part are
        read, changed and written back under a lock that other hosts do not see."""
        self._check_open()
        if not self._writable:
            raise io.UnsupportedOperation(f"{self.name} is open for reading only")
        with memoryview(data) as given, given.cast("B") as view:
            count = min(len(view), self.size - self._at)
            if count <= 0 < len(view):
                raise OSError(errno.ENOSPC, f"{self.name} ends at byte {self.size}")
            if count > 0:
                with _as_os_errors(), view[:count] as part:
                    self._disk.write(part, self._start + self._at)
                self._at += count
            return max(0, count)

    def flush(self) -> None:
        """Put on stable storage what was written to the disk, through this file or otherwise
        (SYNCHRONIZE CACHE). Does nothing where the file is open for reading only, or nothing was
        changed since the last flush. ``close`` flushes, too; where it raises, data may be lost."""
        self._check_open()
        if self._writable and self._disk.dirty:
            with _as_os_errors():
                self._disk.flush()

    def truncate(self, size: int | None = None, /) -> int:
        self._check_open()
        raise io.UnsupportedOperation(f"{self.name} is a disk: its size cannot be changed")

    def _check_open(self) -> None:
        if self.closed:
            raise ValueError("I/O operation on a closed file")


class BufferedDiskWriter(io.BufferedWriter):
    """``flush``, and so ``close``: SYNCHRONIZE CACHE, too."""

    def flush(self) -> None:
        super().flush()
        self.raw.flush()


class BufferedDiskRandom(io.BufferedRandom):
    """``flush``, and so ``close``: SYNCHRONIZE CACHE, too."""

    def flush(self) -> None:
        super().flush()
        self.raw.flush()


def open_file(
    disk: BlockingDisk,
    mode: str = "rb",
    buffering: int = -1,
    *,
    offset: int = 0,
    length: int | None = None,
) -> BinaryIO:
    """See ``BlockingLun.open``."""
    if mode not in _MODES:
        raise BadArgument(
            f'{disk.info.name}: a disk cannot be opened with mode {mode!r}; give "rb" to read, '
            '"wb" to write, or "r+b" for both'
        )
    readable, writable = _MODES[mode]
    if buffering < -1 or buffering == 1:
        raise BadArgument(
            f"{disk.info.name}: buffering={buffering}: give 0 for none, a size in bytes, or -1"
        )
    if offset < 0 or (length is not None and length < 0) or offset + (length or 0) > disk.size:
        raise OutOfRange(
            f"{disk.info.name}: {'the rest' if length is None else f'{length} bytes'} at offset "
            f"{offset} leave the disk, which has {disk.size} bytes"
        )
    if writable and disk.info.read_only:
        raise WriteProtected(f'{disk.info.name}: the LUN is read-only; open it with "rb"')
    raw = DiskFile(disk, mode, offset, length)
    size = BUFFER if buffering == -1 else buffering
    if size == 0:
        return cast(BinaryIO, raw)
    if not writable:
        return io.BufferedReader(raw, size)
    return BufferedDiskRandom(raw, size) if readable else BufferedDiskWriter(raw, size)
