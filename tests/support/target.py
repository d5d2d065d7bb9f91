"""A real target process for tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.support.forking import ROOT, Forked
from tests.support.ports import free_port

IQN = "iqn.2026-11.example:disk"
END_S = 30.0


class TargetProcess:
    """The target as its own process, on a port of the loopback interface where a successor can
    come (tests/support/ports.py).

    ``url`` has no LUN. ``log``: the file that its stderr goes to.
    """

    def __init__(
        self,
        specs: list[str],
        log: Path,
        listen: str = "",
        iqn: str = IQN,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.log = log
        with log.open("ab") as stderr:
            self.process = Forked(
                "tests.support.serve",
                [listen or f"127.0.0.1:{free_port()}", iqn, *specs],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=stderr,
                # The LUNs of this process's targets are those of no other: tests that run on this
                # machine at the same time would be warned of each other's writers.
                env={**os.environ, "SERIAL": f"test-{os.getpid()}", **(environment or {})},
            )
        word, _, self.url = self._line().partition(" ")
        assert word == "ready", log.read_text()

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    @property
    def listen(self) -> str:
        """HOST:PORT, for a successor on the same port."""
        return self.url.removeprefix("iser://").partition("/")[0]

    @property
    def port(self) -> int:
        return int(self.listen.rpartition(":")[2])

    def census(self) -> dict[str, int]:
        self.process.send_signal(signal.SIGUSR1)
        counted: dict[str, int] = json.loads(self._line())
        return counted

    @property
    def memory(self) -> int:
        """Bytes of memory that are resident."""
        words = Path(f"/proc/{self.process.pid}/statm").read_text().split()
        return int(words[1]) * os.sysconf("SC_PAGE_SIZE")

    def kill(self) -> None:
        """End the process as a power failure would."""
        self.process.kill()
        self._reap()

    def pause(self) -> None:
        """Stop the process until ``resume``; its connections stay."""
        os.kill(self.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def stop(self) -> None:
        """End the process in order; fails if it does not exit cleanly."""
        if self.process.poll() is None:
            self.resume()
            self.process.terminate()
            self._reap()
            assert self.process.returncode == 0, self.log.read_text()

    def _reap(self) -> None:
        try:
            self.process.wait(END_S)
        finally:
            self.process.kill()
            assert self.process.stdout is not None
            self.process.stdout.close()
            self.process.wait()


@contextmanager
def running_target(
    specs: list[str],
    log: Path,
    listen: str = "",
    iqn: str = IQN,
    environment: Mapping[str, str] | None = None,
) -> Iterator[TargetProcess]:
    target = TargetProcess(specs, log, listen, iqn, environment)
    try:
        yield target
    finally:
        target.stop()
