"""What a LUN keeps beside its file from one start of the target to the next.

A state file is either as it was, or as it was meant to become: new content goes into a file of its
own, which then takes the name.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Lock

from iserblk.errors import BadArgument

SUFFIX = ".reservations"
MODES_SUFFIX = ".modes"  # saved mode parameters
MAXIMUM_SIZE = 1 << 20  # bytes; the registrations of a LUN take less


class StateFile:
    """The state file of one LUN; None stands for no file. One thread calls ``to_save``; any thread
    may call what it returns."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = Lock()
        self._changes = 0
        self._wanted: bytes | None = None
        self._saved = 0  # changes
        self._content: bytes | None = None

    @classmethod
    def beside(cls, path: str, suffix: str = SUFFIX) -> StateFile:
        """A state file of the LUN whose file is ``path``."""
        return cls(Path(os.path.realpath(path) + suffix))

    def load(self) -> bytes | None:
        """The content. Raises BadArgument for a file that cannot be read."""
        try:
            with self.path.open("rb") as file:
                content = file.read(MAXIMUM_SIZE)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise BadArgument(f"{self.path}: {error.strerror}") from None
        self._content = self._wanted = content
        return content

    def to_save(self, content: bytes | None) -> Callable[[], None] | None:
        """Note a new content. The result replaces the old one, and returns when the new one is on
        stable storage, or a later one is. It raises OSError; the content is the old one or the new
        one then. None: there is nothing to do."""
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
                self._write(content)
                self._content = content
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
