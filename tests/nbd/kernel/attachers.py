"""attach and detach as programs, over a fake kernel."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

from iserblk.nbd.kernel.orders import PROGRAM
from tests.cli.commands import environment
from tests.nbd.kernel.fake_kernel import FakeKernel
from tests.support.forking import Forked
from tests.support.target import END_S

SIZE = 8 << 20


class Attacher:
    """Runs ``iserblk`` over the fake kernel. ``by_nbdkit``: which servers attach starts."""

    def __init__(self, kernel: FakeKernel, *, by_nbdkit: bool = False) -> None:
        self.kernel = kernel
        self.by_nbdkit = by_nbdkit
        self.run = kernel.root / "run"
        self.environment = environment()

    def start(self, *arguments: object, **changes: str) -> Forked:
        words = [*map(str, arguments)]
        if words[0] == "attach" and self.by_nbdkit:
            words.insert(1, "--nbdkit")
        return Forked(
            "tests.nbd.kernel.faked",
            [str(self.kernel.root), *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**self.environment, **changes},
        )

    def ended(self, *arguments: object) -> tuple[int, str, str]:
        """Wait for the process; its exit status, stdout and stderr."""
        process = self.start(*arguments)
        out, err = process.communicate(timeout=END_S * 2)
        return process.returncode, out, err  # type: ignore[return-value]

    def good(self, *arguments: object) -> str:
        status, out, err = self.ended(*arguments)
        assert (status, err) == (0, "")
        return out

    def refused(self, expected: int, *arguments: object) -> str:
        status, out, err = self.ended(*arguments)
        assert (status, out) == (expected, ""), err
        (line,) = err.splitlines()
        return line

    def servers(self) -> list[int]:
        """The server processes whose files are below the test's directory."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = path.read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            serves = words[0].endswith("nbdkit") or PROGRAM in words
            if serves and f"{self.run}/" in " ".join(words):
                found.append(int(path.parent.name))
        return found

    def assert_nothing_left(self) -> None:
        assert self.kernel.connected() == []
        assert self.servers() == []
        assert [path for path in self.run.glob("*") if path.suffix != ".lock"] == []


def path_of(kernel: FakeKernel, name: str) -> str:
    return str(kernel.root / "dev" / name)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + END_S
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.005)
