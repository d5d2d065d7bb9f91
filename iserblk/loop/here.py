"""The loop that runs the caller."""

from __future__ import annotations

import threading

import trio

from iserblk.loop.seam import Loop
from iserblk.loop.trio_loop import TrioLoop


class _Hosts(threading.local):
    loop: Loop | None = None


hosts = _Hosts()
"""``loop``: the one that has trio as its guest in this thread."""

_inside: trio.lowlevel.RunVar[TrioLoop] = trio.lowlevel.RunVar("iserblk.loop")


def loop_here() -> Loop:
    """The host of trio in this thread; else one inside its trio loop, the same for all callers.
    Raises RuntimeError where trio does not run."""
    host = hosts.loop
    if host is not None:
        return host
    try:
        return _inside.get()
    except LookupError:
        made = TrioLoop()
        _inside.set(made)
        return made
