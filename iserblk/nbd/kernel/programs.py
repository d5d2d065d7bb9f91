"""Finding and running the programs of the distribution that an attachment needs."""

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
from iserblk.endings import ending_signals
from iserblk.errors import IserblkError
from iserblk.installation import HERE

PLUGIN = Path(iserblk.__file__).resolve().parent.parent / "nbd_plugin" / "iserblk.py"


def search_path() -> str:
    """PATH, and the directories where the distribution has programs for root."""
    return f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"


def program(name: str, package: str) -> str:
    """The path of a program. ``package``: the Debian package, for the error. Raises
    IserblkError."""
    found = shutil.which(name, path=search_path())
    if found is None:
        raise IserblkError(f"{name} is missing: {HERE.programs(package)}")
    return found


def nbdkit_program() -> str:
    return program("nbdkit", "the packages nbdkit and nbdkit-plugin-python")


def nbdkit_environment() -> dict[str, str]:
    """The environment for nbdkit, with /usr/bin first in PATH. The Python inside nbdkit looks for
    its library beside the first python3 in PATH. It must find that of the distribution, with which
    it was built, not that of a pyenv or conda."""
    return {**os.environ, "PATH": f"/usr/bin:{os.environ.get('PATH', os.defpath)}"}


def last_line(said: str) -> str:
    """The line of a program's stderr to quote in an error: the last with "Error: ", else the last
    of all."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    marked = [line.removeprefix("Error: ") for line in lines if line.startswith("Error: ")]
    return ["it did not say why", *lines, *marked][-1]


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Delay the signals that end the process until the end of the block. Their exception between a
    fork and the moment when we know the child's id would leave a child that we do not know."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        came.append(number)

    usual = {number: signal.signal(number, note) for number in ending_signals()}
    try:
        yield
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])
