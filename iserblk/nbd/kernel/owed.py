"""The losses of which the kernel was not told yet, in a file: a server that ends, or is killed,
leaves them to its successor, which then fails the kernel's next flush."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

from iserblk import files
from iserblk.disk.seam import LossCount

log = logging.getLogger(__name__)

_SOME = LossCount(1, 0)


class Owed:
    """The file ``path``, which is there while the kernel has to be told of a loss."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> LossCount:
        """A file that makes no sense stands for a loss."""
        try:
            losses, told = map(int, files.read_text(self._path).split())
        except FileNotFoundError:
            return LossCount()
        except (OSError, ValueError):
            return _SOME
        return LossCount(losses, told) if 0 <= told < losses else _SOME

    def owe(self) -> None:
        """There is one at least. Raises nothing."""
        if self.read() == LossCount():
            self.write(_SOME)

    def write(self, count: LossCount) -> None:
        """In one step. Raises nothing."""
        try:
            if count.told < count.losses:
                part = self._path.with_suffix(".new")
                part.write_text(f"{count.losses} {count.told}\n")
                part.rename(self._path)
            else:
                with contextlib.suppress(FileNotFoundError):
                    self._path.unlink()
        except OSError as error:
            log.warning("%s: %s", self._path, error.strerror or error)
