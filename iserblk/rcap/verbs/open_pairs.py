"""Queue pairs that are not closed yet; what is left of them when the program ends is closed then.

A queue pair that merely ceases to be is taken down in any order, and rxe waits for minutes with the
end of one whose memory windows are still bound. So each is held here until it is closed.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
from typing import Protocol

log = logging.getLogger(__name__)


class Closable(Protocol):
    def close(self) -> None: ...


_open: dict[int, tuple[int, Closable]] = {}  # by identity: and the process that made it


def opened(thing: Closable) -> None:
    _open[id(thing)] = os.getpid(), thing


def closed(thing: Closable) -> None:
    _open.pop(id(thing), None)


def _forked() -> None:
    """In a child: what the parent made must not even cease to be here, as that would take the
    parent's objects down through the descriptors that both have."""
    for _, thing in _open.values():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


os.register_at_fork(after_in_child=_forked)


@atexit.register
def close_all() -> None:
    """Not what a parent process made: that is its own to close."""
    for process, thing in list(_open.values()):
        if process == os.getpid():
            try:
                thing.close()
            except Exception:
                log.exception("while the program ends")
    _open.clear()
