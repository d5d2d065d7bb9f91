"""In the guest: runs pgbench again and again, and notes in LOG what it is told.

    transactions.py PGBENCH SOCKETS LOG STOP

One client has numbered transactions, PER_SECOND at most: each is pgbench's own (TPC-B), but that
its number is in the column that this leaves empty. A run of pgbench ends with the first that fails,
and after EACH of them. What fails is tried again after a second. Ends when the file STOP is there.

LOG is that of writer.py. A transaction is acknowledged when its COMMIT has returned, and flushed by
that. A run that fails is a call that fails.

It needs the standard library alone, because it is started without any directory of ours.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TextIO

PER_SECOND = 10
EACH = 50
PAUSE_S = 1.0  # before what has failed is tried again
SCRIPT = """\
\\set number :number + 1
\\set aid random(1, 100000)
\\set tid random(1, 10)
\\set delta random(-5000, 5000)
BEGIN;
UPDATE pgbench_accounts SET abalance = abalance + :delta WHERE aid = :aid;
SELECT abalance FROM pgbench_accounts WHERE aid = :aid;
UPDATE pgbench_tellers SET tbalance = tbalance + :delta WHERE tid = :tid;
UPDATE pgbench_branches SET bbalance = bbalance + :delta WHERE bid = 1;
INSERT INTO pgbench_history (tid, bid, aid, delta, mtime, filler)
  VALUES (:tid, 1, :aid, :delta, CURRENT_TIMESTAMP, :number);
END;
"""


class Transactions:
    def __init__(self, pgbench: str, sockets: str, log: TextIO, stop: Path) -> None:
        self._program = pgbench
        self._sockets = sockets
        self._log = log
        self._stop = stop

    def run(self) -> None:
        number = 0
        while not self._stop.exists():
            number = self._some(number)
        self._note("end", number, time.monotonic())

    def _some(self, number: int) -> int:
        """A run from that number on. Returns the number of the next transaction."""
        with tempfile.TemporaryDirectory() as directory:
            script = Path(directory) / "script"
            script.write_text(SCRIPT)
            words = [self._program, "--no-vacuum", f"--host={self._sockets}", "--username=postgres",
                     f"--transactions={EACH}", f"--rate={PER_SECOND}", f"--file={script}",
                     f"--define=number={number - 1}", "--log", f"--log-prefix={directory}/log",
                     "pgbench"]  # fmt: skip
            done = subprocess.run(
                words, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
            )
            since = time.time() - time.monotonic()
            for log in Path(directory).glob("log.*"):
                for line in log.read_text().splitlines():
                    # client, transaction, microseconds, script, and when: seconds, microseconds
                    seconds, microseconds = line.split()[4:6]
                    at = int(seconds) + int(microseconds) / 1e6 - since
                    self._note("write", number, at)
                    number += 1
                    self._note("flush", number, at)
        if done.returncode:
            self._note("failed-write", number, time.monotonic(), f" {_number(done.stderr)}")
            if not self._stop.exists():
                time.sleep(PAUSE_S)
        return number

    def _note(self, what: str, number: int, at: float, more: str = "") -> None:
        self._log.write(f"{what} {number} {at:.3f}{more}\n")
        self._log.flush()


def _number(said: str) -> int:
    """The errno that is named, as far as a client hears of it."""
    found = (each for each in (errno.EROFS, errno.ENOSPC) if os.strerror(each) in said)
    return next(found, errno.EIO)


if __name__ == "__main__":
    with open(sys.argv[3], "w") as _log:
        Transactions(sys.argv[1], sys.argv[2], _log, Path(sys.argv[4])).run()
