"""Mounts of this process and its children that no other process has a copy of.

A mount namespace, which ``unshare --mount`` makes, has a copy of each mount that its maker has, and
keeps it in use, until the namespace ends: a loop device stays attached, and the server of a FUSE
file system goes on. Where several workers run tests, each one has a namespace of its own; so what
one makes has copies of its own mounts only.
"""

from __future__ import annotations

import ctypes
import os

_CLONE_NEWNS = 0x20000  # sched.h
_MS_REC, _MS_SLAVE = 0x4000, 0x80000  # sys/mount.h


def have_own_mounts() -> bool:
    """From now on; mounts that others make are still seen. False: this process may not have them.
    To be called before there are threads that mount or start programs."""
    if os.geteuid():
        return False
    libc = ctypes.CDLL(None)
    if libc.unshare(_CLONE_NEWNS):
        return False
    return not libc.mount(None, b"/", None, _MS_REC | _MS_SLAVE, None)
