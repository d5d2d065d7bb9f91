"""Text of a file that people or programs have written, in bounds; files that are written whole or
not at all; reads that come often; and what Python's os module does not offer for files:
fallocate(2) with its modes, what was lost in writing back, whether a block device takes writes, the
lock of a LUN's file, the type of a file system."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import glob
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

MOST_TEXT = 4 << 20  # bytes
_PART = "[0-9a-f]" * 8  # how the name of a file that is being written ends
PUNCH_HOLE = 0x02 | 0x01  # never without KEEP_SIZE
ZERO_RANGE = 0x10 | 0x01  # with KEEP_SIZE

# Of what serves a mount that has died: ENOTCONN, or ECONNABORTED if it dies while it is asked.
_NO_ANSWER = (
    *(errno.ENOTCONN, errno.ECONNABORTED, errno.EIO),
    *(errno.ESTALE, errno.EHOSTDOWN, errno.ETIMEDOUT),
)
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.ENODEV)

_libc = ctypes.CDLL(None, use_errno=True)
# glibc's fallocate takes a 32-bit offset on 32-bit machines; musl has the plain name only.
_call = getattr(_libc, "fallocate64", None) or _libc.fallocate
_call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_call.restype = ctypes.c_int

_BLKROGET = 0x125E
_WAIT_BEFORE = 1  # SYNC_FILE_RANGE_WAIT_BEFORE
_NOWHERE = 1 << 60  # bytes: an offset at which no file has pages
_sync_file_range = getattr(_libc, "sync_file_range", None)
if _sync_file_range is not None:
    _sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    _sync_file_range.restype = ctypes.c_int


def read_text(path: Path) -> str:
    """The text of a file, of MOST_TEXT bytes at most. Raises OSError (EFBIG: it is longer), and
    UnicodeDecodeError for what is not UTF-8."""
    with path.open("rb") as file:
        content = file.read(MOST_TEXT + 1)
    if len(content) > MOST_TEXT:
        raise OSError(errno.EFBIG, f"more than {MOST_TEXT} bytes")
    return content.decode()


def write_whole(path: Path, content: bytes, *, replace: bool) -> None:
    """Write a file of mode 0600: all of it or nothing, also if the power fails. Raises OSError;
    FileExistsError when there is such a file and ``replace`` is not set. Then the file is as it
    was. Removes what writers of the same path that were killed have left beside it."""
    remove_parts(path)
    part, fd = _open_part(path)
    try:
        with os.fdopen(fd, "wb") as file:
            os.fchmod(fd, 0o600)
            file.write(content)
            file.flush()
            os.fsync(fd)
            if replace:
                os.replace(part, path)
            else:
                os.link(part, path)  # unlike rename, fails where there is one
    finally:
        part.unlink(missing_ok=True)
    sync_directory(path.parent)


def remove_parts(path: Path) -> None:
    """Remove the files that ``write_whole`` has left beside ``path`` because its process was
    killed; they may hold a secret. A part that its writer still has is locked, and stays. What
    cannot be removed stays as well."""
    with suppress(OSError):
        for part in path.parent.glob(f".{glob.escape(path.name)}.{_PART}"):
            _remove_part(part)


def _remove_part(part: Path) -> None:
    try:
        fd = os.open(part, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return
    try:
        about = os.fstat(fd)
        if stat.S_ISREG(about.st_mode) and about.st_uid == os.geteuid():
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            part.unlink()
    except OSError:  # its writer lives, the file system has no locks, or another process was first
        pass
    finally:
        os.close(fd)


def _open_part(path: Path) -> tuple[Path, int]:
    """A new file beside ``path``, locked for as long as its descriptor is open."""
    while True:
        part = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with suppress(OSError):  # without locks, parts are never removed
            fcntl.flock(fd, fcntl.LOCK_EX)
        if os.fstat(fd).st_nlink:
            return part, fd
        os.close(fd)  # before it was locked, another writer took it for a part that was left


def sync_directory(path: Path) -> None:
    """Bring the entries of a directory to the disk. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def is_there(path: str) -> bool:
    """Whether a file has that name: also a link that leads nowhere, and what does not answer, as a
    mount whose server was killed."""
    try:
        os.lstat(path)
    except OSError as error:
        return error.errno in _NO_ANSWER
    return True


def _read_at(fd: int, buffer: memoryview, offset: int, flags: int) -> int:
    """Read up to ``len(buffer)`` bytes at byte ``offset`` of the file into ``buffer``, which is the
    caller's. ``flags``: RWF_NOWAIT or 0. Returns how many were read: 0 at the end of the file.
    Raises OSError; then the content of ``buffer`` is undefined.

    Compiled (``_files.pyx``), which takes a third of the instructions, a read of less than 64 KiB
    keeps the GIL: it is for reads that do not wait.
    """
    return os.preadv(fd, (buffer,), offset, flags)


try:
    from iserblk._files import read_at as read_at  # noqa: PLC0414 (others import it from here)
except ImportError:
    read_at = _read_at


def fallocate(fd: int, mode: int, offset: int, length: int) -> bool:
    """Call fallocate(2). Returns False, and does nothing, if the file system or device does not
    have the mode.

    ``offset`` and ``length`` are bytes; ``length`` is 1 or more. Raises OSError for all other
    failures.
    """
    while _call(fd, mode, offset, length):
        number = ctypes.get_errno()
        if number in _UNSUPPORTED:
            return False
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))
    return True


def open_witness(fd: int) -> int:
    """Open the file once more, for ``writeback_error``. The caller closes the descriptor. -1: that
    is not possible."""
    if _sync_file_range is None:
        return -1
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1


def writeback_error(witness: int) -> int:
    """The errno with which the kernel has failed to write back data of the file; 0: since the last
    call with this descriptor it has not.

    The kernel tells each open file description once of what was lost (errseq_t). So calls that
    share a description take the error from each other; a witness, which nothing else uses, sees it
    in any case. Waits for no disk.
    """
    if witness < 0 or _sync_file_range is None:
        return 0
    if not _sync_file_range(witness, _NOWHERE, 1, _WAIT_BEFORE):
        return 0
    number = ctypes.get_errno()
    return 0 if number in (errno.EINVAL, errno.ESPIPE, errno.ENOSYS, errno.EBADF) else number


def is_read_only_device(fd: int) -> bool:
    """Whether a block device takes no writes. Raises OSError."""
    answer = bytearray(4)
    fcntl.ioctl(fd, _BLKROGET, answer)
    return any(answer)


def lock_lun(fd: int, *, shared: bool) -> bool:
    """Take the lock that a target holds on the file of each of its LUNs, and a copy on its files:
    ``shared`` by those that only read. False: another program has it. It ends with the descriptor.
    Raises OSError, as on a file system without locks.
    """
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def file_system(fd: int) -> str:
    """The type of the file system that the file is on, as mountinfo has it (``tmpfs``,
    ``fuse.iserblk``, …); "" if that is not found."""
    device = os.fstat(fd).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as mounts:
            for fields in map(str.split, mounts):
                if fields[2] == number:
                    return fields[fields.index("-") + 1]
    except OSError:
        pass
    return ""
