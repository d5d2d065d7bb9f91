"""The kernel's reservation calls on a block device (linux/pr.h)."""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CONFLICT = 0x18  # RESERVATION CONFLICT
WRITE_EXCLUSIVE = 1
EXCLUSIVE_ACCESS_REG_ONLY = 4

_STATUS = 0xFF
_CHECK_CONDITION = 0x02
_ATTENTIONS = 4  # at most, one behind the other
# pr_reservation (key, type, flags), pr_registration and pr_preempt (two keys, then type and flags,
# or flags and padding), pr_clear (key, flags, padding).
_ONE_KEY = struct.Struct("=QII")
_TWO_KEYS = struct.Struct("=QQII")


def _call(number: int, layout: struct.Struct) -> int:
    """The number of an ioctl that takes a structure: _IOW('p', ``number``, …)."""
    return 1 << 30 | layout.size << 16 | ord("p") << 8 | number


class Calls:
    """On one device. Each returns the status of the SCSI command: 0, or CONFLICT."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def _do(self, number: int, layout: struct.Struct, *fields: int) -> int:
        """A pending unit attention takes the place of the answer, and the kernel does not send the
        command again: that is left to the caller."""
        status = 0
        for _ in range(_ATTENTIONS):
            status = fcntl.ioctl(
                self._fd, _call(number, layout), bytearray(layout.pack(*fields)), True
            )
            status &= _STATUS
            if status != _CHECK_CONDITION:
                break
        return status

    def register(self, old: int, new: int) -> int:
        return self._do(200, _TWO_KEYS, old, new, 0, 0)

    def reserve(self, key: int, kind: int) -> int:
        return self._do(201, _ONE_KEY, key, kind, 0)

    def release(self, key: int, kind: int) -> int:
        return self._do(202, _ONE_KEY, key, kind, 0)

    def preempt(self, key: int, other: int, kind: int, abort: bool) -> int:
        """``key``: our own; ``other``: of the registrations to be removed."""
        return self._do(204 if abort else 203, _TWO_KEYS, key, other, kind, 0)

    def clear(self, key: int) -> int:
        return self._do(205, _ONE_KEY, key, 0, 0)


@contextmanager
def calls(device: Path) -> Iterator[Calls]:
    fd = os.open(device, os.O_RDWR)
    try:
        yield Calls(fd)
    finally:
        os.close(fd)
