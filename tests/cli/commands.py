"""Runs the command line as users do: in a process of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support import forking
from tests.support.forking import Forked
from tests.support.target import END_S, ROOT

COMMAND = [sys.executable, "-m", "iserblk.cli"]
STARTED = False  # True: each is started, not forked (tests/support/forking.py says what differs)
LIMIT_S = END_S * (10 if "LAB_SETUP" in os.environ else 2)
_PROGRESS = re.compile(r"^iserblk: (?:copying|verifying|comparing|measuring): .*\n", re.MULTILINE)


def environment(**changes: str) -> dict[str, str]:
    """The environment of this process, with the checkout in PYTHONPATH, and without an activated
    .venv: nbdkit would take its Python from there. ``changes`` are further variables."""
    path = os.pathsep.join(
        part for part in os.environ["PATH"].split(os.pathsep) if part != str(ROOT / ".venv/bin")
    )
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), **changes}


def iserblk(
    *arguments: object, cwd: Path | None = None, **changes: str
) -> subprocess.CompletedProcess[str]:
    """Run ``iserblk`` to its end, with an empty stdin. ``changes`` are environment variables."""
    words, env = [*map(str, arguments)], environment(**changes)
    if not STARTED:
        return forking.run("iserblk.cli", words, cwd=cwd, env=env, timeout=LIMIT_S)
    return subprocess.run(
        [*COMMAND, *words],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        cwd=cwd,
        env=env,
        timeout=LIMIT_S,
    )


def complaints(done: subprocess.CompletedProcess[str]) -> str:
    """Its stderr, without the progress that is told where a busy machine takes seconds."""
    return _PROGRESS.sub("", done.stderr)


def good(*arguments: object) -> str:
    """Run ``iserblk``, which must succeed and complain of nothing on stderr; its stdout."""
    done = iserblk(*arguments)
    assert (done.returncode, complaints(done)) == (0, ""), done
    return done.stdout


def good_json(*arguments: object) -> Any:
    return json.loads(good(*arguments, "--json"))


def bad(status: int, *arguments: object) -> str:
    """Run ``iserblk``, which must end with ``status`` and one complaint on stderr; that line."""
    done = iserblk(*arguments)
    assert done.returncode == status, done
    assert done.stdout == ""
    line, *more = complaints(done).splitlines()
    assert not more, done.stderr
    assert line.startswith("iserblk: ")
    return line


class Server:
    """A command that serves until a signal. ``url``: what it printed behind ``ready``.
    ``namespace``: the name of a network namespace to run it in; "": in ours."""

    def __init__(
        self,
        arguments: tuple[object, ...],
        log: Path,
        changes: dict[str, str],
        namespace: str = "",
    ) -> None:
        self.log = log
        words, env = [*map(str, arguments)], environment(**changes)
        within = ["nsenter", f"--net=/run/netns/{namespace}", "--"] if namespace else []
        with log.open("ab") as stderr:
            self.process = (
                subprocess.Popen(
                    [*within, *COMMAND, *words],
                    stdout=subprocess.PIPE,
                    stderr=stderr,
                    text=True,
                    env=env,
                )
                if STARTED
                else Forked(
                    "iserblk.cli",
                    words,
                    stdout=subprocess.PIPE,
                    stderr=stderr,
                    env=env,
                    namespace=namespace,
                )
            )
        assert self.process.stdout is not None
        word, _, self.url = self.process.stdout.readline().strip().partition(" ")
        if word != "ready":
            self.kill()
            raise AssertionError(log.read_text())

    def kill(self) -> None:
        """End it at once, and wait: what it had open is free."""
        self.process.kill()
        self.process.communicate()

    def end(self, number: int) -> int:
        """Send a signal and wait; the exit status. The command must have printed only the ready
        line."""
        self.process.send_signal(number)
        rest, _ = self.process.communicate(timeout=END_S)
        assert rest == ""
        return self.process.returncode  # type: ignore[return-value]


@contextmanager
def serving(*arguments: object, log: Path, namespace: str = "", **changes: str) -> Iterator[Server]:
    server = Server(arguments, log, changes, namespace)
    try:
        yield server
    finally:
        server.kill()
