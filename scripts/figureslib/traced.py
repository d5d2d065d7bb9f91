"""Runs a command of iserblk, and counts the calls that its main thread makes in iserblk.

    python -P -m figureslib.traced OUTPUT COMMAND…

SIGUSR1 begins to count, SIGUSR2 ends it and writes to OUTPUT, as JSON: ``calls``, ``crossings``
(calls from one file of iserblk to another), and ``files``, file → calls. The caller is the nearest
function of iserblk: what goes through trio, or a C function, counts, too.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from types import FrameType

import iserblk
from iserblk.cli.main import main

_TOP = os.path.dirname(os.path.dirname(os.path.abspath(iserblk.__file__))) + os.sep


class Calls:
    """A profile function of ``sys.setprofile``, and its figures."""

    def __init__(self) -> None:
        self.files: Counter[str] = Counter()
        self.crossings = 0

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        if event != "call":
            return
        file = frame.f_code.co_filename
        if not _is_ours(file):
            return
        self.files[file.removeprefix(_TOP)] += 1
        caller = frame.f_back
        while caller is not None and not _is_ours(caller.f_code.co_filename):
            caller = caller.f_back
        if caller is not None and caller.f_code.co_filename != file:
            self.crossings += 1


def _is_ours(file: str) -> bool:
    return file.startswith(_TOP) and "site-packages" not in file and file != __file__


def run(output: Path, command: list[str]) -> None:
    calls = Calls()

    def begin(*_: object) -> None:
        calls.files.clear()
        calls.crossings = 0
        sys.setprofile(calls)

    def end(*_: object) -> None:
        sys.setprofile(None)
        answer = {
            "calls": sum(calls.files.values()),
            "crossings": calls.crossings,
            "files": calls.files,
        }
        unfinished = output.with_suffix(".new")
        unfinished.write_text(json.dumps(answer))
        unfinished.rename(output)

    signal.signal(signal.SIGUSR1, begin)
    signal.signal(signal.SIGUSR2, end)
    sys.argv = ["iserblk", *command]
    main()


if __name__ == "__main__":
    run(Path(sys.argv[1]), sys.argv[2:])
