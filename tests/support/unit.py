"""A systemd service without systemd: the parts of our units that matter, done as systemd does."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.support.target import END_S, ROOT


class Unit:
    """One unit file, and the variables of its EnvironmentFile (systemd.exec(5))."""

    def __init__(self, path: Path, variables: Mapping[str, str]) -> None:
        self._lines = path.read_text().splitlines()
        self._variables = variables

    def setting(self, name: str) -> str:
        (value,) = [line.partition("=")[2] for line in self._lines if line.startswith(f"{name}=")]
        return value

    def words(self, name: str) -> list[str]:
        """A command line: ``${X}`` is one word, a ``$X`` of its own as many as it holds."""
        words: list[str] = []
        for word in shlex.split(self.setting(name).removeprefix("-")):
            if re.fullmatch(r"\$\w+", word):
                words += self._variables.get(word[1:], "").split()
            else:
                words.append(re.sub(r"\$\{(\w+)\}", self._value, word).replace("$$", "$"))
        return words

    def _value(self, match: re.Match[str]) -> str:
        return self._variables.get(match[1], "")

    def run(self, name: str, **changes: str) -> subprocess.CompletedProcess[str]:
        """Run the command of another setting to its end."""
        return subprocess.run(
            self.words(name),
            capture_output=True,
            text=True,
            check=False,
            cwd="/",
            env={**self.environment(), **changes},
            timeout=END_S * 4,
        )

    def environment(self) -> dict[str, str]:
        """Of a service, but for PYTHONPATH: this checkout, whatever its command would find."""
        here = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8", "PYTHONPATH": str(ROOT)}
        return {**here, **self._variables}

    @contextmanager
    def started(self, directory: Path, patience: float = END_S) -> Iterator[subprocess.Popen[str]]:
        """Start the main process; yields it after READY=1. The test ends it, or it is killed."""
        assert self.setting("Type") == "notify"
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
            address = str(directory / "manager")
            manager.bind(address)
            manager.settimeout(patience)
            process = subprocess.Popen(
                self.words("ExecStart"),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd="/",
                env={**self.environment(), "NOTIFY_SOCKET": address},
            )
            try:
                assert manager.recv(100) == b"READY=1"
                yield process
            finally:
                process.kill()
                process.communicate()
                os.unlink(address)
