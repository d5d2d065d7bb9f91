"""Runs a command of iserblk, and counts or lists the calls that it makes in iserblk.

    python -P -m figureslib.traced count OUTPUT COMMAND…
    python -P -m figureslib.traced list OUTPUT COMMAND…

SIGUSR1 begins, and makes the file OUTPUT.begun; SIGUSR2 ends it and writes to OUTPUT, as JSON.
``count``, of the main thread: ``calls``, ``crossings`` (calls from one file of iserblk to another),
and ``files``, file → calls. The caller is the nearest function of iserblk: what goes through trio,
or a C function, counts, too.
``list``, of all threads, also before SIGUSR1: a list of ``[file, function]`` in the order of the
calls, without what only importing a module calls. A coroutine or generator that goes on is listed
again. No module of Cython's is used, of which a profile function would see nothing.
"""

from __future__ import annotations

import inspect
import json
import os
import signal
import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Protocol

import iserblk
from iserblk.forms import OF_CYTHON

_TOP = os.path.dirname(os.path.dirname(os.path.abspath(iserblk.__file__))) + os.sep


class Profile(Protocol):
    """A profile function of ``sys.setprofile``, and what it has seen."""

    def __call__(self, frame: FrameType, event: str, argument: object, /) -> None: ...

    def begin(self) -> None: ...

    def end(self) -> object:
        """What was seen since ``begin``, for JSON."""
        ...


class Calls:
    """Counts the calls of the main thread."""

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

    def begin(self) -> None:
        self.files.clear()
        self.crossings = 0
        sys.setprofile(self)

    def end(self) -> object:
        sys.setprofile(None)
        calls = sum(self.files.values())
        return {"calls": calls, "crossings": self.crossings, "files": self.files}


class Order:
    """Lists the calls of all threads, from now on."""

    def __init__(self) -> None:
        self._listed: list[tuple[str, str]] = []
        for name in OF_CYTHON:
            sys.modules[name] = None  # type: ignore[assignment]  # importing it fails
        threading.setprofile(self)
        sys.setprofile(self)

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        code = frame.f_code
        if event != "call" or not _is_ours(code.co_filename):
            return
        if code.co_flags & inspect.CO_OPTIMIZED and not _imports(frame):
            self._listed.append((code.co_filename.removeprefix(_TOP), code.co_qualname))

    def begin(self) -> None:
        self._listed.clear()

    def end(self) -> object:
        return self._listed


def _is_ours(file: str) -> bool:
    return file.startswith(_TOP) and "site-packages" not in file and file != __file__


def _imports(frame: FrameType) -> bool:
    """The code of a module of ours is being run, or of a class in it."""
    caller = frame.f_back
    while caller is not None:
        code = caller.f_code
        if not code.co_flags & inspect.CO_OPTIMIZED and _is_ours(code.co_filename):
            return True
        caller = caller.f_back
    return False


def run(profile: Profile, output: Path, command: list[str]) -> None:
    def begin(*_: object) -> None:
        profile.begin()
        output.with_suffix(".begun").touch()

    def end(*_: object) -> None:
        unfinished = output.with_suffix(".new")
        unfinished.write_text(json.dumps(profile.end()))
        unfinished.rename(output)

    signal.signal(signal.SIGUSR1, begin)
    signal.signal(signal.SIGUSR2, end)
    sys.argv = ["iserblk", *command]
    from iserblk.cli.main import main  # noqa: PLC0415 (when it is known what may be imported)

    main()


if __name__ == "__main__":
    made: Profile = Order() if sys.argv[1] == "list" else Calls()
    run(made, Path(sys.argv[2]), sys.argv[3:])
