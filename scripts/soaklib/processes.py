"""The processes of a soak: commands of the project, and its clients."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

TOP = Path(__file__).resolve().parents[2]
START_S = 120.0
_ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": f"{TOP / 'scripts'}:{TOP}",
    "PYTHONUNBUFFERED": "1",
}


class Broken(Exception):
    """A process did not do what it has to; the text names it."""


class Command:
    """A command of `iserblk` in the foreground, which can be started again. ``statuses``: that it
    may end with after SIGTERM."""

    def __init__(self, name: str, words: Sequence[str], log: Path, statuses: Sequence[int]) -> None:
        self.name = name
        self.log = log
        self._words = [sys.executable, "-P", "-m", "iserblk.cli", "-v", *words]  # for ``tried``
        self._statuses = statuses
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> str:
        """Returns what it says it is ready at. Raises Broken."""
        with self.log.open("ab") as log:
            # Of a session of its own: Ctrl-C is for the soak.
            self._process = process = subprocess.Popen(
                self._words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env=_ENVIRONMENT,
                start_new_session=True,
            )
        assert process.stdout is not None
        with process.stdout as stdout:
            ready, _, _ = select.select([stdout], [], [], START_S)
            line = stdout.readline().decode(errors="replace").split() if ready else []
        if line[:1] != ["ready"]:
            self.kill()
            raise Broken(f"{self.name} does not start: {self._last_line()}")
        return line[1]

    def _last_line(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        return lines[-1] if lines else "it says nothing"

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def end(self, patience_s: float) -> None:
        """SIGTERM. Raises Broken."""
        if self._process is None:
            return
        process = self._process
        process.terminate()
        try:
            status = process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise Broken(f"{self.name} has not ended {patience_s:.0f} s after SIGTERM") from None
        self._process = None
        if status not in self._statuses:
            raise Broken(
                f"{self.name} ended with status {status} after SIGTERM: {self._last_line()}"
            )

    def check(self) -> None:
        """Raises Broken where it has ended by itself."""
        if self._process is not None and self._process.poll() is not None:
            status = self._process.returncode
            self._process = None
            raise Broken(f"{self.name} ended by itself with status {status}: {self._last_line()}")


class ClientProcess:
    """A client (``soaklib.client``). ``hear`` is called with each line that it says, in a thread
    of its own."""

    def __init__(
        self, name: str, order: str, log: Path, hear: Callable[[str, dict[str, Any]], None]
    ) -> None:
        self.name = name
        self.log = log
        self._hear = hear
        with log.open("ab") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "soaklib.client", order],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=_ENVIRONMENT,
                start_new_session=True,
            )
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._hear(self.name, json.loads(line))

    def stop(self) -> None:
        """It is to end; see ``ended``."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def ended(self, patience_s: float, *, killed: bool = False) -> None:
        """Wait until it has. ``killed``: it kills itself. Raises Broken."""
        try:
            status = self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise Broken(f"{self.name} has not ended in {patience_s:.0f} s") from None
        self._thread.join()
        if status != (-signal.SIGKILL if killed else 0):
            lines = self.log.read_text(errors="replace").splitlines()
            raise Broken(f"{self.name} ended with status {status}: {lines[-1] if lines else ''}")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._thread.join()
