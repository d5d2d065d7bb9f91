"""The files behind the disks: the same size, the same content, the same file system."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

FILE_SIZE = 256 << 20
_NEEDED = 2 * FILE_SIZE + (64 << 20)
_CHUNK = 8 << 20


def place_for_files() -> Path:
    """The directory of the files: in memory if there is room, so that no side waits for a disk."""
    shared_memory = Path("/dev/shm")
    if shared_memory.is_dir() and shutil.disk_usage(shared_memory).free > _NEEDED:
        return shared_memory
    return Path(tempfile.gettempdir())


def places(stack: ExitStack) -> tuple[Path, Path]:
    """Two directories that are there as long as ``stack``: for sockets and logs, whose path is
    short, and for the files behind the disks."""
    scratch, disks = (
        Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="iserblk-bench-", dir=where)))
        for where in ("/tmp", place_for_files())
    )
    return scratch, disks


def fill(paths: Sequence[Path], size: int) -> None:
    """Write the same random bytes into all files, completely allocated and on the disk."""
    with ExitStack() as stack:
        files = [stack.enter_context(path.open("wb")) for path in paths]
        for _ in range(size // _CHUNK):
            chunk = os.urandom(_CHUNK)
            for file in files:
                file.write(chunk)
        for file in files:
            file.flush()
            os.fsync(file.fileno())
