"""Programs of the distribution that an attachment needs."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import iserblk
from iserblk.errors import IserblkError

PLUGIN = Path(iserblk.__file__).resolve().parent.parent / "nbd_plugin" / "iserblk.py"


def search_path() -> str:
    """PATH, and where the distribution keeps what is for root."""
    return f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"


def program(name: str, package: str) -> str:
    """Where the program is. Raises IserblkError that names the Debian package."""
    found = shutil.which(name, path=search_path())
    if found is None:
        raise IserblkError(f"{name} is missing: run scripts/setup, or install {package}")
    return found


def nbdkit_program() -> str:
    return program("nbdkit", "the packages nbdkit and nbdkit-plugin-python")


def nbdkit_environment() -> dict[str, str]:
    """The Python inside nbdkit looks for its library beside the first python3 in PATH, and would
    take that of a pyenv or conda: the distribution's is the one it was built with."""
    return {**os.environ, "PATH": f"/usr/bin:{os.environ.get('PATH', os.defpath)}"}


def last_line(said: str) -> str:
    """What a program said in the end, for an error in one line: where it says "Error:", that."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    marked = [line.removeprefix("Error: ") for line in lines if line.startswith("Error: ")]
    return ["it did not say why", *lines, *marked][-1]


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """SIGINT and SIGTERM wait until the end of the block. An exception of theirs between a fork and
    the moment when we know of the child would leave that running, and us not knowing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        came.append(number)

    usual = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])
