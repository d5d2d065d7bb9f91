"""Files by which a command that ends the use of LUNs and their server tell each other about it:
what is wished for, and what was not flushed. A server may be too busy to be asked."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from iserblk import files

_BY_FORCE = "force\n"


class Wish:
    """``path``: the file that is there, and locked, while the end of the use is wished for; a
    server then waits for a target that is away for less than a minute (``iserblk.disk.ending``).
    The lock goes with the process that wishes, however it ends. Another file has the name and
    ``.unflushed``. Nothing here raises: without the files, a server waits as long as requests
    may."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._unflushed = path.with_name(f"{path.name}.unflushed")
        self._held = -1  # the file that this object has locked

    def make(self, *, by_force: bool = False) -> None:
        """Wish, until ``withdraw``. ``by_force``: the server is to wait for nothing."""
        self.withdraw()
        part = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        with contextlib.suppress(OSError):
            part.unlink()
        with contextlib.suppress(OSError):
            self._held = _create(part, _BY_FORCE if by_force else "")
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            part.rename(self._path)  # locked, before anything can look at it

    def withdraw(self) -> None:
        if self._held >= 0:
            os.close(self._held)
            self._held = -1
        with contextlib.suppress(OSError):
            self._path.unlink()

    def forget(self) -> None:
        """Remove what a server, or a command, has left that was killed."""
        self.withdraw()
        self.begin()

    @property
    def made(self) -> bool:
        """Whether a process that runs wishes it."""
        return self._read() is not None

    @property
    def by_force(self) -> bool:
        return self._read() == _BY_FORCE

    def _read(self) -> str | None:
        """What was wished for; None: nothing."""
        with contextlib.suppress(OSError, ValueError):
            file = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return os.read(file, len(_BY_FORCE) + 1).decode()
            finally:
                os.close(file)
        return None

    def begin(self) -> None:
        """By a server, at its beginning: nothing is left."""
        with contextlib.suppress(OSError):
            self._unflushed.unlink()

    def leave(self, count: int | None) -> None:
        """By a server, at its end: its last flush has failed, and so many bytes are not flushed;
        None: that is not known."""
        self.begin()
        with contextlib.suppress(OSError):
            os.close(_create(self._unflushed, f"{count or 0}\n"))

    @property
    def left(self) -> int | None:
        """What the server has left; 0: how much is not known; None: nothing."""
        try:
            return int(files.read_text(self._unflushed))
        except (OSError, ValueError):
            return None


def _create(path: Path, text: str) -> int:
    """A new file; returns its descriptor. Root may write into the directory of another user:
    through no link."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    file = os.open(path, flags, 0o644)
    os.write(file, text.encode())
    return file
