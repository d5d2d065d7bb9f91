"""Files by which a command that ends the use of LUNs and their server tell each other about it:
what is wished for, and what was not flushed. A server may be too busy to be asked."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
from pathlib import Path

from iserblk import files

_BY_FORCE = "force\n"


class Wish:
    """A file whose name begins with that of ``path`` is there, and locked, while the end of the use
    is wished for; a server then waits for a target that is away for less than a minute
    (``iserblk.disk.ending``). Several may wish it at once: each process has a file of its own, and
    withdraws only that. The lock goes with the process that wishes, however it ends. One more file
    has the name and ``.unflushed``. Nothing here raises: without the files, a server waits as long
    as requests may."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._unflushed = path.with_name(f"{path.name}.unflushed")
        self._own: Path | None = None  # the file that this object has locked
        self._held = -1  # its descriptor

    def make(self, *, by_force: bool = False) -> None:
        """Wish, until ``withdraw``. ``by_force``: the server is to wait for nothing."""
        self.withdraw()
        for left in self._wishes():
            if _wished_in(left) is None:
                _remove(left)
        name = f"{self._path.name}.wish-{secrets.token_hex(8)}"
        part = self._path.with_name(f".{name}")
        try:
            self._held = _create(part, _BY_FORCE if by_force else "")
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._own = self._path.with_name(name)
            part.rename(self._own)  # locked, before anything can look at it
        except OSError:
            _remove(part)

    def withdraw(self) -> None:
        """What others wish is still wished for."""
        if self._own is not None:
            _remove(self._own)
            self._own = None
        if self._held >= 0:
            os.close(self._held)
            self._held = -1

    def forget(self) -> None:
        """Remove what a server, or a command, has left that was killed."""
        self.withdraw()
        for left in self._wishes():
            _remove(left)
        self.begin()

    @property
    def made(self) -> bool:
        """Whether a process that runs wishes it."""
        return any(_wished_in(each) is not None for each in self._wishes())

    @property
    def made_by_others(self) -> bool:
        """Whether another process, or object, wishes it."""
        others = (each for each in self._wishes() if each != self._own)
        return any(_wished_in(each) is not None for each in others)

    @property
    def by_force(self) -> bool:
        return any(_wished_in(each) == _BY_FORCE for each in self._wishes())

    def _wishes(self) -> list[Path]:
        """The files of wishes, of all processes."""
        name = re.compile(re.escape(self._path.name) + r"\.wish-[0-9a-f]{16}")
        try:
            found = os.listdir(self._path.parent)
        except OSError:
            return []
        return [self._path.with_name(each) for each in found if name.fullmatch(each)]

    def begin(self) -> None:
        """By a server, at its beginning: nothing is left."""
        _remove(self._unflushed)

    def leave(self, count: int | None) -> None:
        """By a server, at its end: its last flush has failed, and so many bytes are not flushed;
        None: that is not known."""
        self.begin()
        part = self._path.with_name(f".{self._unflushed.name}")
        _remove(part)  # of a server that was killed
        try:
            os.close(_create(part, f"{count or 0}\n"))
            part.rename(self._unflushed)  # whole: a part of it would be another number
        except OSError:
            _remove(part)

    @property
    def left(self) -> int | None:
        """What the server has left; 0: how much is not known; None: nothing."""
        try:
            return int(files.read_text(self._unflushed))
        except (OSError, ValueError):
            return None


def _wished_in(file: Path) -> str | None:
    """What the process wishes that has locked ``file``; None: no process has."""
    with contextlib.suppress(OSError, ValueError):
        opened = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return os.read(opened, len(_BY_FORCE) + 1).decode()
        finally:
            os.close(opened)
    return None


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def _create(path: Path, text: str) -> int:
    """A new file; returns its descriptor. Root may write into the directory of another user:
    through no link."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    file = os.open(path, flags, 0o644)
    os.write(file, text.encode())
    return file
