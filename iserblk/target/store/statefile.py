"""What a LUN keeps beside its file from one start of the target to the next.

A state file is either as it was, or as it was meant to become: new content goes into a file of its
own, which then takes the name. What is written can be read again: ``load`` reads as much as
``to_save`` takes.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Lock

from iserblk.errors import BadArgument

SUFFIX = ".reservations"
MODES_SUFFIX = ".modes"  # saved mode parameters
MAXIMUM_SIZE = 1 << 20  # bytes; the registrations of a LUN take a quarter of it


class Damaged(Exception):
    """A state file has a content that nothing of ours has written, or that cannot be read. The text
    says why."""


class _Unknown:
    """Stands for the content of a file that may be the old one or the new one."""


_UNKNOWN = _Unknown()


def _open_at_once(path: str, flags: int) -> int:
    """A FIFO in place of the file must not be waited for."""
    return os.open(path, flags | os.O_NONBLOCK)


class StateFile:
    """The state file of one LUN; None stands for no file. One thread calls ``to_save``; any thread
    may call what it returns. ``saved``: the content that was last on stable storage."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = Lock()
        self._changes = 0
        self._wanted: bytes | _Unknown | None = None
        self._saved = 0  # changes
        self.saved: bytes | None = None
        self._content: bytes | _Unknown | None = None

    @classmethod
    def beside(cls, path: str, suffix: str = SUFFIX) -> StateFile:
        """A state file of the LUN whose file is ``path``."""
        return cls(Path(os.path.realpath(path) + suffix))

    def load(self) -> bytes | None:
        """The content. Raises BadArgument for a file that may not be read, or is none; and Damaged
        for one whose blocks cannot be read, or of more than MAXIMUM_SIZE bytes: it stays where it
        is until the next ``to_save`` replaces or removes it."""
        try:
            with open(self.path, "rb", opener=_open_at_once) as file:
                content = file.read(MAXIMUM_SIZE + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno != errno.EIO:
                raise BadArgument(f"{self.path}: {error.strerror}") from None
            self._content = self._wanted = _UNKNOWN
            raise Damaged(error.strerror) from None
        if len(content) > MAXIMUM_SIZE:
            self._content = self._wanted = _UNKNOWN
            raise Damaged(f"it has more than {MAXIMUM_SIZE} bytes")
        self._content = self._wanted = self.saved = content
        return content

    def to_save(self, content: bytes | None) -> Callable[[], None] | None:
        """Note a new content. The result replaces the old one, and returns when the new one is on
        stable storage, or a later one is. It raises OSError; the content is the old one or the new
        one then, and the next ``to_save`` is carried out in any case, also for the old one. None:
        there is nothing to do. At most MAXIMUM_SIZE bytes."""
        if content is not None and len(content) > MAXIMUM_SIZE:
            raise ValueError(f"{len(content)} bytes of state, which no start would read")
        if content == self._content == self._wanted:
            return None
        self._wanted = content
        self._changes += 1
        return partial(self._save, self._changes, content)

    def _save(self, number: int, content: bytes | None) -> None:
        with self._lock:
            if number <= self._saved:
                return
            if content != self._content:
                # A directory may fail to become durable when the file has its name already.
                self._content = _UNKNOWN
                self._write(content)
                self._content = content
            self.saved = content
            self._saved = number

    def _write(self, content: bytes | None) -> None:
        directory = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if content is None:
                self.path.unlink(missing_ok=True)
            else:
                self._replace(content)
            os.fsync(directory)  # the name is as durable as the content
        finally:
            os.close(directory)

    def _replace(self, content: bytes) -> None:
        new = self.path.with_name(self.path.name + ".new")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            with open(os.open(new, flags, 0o600), "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            new.replace(self.path)
        except OSError:
            with suppress(OSError):
                new.unlink()
            raise
