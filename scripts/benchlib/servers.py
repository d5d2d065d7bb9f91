"""Starts servers, waits until they serve, and ends them: only servers that were started here.

Every server leads a session of its own, so that Ctrl-C reaches only the bench, which then ends
them in order; if the bench itself is killed, the kernel ends them (setpriv --pdeathsig).
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from benchlib import proc

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 15.0
_POLL_S = 0.02

T = TypeVar("T")


class Absent(Exception):
    """Something cannot be measured here; the text says why, in one line."""


class Server:
    """One started server and its descendants.

    A context manager: it ends them on exit. ``log`` has the server's output (stdout and stderr).
    ``starter``: what the process that was started is called, where one that it starts is the
    server. ``start_timeout_s``: how long ``wait_until`` waits.
    """

    starter = ""
    start_timeout_s = START_TIMEOUT_S

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        directory: Path,
        *,
        environment: Mapping[str, str] | None = None,
        stop_signal: signal.Signals = signal.SIGTERM,
    ) -> None:
        """Start it; ``directory`` takes its log. Raises Absent if the program is missing."""
        self.name = name
        self.log = directory / f"{name}.log"
        self._stop_signal = stop_signal
        self._said_before = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as log:
            try:
                self._process = subprocess.Popen(
                    ["setpriv", "--pdeathsig", stop_signal.name[3:], "--", *command],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, **(environment or {})},
                    start_new_session=True,
                )
            except FileNotFoundError as error:
                raise Absent(f"{name}: {error.filename} is not installed") from None

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.stop()

    @property
    def pids(self) -> list[int]:
        return proc.family(self._process.pid)

    def processes(self, name: str) -> dict[str, list[int]]:
        """The pids by name: ``starter`` for the first process if it started others, else all are
        ``name``."""
        first, *others = self.pids
        if self.starter and others:
            return {self.starter: [first], name: others}
        return {name: [first, *others]}

    def said(self) -> str:
        """The output of this run of the server so far."""
        with self.log.open("rb") as log:
            log.seek(self._said_before)
            return log.read().decode(errors="replace")

    def last_words(self) -> str:
        """The last line of its output that is not blank."""
        lines = [line for line in self.said().splitlines() if line.strip()]
        return lines[-1].strip() if lines else "it said nothing"

    def running(self) -> bool:
        return self._process.poll() is None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process that was started. Raises ProcessLookupError."""
        self._process.send_signal(number)

    def wait_until(self, ready: Callable[[], T | None]) -> T:
        """Return the first true value of ``ready``. Raises Absent if the server ends before that,
        or takes too long."""
        deadline = time.monotonic() + self.start_timeout_s
        while time.monotonic() < deadline:
            value = ready()
            if value:
                return value
            if not self.running():
                status = self._process.returncode
                raise Absent(f"{self.name} ended with status {status}: {self.last_words()}")
            time.sleep(_POLL_S)
        raise Absent(
            f"{self.name} was not ready after {self.start_timeout_s:.0f} s: {self.last_words()}"
        )

    def stop(self) -> None:
        """End it, with its descendants; returns when they are gone."""
        family = self.pids if self.running() else []
        with suppress(ProcessLookupError):
            self._process.send_signal(self._stop_signal)
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        session = self._process.pid
        if not _gone(session, family):
            with suppress(ProcessLookupError):
                os.killpg(session, signal.SIGKILL)
            _gone(session, family)


def _gone(session: int, family: Sequence[int]) -> bool:
    """Wait until all have ended; False if a process is still alive after the time limit."""
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while any(proc.lives_in(session, pid) for pid in family):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def run(name: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    """Run a program that ends by itself; returns its stdout. Raises Absent with its last line."""
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=120,
        )
    except FileNotFoundError as error:
        raise Absent(f"{name}: {error.filename} is not installed") from None
    except subprocess.TimeoutExpired:
        raise Absent(f"{name} did not end within 120 s") from None
    if done.returncode:
        words = (done.stderr.strip() or done.stdout.strip() or "it said nothing").splitlines()[-1]
        raise Absent(f"{name} ended with status {done.returncode}: {words}")
    return done.stdout
