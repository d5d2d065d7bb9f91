"""Opening the file behind a LUN: every reason why it cannot be one, in words."""

from __future__ import annotations

import errno
import fcntl
import os
import stat

from iserblk.errors import BadArgument, Busy, IserblkError, PermissionDenied
from iserblk.target.store.store import FileStore


def open_file(
    path: str, *, size: int | None = None, read_only: bool = False, block: int = 512
) -> FileStore:
    """Open a file or block device as a store of whole blocks, locked against other targets.

    With ``size`` (bytes) a missing file is created, and a smaller one grown, sparsely.
    Raises BadArgument, PermissionDenied or Busy, naming file and remedy; nothing stays open, and
    no file that was created.
    """
    if size is not None and (size < block or size % block):
        raise BadArgument(f"{path}: size {size} is not a positive multiple of {block}-byte blocks")
    kind = kind_of(path, size, read_only)
    flags = os.O_CLOEXEC | (os.O_RDONLY if read_only else os.O_RDWR)
    if kind is None:
        flags |= os.O_CREAT | os.O_EXCL
    elif stat.S_ISBLK(kind) and not read_only:
        flags |= os.O_EXCL  # refuses a device that is mounted
    try:
        fd = os.open(path, flags, 0o666)
    except OSError as error:
        raise _open_error(path, read_only, error) from None
    try:
        _lock(fd, path, read_only)
        return FileStore(fd, _fit(fd, path, size, read_only, block))
    except BaseException as error:
        os.close(fd)
        if kind is None:
            os.unlink(path)
        if isinstance(error, OSError):
            raise _open_error(path, read_only, error) from None
        raise


def kind_of(path: str, size: int | None, read_only: bool) -> int | None:
    """The file's mode; None when it is to be created."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        if size is None:
            raise BadArgument(f"{path}: no such file; `:size=1G` creates it") from None
        if read_only:
            raise BadArgument(f"{path}: no such file, and `:ro` creates none") from None
        return None
    except OSError as error:
        raise _open_error(path, read_only, error) from None
    if stat.S_ISDIR(mode):
        raise BadArgument(f"{path}: a directory; name a file in it")
    if not stat.S_ISREG(mode) and not stat.S_ISBLK(mode):
        raise BadArgument(f"{path}: neither a regular file nor a block device")
    return mode


def _open_error(path: str, read_only: bool, error: OSError) -> IserblkError:
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        if not read_only and os.access(path, os.R_OK, effective_ids=True):
            return PermissionDenied(f"{path}: cannot be written; `:ro` serves it read-only")
        return PermissionDenied(f"{path}: {error.strerror}; the target's user needs access to it")
    if error.errno == errno.EBUSY:
        return Busy(f"{path}: in use, perhaps mounted; unmount it, or serve it with `:ro`")
    if error.errno == errno.ENOENT:
        return BadArgument(f"{path}: its directory does not exist")
    if error.errno == errno.EFBIG:
        return BadArgument(f"{path}: {error.strerror} for its file system; choose another size")
    return BadArgument(f"{path}: {error.strerror}")


def _lock(fd: int, path: str, read_only: bool) -> None:
    """Readers share a file; a writer has it alone."""
    mode = fcntl.LOCK_SH if read_only else fcntl.LOCK_EX
    try:
        fcntl.flock(fd, mode | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Busy(
            f"{path}: another target serves it, or another LUN; only `:ro` on both sides can share"
        ) from None


def _fit(fd: int, path: str, size: int | None, read_only: bool, block: int) -> int:
    """The LUN's size in bytes, once the file has it."""
    present = os.lseek(fd, 0, os.SEEK_END)
    if size is None:
        if present < block:
            raise BadArgument(
                f"{path}: its {present} bytes are less than one block; `:size=1G` enlarges it"
            )
        if present % block:
            raise BadArgument(
                f"{path}: its {present} bytes are not a multiple of {block}-byte blocks; "
                f"`:size={present + block - present % block}` enlarges it"
            )
        return present
    if present > size:
        raise BadArgument(
            f"{path}: has {present} bytes, more than `:size={size}`; nothing is ever cut off"
        )
    if present < size:
        if read_only or not stat.S_ISREG(os.fstat(fd).st_mode):
            raise BadArgument(
                f"{path}: has {present} bytes, less than `:size={size}`, and cannot grow"
            )
        os.ftruncate(fd, size)
    return size
