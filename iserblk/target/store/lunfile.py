"""Opens the file or block device of a LUN; errors say in words why it cannot be used."""

from __future__ import annotations

import errno
import logging
import os
import shlex
import stat

from iserblk.errors import BadArgument, Busy, IserblkError, PermissionDenied
from iserblk.files import is_read_only_device, lock_lun
from iserblk.images import image_warning
from iserblk.target.store.store import FileStore

log = logging.getLogger(__name__)


def open_file(
    path: str, *, size: int | None = None, read_only: bool = False, block: int = 512
) -> FileStore:
    """Open a file or block device as a store of whole blocks, locked against other targets.

    With ``size`` (bytes) a missing file is created, and a smaller file is enlarged; both sparsely.
    The caller owns the store. Raises BadArgument, PermissionDenied or Busy that names the file and
    the remedy; nothing stays open then, and a file that was created is removed.
    """
    if size is not None and (size < block or size % block):
        whole = max(-(-size // block), 1) * block
        raise BadArgument(
            f"{path}: size {size} is not a positive multiple of {block}-byte blocks;"
            f" choose {whole}, say"
        )
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
        if not read_only and kind is not None and stat.S_ISBLK(kind) and is_read_only_device(fd):
            # Newer kernels open it, and refuse each write.
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        _lock(fd, path, read_only)
        size_of_lun = _fit(fd, path, size, read_only, block)
        if warning := image_warning(fd, path):
            log.warning("%s", warning)
        if kind is None:
            _keep_name(path)
        return FileStore(fd, size_of_lun)
    except BaseException as error:
        os.close(fd)
        if kind is None:
            os.unlink(path)
        if isinstance(error, OSError):
            raise _open_error(path, read_only, error) from None
        raise


def kind_of(path: str, size: int | None, read_only: bool) -> int | None:
    """The mode (st_mode) of the file; None: the file has to be created. Raises BadArgument or
    PermissionDenied."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError as error:
        if size is None:
            if not os.path.isdir(os.path.dirname(path) or "."):
                raise _open_error(path, read_only, error) from None
            raise BadArgument(f"{path}: no such file; `size=1G` creates it") from None
        if read_only:
            raise BadArgument(f"{path}: no such file; leave out `ro` to create it") from None
        return None
    except OSError as error:
        raise _open_error(path, read_only, error) from None
    if stat.S_ISDIR(mode):
        raise BadArgument(f"{path}: this is a directory; name a file in it")
    if not stat.S_ISREG(mode) and not stat.S_ISBLK(mode):
        raise BadArgument(f"{path}: neither a regular file nor a block device; name one of these")
    return mode


def _open_error(path: str, read_only: bool, error: OSError) -> IserblkError:
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        if not read_only and os.access(path, os.R_OK, effective_ids=True):
            return PermissionDenied(f"{path}: cannot be written; `ro` serves it read-only")
        return PermissionDenied(
            f"{path}: {error.strerror}; give the user who runs the target access to it"
        )
    if error.errno == errno.EBUSY:
        return Busy(f"{path}: in use, perhaps mounted; unmount it, or serve it with `ro`")
    if error.errno == errno.ENOENT:
        return BadArgument(f"{path}: the directory of the file does not exist; create it first")
    if error.errno == errno.EFBIG:
        return BadArgument(f"{path}: {error.strerror} for its file system; choose a smaller size")
    return BadArgument(f"{path}: {error.strerror}")


def _lock(fd: int, path: str, read_only: bool) -> None:
    """Lock the file: shared with ``read_only``, else exclusive. Raises Busy."""
    if not lock_lun(fd, shared=read_only):
        raise Busy(
            f"{path}: another target serves it, or another LUN of this target, or `iserblk copy`"
            " uses it; name another file, or serve it with `ro` in both places"
        )


def _keep_name(path: str) -> None:
    """Bring the name of a file that was created to stable storage, before anything in the file
    counts as that (fsync(2): a file's own fsync need not do it). Raises OSError."""
    try:
        fd = os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except PermissionError:
        return  # it may be written to, but not read
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system without it
            raise
    finally:
        os.close(fd)


def _enlarging(fd: int, path: str, present: int, read_only: bool, block: int) -> str:
    """How a file of ``present`` bytes, which are not so many blocks, can be served."""
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        return "leave out `block=`" if present else "connect the device first"
    enough = present + -present % block or block
    if read_only:
        return f"`truncate -s {enough} {shlex.quote(path)}` enlarges it"
    return f"`size={enough if present > block else '1G'}` enlarges it"


def _fit(fd: int, path: str, size: int | None, read_only: bool, block: int) -> int:
    """Check or enlarge the file. Returns the size of the LUN in bytes. Raises BadArgument."""
    present = os.lseek(fd, 0, os.SEEK_END)
    if size is None:
        if present < block:
            why = f"its {present} bytes are less than one block"
        elif present % block:
            why = f"its {present} bytes are not a multiple of {block}-byte blocks"
        else:
            return present
        raise BadArgument(f"{path}: {why}; {_enlarging(fd, path, present, read_only, block)}")
    if present > size:
        raise BadArgument(
            f"{path}: has {present} bytes, more than `size={size}`; files are never made smaller,"
            " so leave out `size=`"
        )
    if present < size:
        if read_only or not stat.S_ISREG(os.fstat(fd).st_mode):
            why = "is served with `ro`" if read_only else "cannot grow"
            raise BadArgument(
                f"{path}: has {present} bytes, less than `size={size}`, and {why}; leave out"
                " `size=`"
            )
        os.ftruncate(fd, size)
    return size
