"""Starts a kernel in user mode: a program of the host, whose processes are the guest's.

Without hardware acceleration it is six times faster than an emulated processor. It has no RDMA, one
processor, and switches between processes only where the kernel gives the processor up.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from lablib.archive import cache
from lablib.wish import GUEST, Wish


@contextmanager
def processor() -> Iterator[int]:
    """One of the host's processors: one that no other guest in user mode has, if there is one."""
    with ExitStack() as stack:
        numbers = sorted(os.sched_getaffinity(0))
        for number in numbers:
            lock = stack.enter_context((cache() / f"processor-{number}").open("w"))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            yield number
            return
        yield numbers[os.getpid() % len(numbers)]


def _place(memory: str, directory: Path) -> Path:
    """Where the file is that is the guest's memory: itself in memory if there is room. (A container
    may have a small /dev/shm; the guest would die there once it had filled that.)"""
    place = Path("/dev/shm")
    size = int(memory[:-1]) << {"M": 20, "G": 30}[memory[-1]]
    if not place.is_dir():
        return directory
    room = os.statvfs(place)
    return place if room.f_bavail * room.f_frsize >= size else directory


def words(wish: Wish, directory: Path, out: int, err: int, number: int) -> list[object]:
    """The command that runs ``user-mode.sh`` in user mode, on the host's processor of this
    number. ``out`` and ``err`` are descriptors that take what the guest's command says."""
    return [
        # However the kernel ends, the kernel of the host ends all processes of the guest: without
        # their tracer, these would run on as the host's.
        *("unshare", "--pid", "--fork", "--kill-child=KILL"),
        # The first process of a namespace cannot end itself by a signal, as a kernel that panics
        # does: that process is a shell.
        *("sh", "-c", '"$@"; exit 1', "sh"),
        # Each system call of the guest is four switches between processes of the host. Between
        # processors of a virtual machine these take six times as long as on one.
        *("taskset", "--cpu-list", number),
        *("env", f"TMPDIR={_place(wish.memory, directory)}"),
        *(wish.kernel.image, f"mem={wish.memory}", f"uml_dir={directory}", "umid=kernel"),
        *("root=/dev/root", "rootfstype=hostfs", "rootflags=/", "ro"),
        *("con=null", "con0=null,fd:1", "ssl=null", f"ssl0=null,fd:{out}", f"ssl1=null,fd:{err}"),
        *("ignore_loglevel", "oops=panic"),
        *("init=/bin/bash", "--", GUEST / "user-mode.sh", directory, wish.kernel.modules),
    ]
