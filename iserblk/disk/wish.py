"""Files by which a command that ends the use of LUNs and their server tell each other about it:
what is wished for, and what was not flushed. A server may be too busy to be asked."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from iserblk import files

_BY_FORCE = "force\n"


class Wish:
    """``path``: the file that is there while the end of the use is wished for; a server then waits
    for a target that is away for less than a minute (``iserblk.disk.ending``). Another file has its
    name and ``.unflushed``. Nothing here raises: without the files, a server waits as long as
    requests may."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._unflushed = path.with_name(f"{path.name}.unflushed")

    def make(self, *, by_force: bool = False) -> None:
        """``by_force``: the server is to wait for nothing."""
        self._write(self._path, _BY_FORCE if by_force else "")

    def withdraw(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink()

    def forget(self) -> None:
        """Remove what a server, or a command, has left that was killed."""
        self.withdraw()
        self.leave(None)

    @property
    def made(self) -> bool:
        return self._path.exists()

    @property
    def by_force(self) -> bool:
        try:
            return files.read_text(self._path) == _BY_FORCE
        except (OSError, ValueError):
            return False

    def leave(self, count: int | None) -> None:
        """By a server, at its end: so many bytes are not flushed; None: all are, or it is not
        known."""
        with contextlib.suppress(OSError):
            if count is None:
                self._unflushed.unlink()
            else:
                self._write(self._unflushed, f"{count}\n")

    @property
    def left(self) -> int | None:
        """What the server has left."""
        try:
            return int(files.read_text(self._unflushed))
        except (OSError, ValueError):
            return None

    def _write(self, path: Path, text: str) -> None:
        """Root may write into the directory of another user: through no link."""
        with contextlib.suppress(OSError):
            path.unlink()
        with contextlib.suppress(OSError):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with os.fdopen(os.open(path, flags, 0o644), "w") as file:
                file.write(text)
