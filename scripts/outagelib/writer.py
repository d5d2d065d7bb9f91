"""In the guest: writes numbered records to FILE, and notes in LOG what it is told.

    writer.py FILE LOG STOP

A record has RECORD bytes, and its number is all over it. Records are written past the page cache
(O_DIRECT), one after the other, PER_SECOND at most; each has its place in the file. After each
BATCH of them the file is flushed (fsync). What fails is tried again after a second. Ends, behind a
last flush, when the file STOP is there.

LOG has a line for each call that has returned, with the seconds of the monotonic clock:

    write NUMBER SECONDS            the record is acknowledged
    flush NUMBER SECONDS            all records below NUMBER are flushed
    failed-write NUMBER SECONDS ERRNO
    failed-flush NUMBER SECONDS ERRNO
    end NUMBER SECONDS              records below NUMBER have been acknowledged

It needs the standard library alone, because it is started without any directory of ours.
"""

from __future__ import annotations

import mmap
import os
import sys
import time
from pathlib import Path
from typing import TextIO

RECORD = 16 << 10
PER_SECOND = 4
BATCH = 32
_LINE = 16  # bytes of a number in a record
PAUSE_S = 1.0  # before what has failed is tried again


def record(number: int) -> bytes:
    return f"{number:0{_LINE - 1}}\n".encode() * (RECORD // _LINE)


class Writer:
    def __init__(self, file: Path, log: TextIO, stop: Path) -> None:
        self._descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o644)
        self._log = log
        self._stop = stop
        self._buffer = mmap.mmap(-1, RECORD)  # O_DIRECT needs aligned memory

    def run(self) -> None:
        number = flushed = 0
        due = time.monotonic()
        while not self._stop.exists():
            if number - flushed >= BATCH:
                if self._flush(number):
                    flushed = number
                continue
            time.sleep(max(0.0, due - time.monotonic()))
            # It is a pace, not an average: what an outage has delayed is not made up for.
            due = max(due, time.monotonic() - 1 / PER_SECOND) + 1 / PER_SECOND
            if self._write(number):
                number += 1
        self._flush(number)
        self._note("end", number)

    def _write(self, number: int) -> bool:
        self._buffer[:] = record(number)
        try:
            if os.pwrite(self._descriptor, self._buffer, number * RECORD) != RECORD:
                raise OSError(0, "written in part")
        except OSError as error:
            return self._failed("write", number, error)
        self._note("write", number)
        return True

    def _flush(self, number: int) -> bool:
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            return self._failed("flush", number, error)
        self._note("flush", number)
        return True

    def _failed(self, what: str, number: int, error: OSError) -> bool:
        self._note(f"failed-{what}", number, f" {error.errno or 0}")
        if not self._stop.exists():
            time.sleep(PAUSE_S)
        return False

    def _note(self, what: str, number: int, more: str = "") -> None:
        self._log.write(f"{what} {number} {time.monotonic():.3f}{more}\n")
        self._log.flush()


if __name__ == "__main__":
    with open(sys.argv[2], "w") as _log:
        Writer(Path(sys.argv[1]), _log, Path(sys.argv[3])).run()
