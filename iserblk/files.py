"""fallocate(2) with its modes, which Python's os module does not offer."""

from __future__ import annotations

import ctypes
import errno
import os

PUNCH_HOLE = 0x02 | 0x01  # never without KEEP_SIZE
ZERO_RANGE = 0x10 | 0x01  # with KEEP_SIZE

_UNSUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.ENODEV)

_libc = ctypes.CDLL(None, use_errno=True)
# glibc's fallocate takes a 32-bit offset on 32-bit machines; musl has the plain name only.
_call = getattr(_libc, "fallocate64", None) or _libc.fallocate
_call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_call.restype = ctypes.c_int


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
