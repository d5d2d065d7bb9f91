"""What a process tells of itself."""

from __future__ import annotations

import os

import pytest

from iserblk import __version__
from iserblk.metrics import process
from iserblk.metrics.process import began, read_process, this_is
from iserblk.metrics.reading import ProcessReading


def test_a_command_tells_when_it_began(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process that is forked: not when its parent did."""
    monkeypatch.setattr(process, "since_epoch", lambda: 12345.6)
    this_is("mount")
    assert began() == 12345
    assert read_process() == ProcessReading(os.getpid(), __version__, (), (), "mount", 12345)
