"""The list of open queue pairs: those still open when the program ends are closed then.

When Python frees a queue pair that was not closed, its objects are destroyed in any order; and rxe
needs minutes to destroy a queue pair whose memory windows are still bound. So this module keeps a
reference to each queue pair until it is closed.
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


_open: dict[int, tuple[int, Closable]] = {}  # by id(): (ID of the process that made it, pair)


def opened(thing: Closable) -> None:
    _open[id(thing)] = os.getpid(), thing


def closed(thing: Closable) -> None:
    _open.pop(id(thing), None)


def _forked() -> None:
    """In a forked child: keep the parent's queue pairs from ever being freed. That would destroy
    the parent's objects, through the descriptors that parent and child share."""
    for _, thing in _open.values():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


os.register_at_fork(after_in_child=_forked)


@atexit.register
def close_all() -> None:
    """Close the queue pairs that this process made. Those of a parent are for the parent to
    close."""
    for process, thing in list(_open.values()):
        if process == os.getpid():
            try:
                thing.close()
            except Exception:
                log.exception("while the program ends")
    _open.clear()
