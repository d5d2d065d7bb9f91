"""The interface of stores, which hold the bytes of a LUN; and FileStore: a file or block device.

Offsets and lengths are bytes within ``size``; the device server has checked them. Any thread may
call any method at any time. Methods raise OSError when a system call fails.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from contextvars import ContextVar
from threading import Lock
from typing import Final, Protocol

from iserblk.files import (
    PUNCH_HOLE,
    ZERO_RANGE,
    fallocate,
    file_system,
    open_witness,
    read_at,
    writeback_error,
)
from iserblk.loop.clock import monotonic
from iserblk.target.store.status import WritebackError

ZEROES = memoryview(bytes(1 << 20))
_STAT_BLOCK: Final = 512  # bytes: the unit of st_blocks
_SECTOR: Final = 4096  # bytes: the largest sector size of devices
_PAGE: Final = 4096  # bytes: of the page cache, or a part of one
_read_at: Final[Callable[[int, memoryview, int, int], int]] = read_at  # bound once, and typed
# Seconds that a call which waits for the disk may take before the disk counts as one that hangs.
STALLED_S: Final = 0.1

# The nexus for which a thread calls methods of Store. For stores whose owners take turns, as those
# of LoopStore's own methods do.
OWNER: Final[ContextVar[object]] = ContextVar("owner", default=None)

# Offset, length, whether it is data (else a hole). Lists of extents are ascending, without gaps.
Extent = tuple[int, int, bool]


OnLoss = Callable[[OSError], None]


def no_loss(_error: OSError) -> None:
    """For a store whose owner does not ask."""


class Store(Protocol):
    """``on_loss``: the owner sets it. Called in any thread when written data may be lost, before
    any call of another thread can miss it; it calls no method of the store."""

    size: int  # bytes of the LUN
    on_loss: OnLoss

    def read_into(self, buffer: memoryview, offset: int, nowait: bool) -> bool:
        """Fill ``buffer``. Raises OSError if the file has become too small. False, only with
        ``nowait``: the read would wait for a disk; the content of ``buffer`` is undefined then."""
        ...

    def write(self, data: memoryview, offset: int, durable: bool, nowait: bool) -> bool:
        """Write all of ``data``. With ``durable`` it is on stable storage at return. False, only
        with ``nowait``: the write would wait for another task, or may wait for a disk; nothing was
        written."""
        ...

    def flush(self) -> None:
        """Bring all that was written, punched or zeroed before to stable storage. Raises OSError
        where any of it may be lost, also if another call at the same time has met the error."""
        ...

    def unmap(self, offset: int, length: int) -> None:
        """Deallocate the space of the range where possible. It reads as zeroes afterwards, if the
        LUN promises that of unmapped blocks (LBPRZ)."""
        ...

    def punch(self, offset: int, length: int) -> None:
        """Make the range read as zeroes; deallocate its space where possible."""
        ...

    def zero(self, offset: int, length: int) -> None:
        """Make the range read as zeroes; keep its space allocated where possible."""
        ...

    def extents(self, offset: int, length: int, limit: int) -> list[Extent]:
        """Which parts of the range are data and which are holes, from ``offset`` on. The result has
        at most ``limit`` entries, so it may end early; it also ends where the file does, if that
        was made smaller. Raises OSError if the range begins behind the end of the file."""
        ...

    def prefetch(self, offset: int, length: int) -> None:
        """Start reading the range into the page cache."""
        ...

    def usage(self) -> tuple[int, int] | None:
        """Bytes that the LUN occupies, and bytes that it may still take, shared with others. None:
        not known. Raises OSError."""
        ...

    def measure(self) -> int:
        """Raise ``size`` if the file has grown. Returns ``size``."""
        ...

    def close(self) -> None: ...


Ended = Callable[[OSError | None], None]


class LoopStore(Store, Protocol):
    """A store whose reads, writes and flushes need no thread: they are begun and ended in the loop
    of the thread that begins commands. Only that thread calls the methods below; those of Store are
    for other threads, and wait; their owner is OWNER.

    ``ended`` is called once when the operation has ended, with its error or None, never before the
    call has returned: only then the store has done with the buffer. ``batch_ended`` is called when
    a number of operations have ended, one after the other: then their answers can leave together.
    The result of a call that begins an operation is for ``give_up``. Operations of different
    ``owner``s, which are nexuses, take turns where they have to wait.
    """

    batch_ended: Callable[[], None]

    def begin_read(
        self, buffer: memoryview, offset: int, owner: object, ended: Ended
    ) -> object: ...

    def begin_write(
        self, data: memoryview, offset: int, durable: bool, owner: object, ended: Ended
    ) -> object: ...

    def begin_flush(self, owner: object, ended: Ended) -> object: ...

    def give_up(self, operation: object) -> None:
        """The result is not wanted any more: end the operation early, if that is possible."""
        ...

    def settle(self, ended: Callable[[], None]) -> None:
        """Call ``ended`` when no operation that has ended until now can change the LUN any more,
        however it ended."""
        ...

    def hurry(self) -> None:
        """The process ends, and answers nothing any more: end every ``settle`` soon."""
        ...


def is_full(error: OSError) -> bool:
    """Whether a write failed because the file system or the quota of the LUN's file is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def is_read_only(error: OSError) -> bool:
    return error.errno in (errno.EROFS, errno.EPERM)


