"""Ends of a copy: one disk or one file.

A file here is a regular file or a block device. Its methods are those of AsyncDisk, each runs in a
thread, and its errors are IserblkErrors that name the file.

A destination is never emptied, but written in place. So nothing is lost where both ends are the
same disk, and nothing here can tell: a file, and the LUN that another program's target makes of it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import ParamSpec, Protocol, TypeVar

import trio

from iserblk import files
from iserblk.disk import aio
from iserblk.disk.lun.identity import have_common
from iserblk.disk.seam import (
    EXTENT_DATA,
    EXTENT_HOLE,
    EXTENT_ZERO,
    AsyncDisk,
    BlockingDisk,
    Extent,
)
from iserblk.disk.writers import is_shared, note_use
from iserblk.errors import BadArgument, Busy, IserblkError, PermissionDenied, WriteProtected
from iserblk.images import image_warning
from iserblk.loop.tasks import sleep, task_time
from iserblk.metrics.records import Recorded
from iserblk.named.files import may_be_name
from iserblk.named.resolving import names_lun_not_file, urls_of
from iserblk.url import is_url, parse_url

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")
D = TypeVar("D", bound=AsyncDisk | BlockingDisk)

ZEROES = memoryview(bytes(1 << 20))  # at least one request of a copy
_MAXIMUM_EXTENTS = 1024  # of one answer
_LUNS_OF_A_MOUNT = "fuse.iserblk"  # the type of a mount's file system
# How flock(2) fails on file systems without locks: no target can serve their files.
_NO_LOCKS = (errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK, errno.EINVAL)
# Seconds. udev holds a shared lock while it looks at a block device that has just come or changed.
_UDEV_S = 5.0


class End(Protocol):
    """The methods that both FileEnd and AsyncDisk have."""

    @property
    def size(self) -> int: ...

    async def read_into(self, buffer: memoryview, offset: int) -> None: ...

    async def write(self, buffer: memoryview, offset: int) -> None: ...

    async def zero(
        self, offset: int, length: int, *, may_trim: bool = False, patient: bool = False
    ) -> None: ...

    async def extents(self, offset: int, length: int) -> list[Extent]: ...

    async def flush(self) -> None: ...


class Opened:
    """An end that has a descriptor. The opener owns and closes that. ``path`` names it."""

    def __init__(self, fd: int, path: str) -> None:
        self.fd = fd
        self.path = path

    async def lock(self, to_write: bool) -> None:
        """Keep targets, and other copies, from the file as long as it is open; those that only read
        do not mind each other. Raises Busy."""
        give_up = task_time() + _UDEV_S
        device = stat.S_ISBLK(os.fstat(self.fd).st_mode)
        while not self._lock(to_write):
            if not device or task_time() > give_up:
                raise Busy(
                    f"{self.path}: a target serves it, or another copy uses it; give the URL of its"
                    " LUN, or end the target before"
                )
            await sleep(0.1)

    def _lock(self, to_write: bool) -> bool:
        try:
            return files.lock_lun(self.fd, shared=not to_write)
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return True
            raise IserblkError(f"{self.path}: {error.strerror}") from None


class FileEnd(Opened):
    """An open file: ``regular``, or a block device, or a LUN's file of a FUSE mount, which have a
    size of their own."""

    def __init__(self, fd: int, path: str, size: int, regular: bool) -> None:
        super().__init__(fd, path)
        self.size = size
        self.regular = regular
        self.created = False  # by who has opened it
        self._zero_from = size  # all behind is zero, or does not exist

    async def _call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return await trio.to_thread.run_sync(lambda: function(*args, **kwargs))
        except OSError as error:
            raise IserblkError(f"{self.path}: {error.strerror}") from None

    async def read_into(self, buffer: memoryview, offset: int) -> None:
        done = 0
        while done < len(buffer):
            count = await self._call(os.preadv, self.fd, [buffer[done:]], offset + done)
            if not count:
                raise IserblkError(f"{self.path}: ends at byte {offset + done} while being read")
            done += count

    async def write(self, buffer: memoryview, offset: int) -> None:
        self._zero_from = max(self._zero_from, offset + len(buffer))
        done = 0
        while done < len(buffer):
            done += await self._call(os.pwrite, self.fd, buffer[done:], offset + done)

    async def zero(
        self, offset: int, length: int, *, may_trim: bool = False, patient: bool = False
    ) -> None:
        if offset >= self._zero_from:
            return
        if may_trim and await self._call(
            files.fallocate, self.fd, files.PUNCH_HOLE, offset, length
        ):
            return
        for start in range(offset, offset + length, len(ZEROES)):
            await self.write(ZEROES[: offset + length - start], start)

    async def extents(self, offset: int, length: int) -> list[Extent]:
        return await self._call(self._extents, offset, offset + length)

    def _extents(self, offset: int, end: int) -> list[Extent]:
        found: list[Extent] = []
        while offset < end and len(found) < _MAXIMUM_EXTENTS:
            data = self._seek(offset, os.SEEK_DATA, end)
            if data > offset:
                found.append((offset, data - offset, EXTENT_HOLE | EXTENT_ZERO))
            hole = self._seek(data, os.SEEK_HOLE, end) if data < end else end
            if hole > data:
                found.append((data, hole - data, EXTENT_DATA))
            offset = hole
        return found

    def _seek(self, offset: int, whence: int, end: int) -> int:
        """The offset of the next data or hole; ``end`` if there is none before ``end``."""
        try:
            return min(os.lseek(self.fd, offset, whence), end)
        except OSError as error:
            if error.errno == errno.ENXIO:  # no data behind offset
                return end
            if error.errno == errno.EINVAL:  # not known here (block devices): all is data
                return offset if whence == os.SEEK_DATA else end
            raise

    async def flush(self) -> None:
        """Write to the disk, and drop from the page cache: later reads come from the disk."""
        await self._call(os.fsync, self.fd)
        await self._call(os.posix_fadvise, self.fd, 0, 0, os.POSIX_FADV_DONTNEED)

    async def resize(self, size: int) -> None:
        """Make a regular file ``size`` bytes long. It keeps its content up to there; where it grows
        it reads as zeroes."""
        await self._call(os.ftruncate, self.fd, size)
        self._zero_from = min(self.size, size)
        self.size = size

    def remove(self) -> None:
        """Remove the file, unless another one has its name by now. Raises nothing."""
        with contextlib.suppress(OSError):
            if os.path.samestat(os.lstat(self.path), os.fstat(self.fd)):
                os.unlink(self.path)


def check_one_lun(urls: Sequence[str]) -> None:
    """Check that the URLs name one LUN, through several portals. Raises BadArgument."""
    if len(set(map(_lun_of, urls))) > 1:
        raise BadArgument(
            "the URLs name several LUNs; this command takes several URLs of one LUN only, through"
            " its portals"
        )


def _lun_of(text: str) -> tuple[str, int | None]:
    url = parse_url(text)
    return url.iqn.lower(), url.lun


def named_places(
    places: Sequence[str], options: Mapping[str, str], *, writes: bool = True
) -> list[str]:
    """The arguments, with URLs in place of the names of LUNs. ``writes``: to the last one. Raises
    BadArgument where a word could mean a named LUN or a file."""
    found: list[str] = []
    for index, place in enumerate(places):
        if place == "-" or not names_lun_not_file(place):
            found.append(place)
            continue
        found += urls_of([place], options, to_write=writes and index == len(places) - 1)
    return found


def two_ends(places: Sequence[str], command: str) -> tuple[Sequence[str], Sequence[str]]:
    """The two that ``command`` is about: of each its file, or its URLs, which stand together.
    Raises BadArgument."""
    ends: list[list[str]] = []
    known: list[tuple[str, int | None] | None] = []
    for place in places:
        lun = _lun_of(place) if is_url(place) else None
        if lun is not None and known and known[-1] == lun:
            ends[-1].append(place)
            continue
        ends.append([place])
        known.append(lun)
    if len(ends) == 1 and len(places) > 1:
        raise BadArgument(f"{command}: both are the same; name another file, LUN or device")
    if len(ends) == 1:
        raise BadArgument(f"{command} takes two files, LUNs or devices: write the second behind it")
    if len(ends) != 2:
        raise BadArgument(
            f"{command} takes two files, LUNs or devices, and here are {len(ends)}; the URLs of one"
            " LUN have to stand together"
        )
    return ends[0], ends[1]


def only_disk(disks: Mapping[str, D]) -> D:
    """The only disk of ``disks``. Raises BadArgument when the URL named several."""
    if len(disks) > 1:
        names = ", ".join(f"/{disk.info.lun}" for disk in disks.values())
        raise BadArgument(f"the URL names {len(disks)} disks; add one of {names} to it")
    return next(iter(disks.values()))


@asynccontextmanager
async def open_source(
    place: Sequence[str], options: Mapping[str, str]
) -> AsyncIterator[AsyncDisk | FileEnd]:
    """Open a file, or the URLs of one LUN, for reading. Raises BadArgument, PermissionDenied, Busy
    (a file that a target serves), and what connecting raises."""
    if is_url(place[0]):
        async with aio.open_disks(place, options) as disks:
            yield only_disk(disks.disks)
    else:
        with _opened(place[0], os.O_RDONLY) as file:
            await file.lock(to_write=False)
            if warning := image_warning(file.fd, file.path):
                log.warning("%s", warning)
            yield file


@asynccontextmanager
async def open_destination(
    place: Sequence[str], options: Mapping[str, str]
) -> AsyncIterator[AsyncDisk | FileEnd]:
    """Open a file, or the URLs of one LUN, for writing. A missing file is created; an existing file
    is not changed, and not locked yet: the caller knows whether it is the source, too.

    Raises WriteProtected, Busy (a block device that is mounted), and what ``open_source`` raises.
    """
    text = place[0]
    if is_url(text):
        async with aio.open_disks(place, options) as disks:
            disk = only_disk(disks.disks)
            if disk.info.read_only:
                raise WriteProtected(
                    f"{disk.info.url}: the LUN is read-only; allow writing at the target"
                )
            with Recorded("copy") as recorded:
                note_use(recorded, [disk.info], shared=is_shared(place, options))
                yield disk
    else:
        device = False
        with contextlib.suppress(OSError):
            device = stat.S_ISBLK(os.stat(text).st_mode)
        created = False
        if not device:
            with contextlib.suppress(OSError):  # that there is one, or what the next attempt says
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                os.close(os.open(text, flags, 0o666))
                created = True
        # On a block device O_EXCL fails if the device is mounted, or in other exclusive use.
        with _opened(text, os.O_RDWR | (os.O_EXCL if device else os.O_CREAT)) as file:
            file.created = created
            yield file


@contextlib.contextmanager
def _opened(path: str, flags: int) -> Iterator[FileEnd]:
    try:
        # Without O_NONBLOCK, opening a FIFO would wait for its other end.
        fd = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
    except OSError as error:
        why = f"{path}: {error.strerror}"
        if error.errno == errno.ENOENT and may_be_name(path):
            why += "; and there is no LUN of that name (`iserblk list` shows the names)"
        if error.errno == errno.ENXIO:  # a Unix socket
            why = f"{path}: a socket; {_NO_SOCKET}"
        if error.errno == errno.EISDIR:
            why += ": name a file in it"
        if error.errno == errno.EBUSY:
            why += ": it is mounted, or a target serves it, or a program has it to itself"
        raise _ERRORS.get(error.errno or 0, BadArgument)(why) from None
    try:
        mode = os.fstat(fd).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISBLK(mode)):
            what = "neither a file nor a block device"
            raise BadArgument(f"{path}: {what}; `-` is standard input and output of copy")
        regular = stat.S_ISREG(mode) and files.file_system(fd) != _LUNS_OF_A_MOUNT
        yield FileEnd(fd, path, os.lseek(fd, 0, os.SEEK_END), regular)
    finally:
        os.close(fd)


_NO_SOCKET = "name a file, a block device, or the LUN's own URL (nbdcopy speaks NBD)"
_ERRORS: dict[int, type[IserblkError]] = {
    errno.EACCES: PermissionDenied,
    errno.EPERM: PermissionDenied,
    errno.EROFS: PermissionDenied,
    errno.EBUSY: Busy,
}


def same_place(one: AsyncDisk | Opened, other: AsyncDisk | Opened) -> bool:
    """Whether both are the same file, block device or LUN, under whatever names."""
    if isinstance(one, Opened):
        if not isinstance(other, Opened):
            return False
        first, second = os.fstat(one.fd), os.fstat(other.fd)
        if stat.S_ISBLK(first.st_mode) and stat.S_ISBLK(second.st_mode):
            return first.st_rdev == second.st_rdev
        return os.path.samestat(first, second)
    if isinstance(other, Opened):
        return False
    # The portal does not matter: a target has one name on all of its portals.
    if (one.info.target, one.info.lun) == (other.info.target, other.info.lun):
        return True
    return one.size == other.size and have_common(one.info.identifiers, other.info.identifiers)
