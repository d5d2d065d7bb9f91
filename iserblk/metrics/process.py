"""This process, as its metrics tell it: which command it is, and when that began."""

from __future__ import annotations

import os
from collections.abc import Sequence

from iserblk import __version__
from iserblk.loop.clock import since_epoch
from iserblk.metrics.reading import LunReading, ProcessReading
from iserblk.metrics.target_reading import TargetReading


class _Process:
    """``command``: "" where a program uses the library. ``began``: seconds since 1970."""

    def __init__(self) -> None:
        self.command = ""
        self.began = int(since_epoch())


_THIS = _Process()


def this_is(command: str) -> None:
    """This process is the command ``command`` of iserblk, which begins now."""
    _THIS.command = command
    _THIS.began = int(since_epoch())


def began() -> int:
    """When this command began: seconds since 1970."""
    return _THIS.began


def read_process(
    luns: Sequence[LunReading] = (), targets: Sequence[TargetReading] = ()
) -> ProcessReading:
    """All that this process tells."""
    return ProcessReading(
        os.getpid(), __version__, tuple(luns), tuple(targets), _THIS.command, _THIS.began
    )
