"""The machine to check: this machine, or, for tests, a directory with the files of a machine."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from iserblk.rcap.verbs import memlock

MAXIMUM_BYTES = 1 << 20  # of one file


def _release() -> str:
    return os.uname().release


def _memlock() -> int:
    left = memlock.lockable()
    return -1 if left is None else left


def _has_package(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


@dataclass(slots=True, frozen=True)
class Machine:
    """Read access to the files of a machine. ``root``: its directory /. ``release``: of the kernel.
    ``memlock``: bytes that this process may lock; -1: no limit. ``search``: PATH."""

    root: Path = Path("/")
    release: str = field(default_factory=_release)
    memlock: int = field(default_factory=_memlock)
    search: str = field(default_factory=lambda: os.environ.get("PATH", os.defpath))
    has_package: Callable[[str], bool] = _has_package

    def path(self, name: str) -> Path:
        return self.root / name.lstrip("/")

    def read(self, name: str) -> str:
        """The text of a file, at most MAXIMUM_BYTES; "" if it is missing or cannot be read."""
        try:
            with self.path(name).open("rb") as file:
                return file.read(MAXIMUM_BYTES).decode(errors="replace").strip()
        except OSError:
            return ""

    def exists(self, name: str) -> bool:
        return os.path.exists(self.path(name))

    def may_use(self, name: str) -> bool:
        """Whether this process may open the file for reading and writing."""
        return os.access(self.path(name), os.R_OK | os.W_OK)

    def entries(self, name: str, pattern: str = "*") -> list[Path]:
        """The sorted entries of a directory; empty if there is no such directory."""
        return sorted(self.path(name).glob(pattern))

    def names(self, name: str, pattern: str = "*") -> list[str]:
        return [path.name for path in self.entries(name, pattern)]

    def program(self, name: str) -> str | None:
        """The path of a program, also of programs for root; None: it is not installed."""
        for directory in (*self.search.split(":"), "/usr/bin", "/usr/sbin", "/bin", "/sbin"):
            path = f"{directory}/{name}"
            if directory.startswith("/") and os.access(self.path(path), os.X_OK):
                return path
        return None