def _lives_in_memory(fd: int) -> bool:
    """Whether the file is on tmpfs, which refuses RWF_NOWAIT, but whose reads wait for no disk."""
    return file_system(fd) == "tmpfs"


class Waiting:
    """A context in which a thread may wait for the disk. ``waits``: since when each does."""

    __slots__ = ("_waits",)

    def __init__(self, waits: dict[Waiting, float]) -> None:
        self._waits = waits

    def __enter__(self) -> None:
        self._waits[self] = monotonic()

    def __exit__(self, *_: object) -> None:
        del self._waits[self]


class FileStore:
    """Implements Store over an open descriptor, which it owns. ``iserblk.target.store.lunfile``
    opens the file, and checks that it can be a LUN.

    The kernel reports what it could not write back to one of the calls that wait for the disk,
    not to that whose data was lost. So each of them looks, before it returns, whether another one
    has met an error meanwhile: ``_losses`` counts them."""

    def __init__(self, fd: int, size: int) -> None:
        """``size``: bytes of the LUN; the file may be larger, but must not be smaller."""
        self.fd = fd
        self.size = size
        self.on_loss: OnLoss = no_loss
        in_memory = _lives_in_memory(fd)
        self._nowait_flag = 0 if in_memory else os.RWF_NOWAIT
        self._probe = (memoryview(bytearray(1)),)
        self._waits: dict[Waiting, float] = {}  # since when threads wait for the disk
        self._can_punch = True
        self._can_zero = True
        self._witness = -1 if in_memory else open_witness(fd)  # nothing is written back to memory
        self._looking = Lock()
        self._losses = 0
        self._errno = errno.EIO  # of the last loss
        # Flushes that wait share the next one: two at a time could take the error of each other.
        self._flushing = Lock()
        self._asked = 0
        self._covered = 0  # how many of those that have asked are answered

    def read_into(self, buffer: memoryview, offset: int, nowait: bool) -> bool:
        if not nowait:
            with Waiting(self._waits):
                self._read_rest(buffer, offset, 0)
            return True
        try:
            done = _read_at(self.fd, buffer, offset, self._nowait_flag)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EOPNOTSUPP):
                return False
            raise
        if done == len(buffer):
            return True
        if self._nowait_flag:
            return False
        self._read_rest(buffer, offset, done)
        return True

    def _read_rest(self, buffer: memoryview, offset: int, done: int) -> None:
        """Read from byte ``done`` of the buffer on. Raises OSError if the file has shrunk."""
        while done < len(buffer):
            count = os.preadv(self.fd, (buffer[done:],), offset + done)
            if not count:
                raise self._too_small(os.lseek(self.fd, 0, os.SEEK_END))
            done += count

    def _too_small(self, end: int) -> OSError:
        """The error for a file that ends at byte ``end``, before its LUN does."""
        try:
            name = os.readlink(f"/proc/self/fd/{self.fd}")
        except OSError:
            name = "the LUN's file"
        if not end and stat.S_ISBLK(os.fstat(self.fd).st_mode):
            return OSError(errno.ENXIO, f"{name}: the device has gone")
        return OSError(
            errno.EIO,
            f"{name} was made smaller: it ends at byte {end}, its LUN has {self.size} bytes",
        )

    def _check_end(self, end: int) -> None:
        """Raises OSError if the file has shrunk below ``end``. A write there would enlarge the file
        again, and the lost bytes would then read as zeroes without an error."""
        present = os.lseek(self.fd, 0, os.SEEK_END)
        if present < end:
            raise self._too_small(present)

    def write(self, data: memoryview, offset: int, durable: bool, nowait: bool) -> bool:
        self._check_end(offset + len(data))
        if nowait and not durable:
            if self._nowait_flag and self._may_wait(offset, offset + len(data)):
                return False
            self._write(data, offset, 0)
            return True
        with Waiting(self._waits):
            if durable:
                self._write_durably(data, offset)
            else:
                self._write(data, offset, 0)
        return True

    def _may_wait(self, start: int, end: int) -> bool:
        """Whether a write into the page cache may wait for the disk: this one hangs, or part of a
        page has to be read first. (Most file systems refuse RWF_NOWAIT for such writes.)"""
        if self._waits:
            since = list(self._waits.values())
            if since and monotonic() - min(since) > STALLED_S:
                return True
        return bool(
            (start % _PAGE and not self._is_cached(start))
            or (end % _PAGE and not self._is_cached(end - 1))
        )

    def _is_cached(self, offset: int) -> bool:
        try:
            return os.preadv(self.fd, self._probe, offset, os.RWF_NOWAIT) == 1
        except OSError:
            return False

    def _write(self, data: memoryview, offset: int, flags: int) -> None:
        done = os.pwritev(self.fd, (data,), offset, flags)
        while done < len(data):
            count = os.pwritev(self.fd, (data[done:],), offset + done, flags)
            if not count:
                raise OSError(errno.EIO, "the file takes no more bytes")
            done += count

    def _write_durably(self, data: memoryview, offset: int) -> None:
        losses = self._losses
        try:
            self._write(data, offset, os.RWF_DSYNC)
        except OSError as error:
            # The disk may just be full. Or it was full for what was to be written back: that is
            # lost, and the kernel does not tell of it again.
            if self._has_lost(losses):
                raise WritebackError(error.errno, error.strerror) from None
            raise
        if self._has_lost(losses):
            raise WritebackError(self._errno, "writing back has failed meanwhile")

    def flush(self) -> None:
        with self._looking:
            losses = self._losses
            self._asked += 1
            mine = self._asked
        with self._flushing:
            if self._covered < mine:
                asked = self._asked
                try:
                    with Waiting(self._waits):
                        os.fdatasync(self.fd)
                except OSError as error:
                    with self._looking:
                        writeback_error(self._witness)  # the same, which is to be counted once
                        self._lose(error)
                    self._covered = asked  # each of them finds that there was a loss
                    raise WritebackError(error.errno, error.strerror) from None
                self._covered = asked
        if self._has_lost(losses):
            raise WritebackError(self._errno, "writing back has failed meanwhile")

    def _lose(self, error: OSError) -> None:
        self._losses += 1
        self._errno = error.errno or errno.EIO
        self.on_loss(error)

    def _has_lost(self, losses: int) -> bool:
        """Whether there were losses since there were ``losses``."""
        with self._looking:
            number = writeback_error(self._witness)
            if number:
                self._lose(OSError(number, os.strerror(number)))
            return self._losses != losses

    def unmap(self, offset: int, length: int) -> None:
        self.punch(offset, length)

    def punch(self, offset: int, length: int) -> None:
        self._check_end(offset + length)
        if self._can_punch:
            if self._fallocate(PUNCH_HOLE, offset, length):
                return
            self._can_punch = False
        self._write_zeroes(offset, length)

    def zero(self, offset: int, length: int) -> None:
        self._check_end(offset + length)
        if self._can_zero:
            if self._fallocate(ZERO_RANGE, offset, length):
                return
            self._can_zero = False
        self.punch(offset, length)

    def _fallocate(self, mode: int, offset: int, length: int) -> bool:
        """Call ``fallocate``. A device whose sectors are larger than the LUN's blocks refuses parts
        of sectors: at both ends of the range zeroes are written instead. Result as
        ``fallocate``."""
        try:
            with Waiting(self._waits):
                return fallocate(self.fd, mode, offset, length)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        end = offset + length
        start, stop = -(-offset // _SECTOR) * _SECTOR, end // _SECTOR * _SECTOR
        if start >= stop or (start, stop) == (offset, end):
            self._write_zeroes(offset, length)
            return True
        try:
            if not fallocate(self.fd, mode, start, stop - start):
                return False
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._write_zeroes(offset, length)  # sectors that are larger still
            return True
        self._write_zeroes(offset, start - offset)
        self._write_zeroes(stop, end - stop)
        return True

    def _write_zeroes(self, offset: int, length: int) -> None:
        end = offset + length
        while offset < end:
            count = min(len(ZEROES), end - offset)
            self.write(ZEROES[:count], offset, False, False)
            offset += count

    def extents(self, offset: int, length: int, limit: int) -> list[Extent]:
        end = offset + length
        found: list[Extent] = []
        while offset < end and len(found) < limit:
            data = self._seek(offset, os.SEEK_DATA, end)
            if data > offset:
                found.append((offset, data - offset, False))
                offset = data
            if offset < end and len(found) < limit:
                hole = self._seek(offset, os.SEEK_HOLE, end)
                if hole > offset:
                    found.append((offset, hole - offset, True))
                offset = hole
        # Check the size last: a part that was cut off meanwhile looks like a hole.
        present = os.lseek(self.fd, 0, os.SEEK_END)
        if found and present < offset:
            found = [
                (start, min(count, present - start), is_data)
                for start, count, is_data in found
                if start < present
            ]
            if not found:
                raise self._too_small(present)
        return found

    def _seek(self, offset: int, whence: int, end: int) -> int:
        """Where data or a hole begins, at most ``end``. A file system that cannot tell has only
        data."""
        try:
            return min(os.lseek(self.fd, offset, whence), end)
        except OSError as error:
            if error.errno == errno.ENXIO:  # no data behind the offset
                return end
            if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
                return offset if whence == os.SEEK_DATA else end
            raise

    def prefetch(self, offset: int, length: int) -> None:
        os.posix_fadvise(self.fd, offset, length, os.POSIX_FADV_WILLNEED)

    def usage(self) -> tuple[int, int] | None:
        status = os.fstat(self.fd)
        if not stat.S_ISREG(status.st_mode):
            return None
        system = os.fstatvfs(self.fd)
        return status.st_blocks * _STAT_BLOCK, system.f_bavail * system.f_frsize

    def measure(self) -> int:
        self.size = max(self.size, os.lseek(self.fd, 0, os.SEEK_END))
        return self.size

    def close(self) -> None:
        if self._witness >= 0:
            os.close(self._witness)
        os.close(self.fd)
