"""In the guest: what writes to a file system, and what of that is there afterwards."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from outagelib import say, transactions, writer
from outagelib.ledger import in_file
from outagelib.programs import run

_USER = 65534  # PostgreSQL does not run as root
_WAIT_S = 600


class Work(Protocol):
    """``unflushed``: whether an outage has to begin with work that is acknowledged and not
    flushed. ``unit``: that a record counts for in ``rates``."""

    unflushed: bool
    unit: int

    def start(self, mount: Path, place: Path) -> subprocess.Popen[bytes]:
        """Work in the file system at ``mount``, until the file ``stop`` is in ``place``. Its files
        of ours are there: ``log``, ``said``."""

    def looked_at(self, mount: Path, place: Path) -> tuple[Callable[[int], bool], bool]:
        """At the file system on the target's disk: whether the record of a number is there, and
        whether nothing is wrong with what is."""


class Records:
    """Numbered records in a file."""

    unflushed = True
    unit = writer.RECORD

    def start(self, mount: Path, place: Path) -> subprocess.Popen[bytes]:
        return _python(writer.__file__, mount / "records", place)

    def looked_at(self, mount: Path, place: Path) -> tuple[Callable[[int], bool], bool]:
        file = mount / "records"
        return (in_file(file) if file.exists() else _nothing), True


class Database:
    """Transactions of a database of PostgreSQL, as it is by default but for its size, with the
    programs in ``programs``. ``place``: for a database that is made once, and copied."""

    unflushed = False
    unit = 1
    _SETTINGS = (
        "listen_addresses=",
        "shared_buffers=16MB",
        "max_wal_size=96MB",
        "min_wal_size=32MB",
        "dynamic_shared_memory_type=mmap",
    )

    def __init__(self, programs: Path, place: Path) -> None:
        self._programs = programs
        self._new = place / "db"
        place.mkdir(parents=True)
        os.chown(place, _USER, _USER)
        say("making a database")
        self._run("initdb", "--pgdata", self._new, "--username=postgres", "--auth=trust",
                  "--locale=C", "--encoding=UTF8", "--no-sync")  # fmt: skip
        with self._serving(self._new, place):
            self._run("createdb", f"--host={place}", "--username=postgres", "pgbench")
            self._run("pgbench", "--initialize", "--quiet", f"--host={place}",
                      "--username=postgres", "pgbench")  # fmt: skip

    def start(self, mount: Path, place: Path) -> subprocess.Popen[bytes]:
        sockets = place / "sockets"
        sockets.mkdir()
        os.chown(sockets, _USER, _USER)
        run("cp", "-a", self._new, mount / "db")
        run("sync", "-f", mount)
        self._serve(mount / "db", sockets)
        return _python(transactions.__file__, self._programs / "pgbench", sockets, place)

    def looked_at(self, mount: Path, place: Path) -> tuple[Callable[[int], bool], bool]:
        database, sockets = mount / "db", place / "sockets-at-the-target"
        sockets.mkdir()
        os.chown(sockets, _USER, _USER)
        # Its server may still live, over the initiator.
        (database / "postmaster.pid").unlink(missing_ok=True)
        try:
            with self._serving(database, sockets):
                numbers = self._ask(sockets, "SELECT filler FROM pgbench_history")
                sums = self._ask(
                    sockets,
                    "SELECT sum(abalance) FROM pgbench_accounts UNION ALL "
                    "SELECT sum(tbalance) FROM pgbench_tellers UNION ALL "
                    "SELECT sum(bbalance) FROM pgbench_branches UNION ALL "
                    "SELECT coalesce(sum(delta), 0) FROM pgbench_history",
                )
        except RuntimeError as error:
            say(f"the database: {error}")
            return _nothing, False
        there = {int(number) for number in numbers}
        if len(set(sums)) > 1:
            say(f"the database: sums that should be alike are {' '.join(sums)}")
        return there.__contains__, len(set(sums)) == 1

    def _ask(self, sockets: Path, words: str) -> list[str]:
        """The rows of a query of one column."""
        said = self._run("psql", f"--host={sockets}", "--username=postgres", "--no-psqlrc",
                         "--no-align", "--tuples-only", "--command", words, "pgbench")  # fmt: skip
        return [line.strip() for line in said.splitlines()]

    @contextmanager
    def _serving(self, database: Path, sockets: Path) -> Iterator[None]:
        self._serve(database, sockets)
        try:
            yield
        finally:
            self._run("pg_ctl", "stop", "--pgdata", database, "--mode=fast", "--wait",
                      f"--timeout={_WAIT_S}")  # fmt: skip

    def _serve(self, database: Path, sockets: Path) -> None:
        settings = [
            f"-c {each}" for each in (*self._SETTINGS, f"unix_socket_directories={sockets}")
        ]
        self._run("pg_ctl", "start", "--pgdata", database, "--wait", f"--timeout={_WAIT_S}",
                  f"--log={sockets / 'log'}", f"--options={' '.join(settings)}")  # fmt: skip

    def _run(self, program: str, *words: object) -> str:
        who = ["setpriv", f"--reuid={_USER}", f"--regid={_USER}", "--clear-groups", "--"]
        # In a file system that goes away nobody needs to be.
        return run("env", "--chdir=/", *who, self._programs / program, *words)


def programs_of_postgresql() -> Path | None:
    """Where Debian's package has them: of the newest version that is here."""
    found = [each.parent for each in Path("/usr/lib/postgresql").glob("*/bin/postgres")]
    found = [each for each in found if shutil.which("pgbench", path=str(each))]
    return max(found, key=lambda each: int(each.parent.name), default=None)


def _nothing(_number: int) -> bool:
    return False


def _python(file: str, *words: Path) -> subprocess.Popen[bytes]:
    """The last word is the place: of its log, its end, and what it says."""
    *before, place = words
    with (place / "said").open("wb") as said:
        return subprocess.Popen(
            [sys.executable, "-I", file, *before, place / "log", place / "stop"],
            stdin=subprocess.DEVNULL, stdout=said, stderr=said,
        )  # fmt: skip
